"""Attention through a fused kernel: its mathematics, with a stand-in for the kernel.

cuDNN's kernel runs on NVIDIA GPUs alone. Its definition stands in for it here, in types that it
does not have, too; and XLA's implementation of the same function, which takes the same arguments.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import collectives, shapes_of, text_of
from conftest import (
    MESHES,
    assert_trees_close,
    cloud_inputs,
    on_any_mesh,
    on_mesh,
    padded_inputs,
    placed,
    small_flare,
    step,
    value_and_gradients,
)
from flax import nnx
from geotransolver_steps import CONTEXT, inputs_of, sharded_step
from geotransolver_steps import small as small_geotransolver
from geotransolver_steps import step as geotransolver_step

from flare_jax import FLAREAttention, fused

FUSED = dict(attention_backend="cudnn")
KERNEL = fused._kernel


def definition(query, key, value):
    """Softmax attention, its sums in float32 or wider."""
    dtype = jnp.result_type(query, jnp.float32)
    scores = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=dtype)
    shares = jax.nn.softmax(scores, -1).astype(value.dtype)
    result = jnp.einsum("bhts,bshd->bthd", shares, value, preferred_element_type=dtype)
    return result.astype(query.dtype)


@pytest.fixture(scope="module", autouse=True)
def stand_in():
    """The definition in the place of cuDNN's kernel, of any type and on a CPU."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(fused, "_kernel", definition)
        monkeypatch.setattr(fused, "_NARROW", ("bfloat16", "float32", "float64"))
        monkeypatch.setattr(fused, "uses_kernel", lambda backend: backend == "cudnn")
        jax.clear_caches()
        yield
    jax.clear_caches()


def test_kernel_is_called_by_its_definition(monkeypatch):
    monkeypatch.setattr(fused, "_IMPLEMENTATION", "xla")
    draw = np.random.default_rng(0).standard_normal
    query, key, value = (draw((2, n, 3, 8)).astype(np.float32) for n in (5, 7, 7))
    expected = definition(query, key, value)
    np.testing.assert_allclose(KERNEL(query, key, value), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("queries", "keys"), [(5, 7), (6, 7), (5, 8)])
def test_kernel_sees_even_numbers(queries, keys, monkeypatch):
    def even(query, key, value):
        assert query.shape[1] % 2 == key.shape[1] % 2 == 0
        return definition(query, key, value)

    monkeypatch.setattr(fused, "_kernel", even)
    draw = np.random.default_rng(0).standard_normal
    query, key, value = (draw((2, n, 3, 8)).astype(np.float32) for n in (queries, keys, keys))
    query[..., 5] = 1
    actual = fused._attend(*map(jnp.asarray, (query, key, value)), 5)
    np.testing.assert_allclose(actual, definition(query, key, value), rtol=1e-5, atol=1e-6)


@on_any_mesh
def test_flare_is_the_same_by_either_backend(mesh, float64):
    inputs = cloud_inputs(97, 2, np.float64)
    expected = value_and_gradients(small_flare(param_dtype=np.float64), inputs)
    with on_mesh(mesh):
        model = placed(small_flare(param_dtype=np.float64, **FUSED))
        actual = value_and_gradients(model, inputs)
    assert_trees_close(actual, expected, 1e-12)


@pytest.mark.parametrize("state_mixing_mode", ["weighted", "concat_project"])
@pytest.mark.parametrize("mesh", [None, MESHES["data2_points4"]], ids=["single", "data2_points4"])
def test_gale_fa_is_the_same_by_either_backend(mesh, state_mixing_mode, float64):
    options = dict(
        **CONTEXT,
        attention_type="GALE_FA",
        state_mixing_mode=state_mixing_mode,
        param_dtype=np.float64,
    )
    model = small_geotransolver(**options)
    inputs = inputs_of(model, 97, 61)
    run = geotransolver_step if mesh is None else sharded_step
    with on_mesh(mesh):
        actual = run(placed(small_geotransolver(**options, **FUSED)), inputs)
    assert_trees_close(actual, geotransolver_step(model, inputs), 1e-12)


@pytest.mark.parametrize("garbage", [np.nan, 1e30])
def test_padding_is_invisible_to_the_kernel(garbage):
    expected = step(small_flare(), *padded_inputs([61, 17], 96, garbage))
    actual = step(small_flare(**FUSED), *padded_inputs([61, 17], 96, garbage))
    assert_trees_close(actual, expected, 1e-5)


def test_a_shard_of_padding_alone_changes_nothing(float64):
    samples = cloud_inputs(97, 2, np.float64)
    ragged = {name: [value[0], value[1, :9]] for name, value in samples.items()}
    expected = value_and_gradients(small_flare(param_dtype=np.float64), ragged)
    with on_mesh(MESHES["points8"]):
        model = placed(small_flare(param_dtype=np.float64, **FUSED))
        assert_trees_close(value_and_gradients(model, ragged), expected, 1e-12)


def layer(backend: str, dtype, shift: float):
    """A FLARE layer; all scores of a latent are shifted, which no softmax over points sees."""
    made = FLAREAttention(
        32, 2, 16, initial="uniform", attention_backend=backend, dtype=dtype, rngs=nnx.Rngs(0)
    )
    made.project_key.bias[...] += shift
    return made


@pytest.mark.parametrize("shift", [0.0, -20.0, 20.0])
def test_bfloat16_is_as_exact_as_chunks_are(shift):
    x = jnp.float32(np.random.default_rng(0).standard_normal((1, 2000, 32)))

    def run(backend, dtype):
        graph, weights = nnx.split(layer(backend, dtype, shift))
        loss = lambda weights, x: jnp.sum(jnp.sin(nnx.merge(graph, weights)(x)))  # noqa: E731
        y = nnx.merge(graph, weights)(x)
        return y.astype(jnp.float32), jax.grad(loss, argnums=1)(weights, x)

    exact, chunks, kernel = run("xla", "float32"), run("xla", "bfloat16"), run("cudnn", "bfloat16")
    for expected, by_chunks, by_kernel in zip(exact, chunks, kernel, strict=True):
        error = lambda a: float(jnp.abs(a - expected).max() / jnp.abs(expected).max())  # noqa: B023, E731
        assert error(by_kernel) < 2 * error(by_chunks) + 4e-3


@pytest.mark.parametrize("mesh", [None, dict(points=4, heads=2)], ids=["single", "points4_heads2"])
@pytest.mark.parametrize("factor", [12, 100])
def test_scores_may_spread(factor, mesh):
    """Until one point takes all of a latent."""

    def run(backend):
        made = placed(layer(backend, "float32", 0.0))
        made.latent_queries[...] *= factor
        graph, weights = nnx.split(made)
        x = jnp.float32(np.random.default_rng(0).standard_normal((2, 64, 32)))
        mask = jnp.arange(64) < jnp.array([[60], [40]])

        def loss(weights, x):
            y = nnx.merge(graph, weights)(x, mask)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(weights, x)

    expected = run("xla")
    with on_mesh(mesh):
        assert_trees_close(run("cudnn"), expected, 2e-5 * factor)


def test_the_kernel_exchanges_a_maximum_and_one_packed_sum_forward():
    graph, weights = nnx.split(layer("cudnn", "float32", 0.0))
    x = jax.ShapeDtypeStruct((2, 424, 32), jnp.float32)
    with on_mesh(MESHES["points8"]):
        forward = lambda weights, x: nnx.merge(graph, weights)(x)  # noqa: E731
        found = shapes_of(collectives(text_of(forward, weights, x)))
    maximum, packed = ("all-reduce", (2, 2, 16)), ("all-reduce", (2, 2, 16 * (16 + 1)))
    assert found == Counter({maximum: 1, packed: 1})


def test_auto_is_xla():
    inputs = cloud_inputs(16)
    expected = small_flare(attention_backend="xla")(**inputs)
    np.testing.assert_array_equal(small_flare(attention_backend="auto")(**inputs), expected)
