"""Random numbers of points depend on the seed alone: not on the mesh, nor on padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    MESHES,
    assert_trees_close,
    cloud_inputs,
    forward,
    on_any_mesh,
    on_mesh,
    on_meshes,
    placed,
    small_flare,
    value_and_gradients,
)
from flax import nnx

import parallel
from flare_jax.block import BlockStack
from parallel.mesh import constrain

KEY = jax.random.key(7)
POINTS = 97


def draws(padded):
    """Uniform numbers, and ones dropped out, of points on the mesh of the context."""
    numbers = parallel.points_uniform(KEY, (2, padded, 3))
    ones = constrain(jnp.ones((2, padded, 3)), "data", "points", None)
    return constrain(numbers, "data", "points", None), parallel.points_dropout(ones, 0.3, KEY)


@on_any_mesh
def test_numbers_of_real_points_do_not_depend_on_mesh_or_padding(mesh):
    expected = [np.asarray(array) for array in draws(POINTS)]
    with on_mesh(mesh):
        padded = jax.jit(lambda: (draws(104), draws(160)))()
    for length, arrays in zip((104, 160), padded, strict=True):
        for actual, wanted in zip(arrays, expected, strict=True):
            assert actual.shape == (2, length, 3)
            np.testing.assert_array_equal(np.asarray(actual)[:, :POINTS], wanted)


def test_uniform_numbers_fill_the_unit_interval():
    numbers = np.asarray(parallel.points_uniform(KEY, (2, 5000, 4)))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    # 40,000 numbers: five standard errors.
    assert abs(numbers.mean() - 1 / 2) < 5 * np.sqrt(1 / 12 / numbers.size)
    assert abs(np.corrcoef(numbers[0].ravel(), numbers[1].ravel())[0, 1]) < 5 / np.sqrt(20_000)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_rate_and_the_mean(rate):
    x = jnp.ones((2, 5000, 4))
    dropped = np.asarray(parallel.points_dropout(x, rate, KEY))
    error = 5 * np.sqrt(rate * (1 - rate) / dropped.size)
    assert abs((dropped == 0).mean() - rate) < error
    np.testing.assert_allclose(dropped[dropped != 0], 1 / (1 - rate), rtol=1e-6)


def test_dropout_without_key_or_rate_changes_nothing():
    x = jnp.ones((1, 4, 2))
    assert parallel.points_dropout(x, 0.5, None) is x
    assert parallel.points_dropout(x, 0.0, KEY) is x


def test_dropout_keeps_the_type():
    assert parallel.points_dropout(jnp.ones((1, 4, 2), jnp.bfloat16), 0.5, KEY).dtype == "bfloat16"


# In the model ------------------------------------------------------------------------------------

INPUTS = cloud_inputs(POINTS)


@pytest.fixture(scope="module")
def model():
    return small_flare(dropout=0.3)


@pytest.fixture(scope="module")
def single_device(model):
    return value_and_gradients(model, INPUTS)


@on_meshes
def test_training_with_dropout_is_the_same_on_every_mesh(mesh, model, single_device):
    with on_mesh(mesh):
        output, gradients = value_and_gradients(placed(model), INPUTS)
    assert_trees_close(output, single_device[0], 1e-5)
    assert_trees_close(gradients, single_device[1], 5e-5)


def test_every_call_of_training_draws_anew_and_evaluation_has_no_noise(model):
    with on_mesh(MESHES["data2_points4"]):
        model, same = placed(model), placed(model)
        first, second = model(**INPUTS), model(**INPUTS)
        assert np.abs(first - second).max() > 1e-3
        np.testing.assert_array_equal(same(**INPUTS), first)

        model.eval()
        evaluated = model(**INPUTS)
        np.testing.assert_array_equal(model(**INPUTS), evaluated)
        assert np.abs(first - evaluated).max() > 1e-3
        without = forward(placed(small_flare(dropout=0.0)), INPUTS)
        assert_trees_close(without, evaluated, 1e-6)

        model.train()
        assert np.abs(model(**INPUTS) - evaluated).max() > 1e-3


def test_every_layer_draws_its_own():
    class NoiseMinusInput(nnx.Module):
        def __call__(self, x, point_mask, dropout_key):
            return parallel.points_uniform(dropout_key, x.shape) - x

    stack = BlockStack(lambda rngs: NoiseMinusInput(), 2, rngs=nnx.Rngs(0))
    difference = stack(jnp.zeros((1, 50, 2)), None, key=KEY)
    # Of two uniform numbers; of the same one twice it would be zero.
    assert np.abs(difference).mean() > 0.2
