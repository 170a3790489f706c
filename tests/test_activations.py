"""Activations have the values and gradients of PyTorch, by the names of PhysicsNeMo 2.2.2.

`golden/activations.npz` holds, for each name in its `ACT2FN`, `y` and `dy/dx` at points `x` off the
kinks, in float64; and the learned number of `prelu` and `stan` with the gradient of `sum(y)`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilation import OPTIMIZED
from conftest import GOLDEN, assert_trees_close
from flax import nnx

from flare_jax.activations import Activation

with np.load(GOLDEN / "activations.npz") as archive:
    REFERENCE = dict(archive)
NAMES = sorted({key.split("/")[0] for key in REFERENCE} - {"x"})
TOLERANCES = {"float32": 1e-6, "float64": 1e-12}


def test_every_name_is_compared():
    with pytest.raises(ValueError, match="act: expected one of") as error:
        Activation("nothing")
    names = str(error.value).removeprefix("act: expected one of ").split(";")[0].split(", ")
    assert names == NAMES
    assert len(names) == 24


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_those_of_pytorch(name):
    for dtype, tolerance in TOLERANCES.items():
        with jax.enable_x64(dtype == "float64"):
            x = jnp.asarray(REFERENCE["x"], dtype)[:, None]
            graph, state = nnx.split(Activation(name, param_dtype=dtype))

            def total(state, x, graph=graph):
                y = nnx.merge(graph, state)(x)
                return y.sum(), y

            # Optimized, as users compile it: XLA's plain emitters have a tanh that is 1.8e-7 off,
            # and not 1.5e-7; the gradient of `stan` at 6 multiplies that by more than ten.
            differentiate = jax.jit(
                jax.value_and_grad(total, argnums=(0, 1), has_aux=True), compiler_options=OPTIMIZED
            )
            (_, y), (d_activation, d_x) = differentiate(state, x)
            learned = jax.tree.leaves(state)
            actual = {"y": y[:, 0], "dy": d_x[:, 0]}
            if learned:
                actual["parameter"] = learned[0]
                actual["dparameter"] = jax.tree.leaves(d_activation)[0]
            assert y.dtype == dtype
            expected = {leaf: REFERENCE[f"{name}/{leaf}"] for leaf in actual}
            assert_trees_close(actual, expected, tolerance)
    assert len(learned) == sum(key == f"{name}/parameter" for key in REFERENCE)


@pytest.mark.parametrize("name", ["GELU", "Silu", "PReLU"])
def test_case_of_a_name_does_not_matter(name):
    x = jnp.linspace(-2, 2, 5)
    np.testing.assert_array_equal(Activation(name)(x), Activation(name.lower())(x))


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_stays_bfloat16(name):
    assert Activation(name)(jnp.ones((3, 2), jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["prelu", "stan"])
def test_gradient_of_a_learned_number_is_added_in_float32(name):
    # A bfloat16 sum of 4,096 equal numbers would stop growing at 256 of them.
    x = jnp.full((4096, 1), -1, jnp.bfloat16)
    total = lambda activation: activation(x).astype(jnp.float32).sum()  # noqa: E731
    (gradient,) = jax.tree.leaves(nnx.grad(total)(Activation(name)))
    slope = -1.0 if name == "prelu" else np.tanh(1.0)
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, [4096 * slope], rtol=1e-2)


def test_unknown_name_is_named():
    with pytest.raises(ValueError, match=r"act: expected one of .*, gelu, .*; got 'gelo'"):
        Activation("gelo")
