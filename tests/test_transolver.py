"""Transolver: one source on any mesh, odd grids, noise that does not depend on the mesh."""

from functools import cache

import jax
import numpy as np
import pytest
from compiled import array_shapes, collectives, shapes_of, text_of
from conftest import (
    MESHES,
    assert_trees_close,
    cloud_inputs,
    forward,
    on_mesh,
    on_meshes,
    padded_inputs,
    placed,
    small_transolver,
    value_and_gradients,
)
from flax import nnx

import parallel
from geotransolver_jax import PhysicsAttention, Transolver
from geotransolver_jax.projection import GridProjection

OPTIONS = {"plain": {}, "plus": dict(plus=True)}
GRIDS = [(9, 7), (5, 4, 3), (85, 85), (3, 2)]


@cache
def double_model(option):
    model = small_transolver(param_dtype=np.float64, **OPTIONS[option])
    model.eval()
    return model


@cache
def double_single_device(option, points):
    return value_and_gradients(double_model(option), cloud_inputs(points, dtype=np.float64))


@on_meshes
@pytest.mark.parametrize("points", [97, 1000])
@pytest.mark.parametrize("option", OPTIONS)
def test_clouds_are_the_same_on_every_mesh(option, points, mesh, float64):
    expected = double_single_device(option, points)
    with on_mesh(mesh):
        inputs = cloud_inputs(points, dtype=np.float64)
        actual = value_and_gradients(placed(double_model(option)), inputs)
    assert_trees_close(actual, expected, 1e-12)


@on_meshes
def test_samples_of_different_length_equal_each_alone(mesh, float64):
    lengths = [97, 31]
    inputs = cloud_inputs(97, dtype=np.float64)
    ragged = {name: [v[i, :n] for i, n in enumerate(lengths)] for name, v in inputs.items()}
    with on_mesh(mesh):
        outputs, _ = value_and_gradients(placed(double_model("plain")), ragged)
    for i, output in enumerate(outputs):
        alone = {name: values[i][None] for name, values in ragged.items()}
        expected = forward(double_model("plain"), alone)[0]
        assert_trees_close(output, expected, 1e-12)


@cache
def grid_model(grid, option="plain"):
    model = small_transolver(
        param_dtype=np.float64, structured_shape=grid, n_layers=1, **OPTIONS[option]
    )
    model.eval()
    return model


def grid_inputs(grid):
    draw = np.random.default_rng(0).standard_normal((2, *grid, 5))
    return dict(fx=draw[..., :2], embedding=draw[..., 2:])


@pytest.mark.parametrize("mesh", [dict(points=8), dict(data=2, points=2, heads=2)], ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_grids_of_any_number_of_rows_are_the_same_on_every_mesh(grid, mesh, float64):
    expected = value_and_gradients(grid_model(grid), grid_inputs(grid))
    with on_mesh(mesh):
        actual = value_and_gradients(placed(grid_model(grid)), grid_inputs(grid))
    assert_trees_close(actual, expected, 1e-12)


def test_flat_and_spatial_grids_agree(float64):
    grid = (9, 7)
    flat = {name: x.reshape(2, 63, -1) for name, x in grid_inputs(grid).items()}
    with on_mesh(dict(points=8)):
        model = placed(grid_model(grid))
        spatial_output, _ = value_and_gradients(model, grid_inputs(grid))
        flat_output, _ = value_and_gradients(model, flat)
    np.testing.assert_array_equal(flat_output, spatial_output.reshape(2, 63, -1))


@on_meshes
def test_gumbel_noise_and_dropout_are_the_same_on_every_mesh(mesh, float64):
    options = dict(plus=True, dropout=0.3, param_dtype=np.float64)
    inputs = cloud_inputs(97, dtype=np.float64)
    expected = value_and_gradients(small_transolver(**options), inputs)
    with on_mesh(mesh):
        actual = value_and_gradients(placed(small_transolver(**options)), inputs)
    assert_trees_close(actual, expected, 1e-12)


def test_noise_is_drawn_in_training_only_and_anew():
    model = small_transolver(plus=True)
    inputs = cloud_inputs(31)
    assert np.abs(model(**inputs) - model(**inputs)).max() > 1e-3
    model.eval()
    np.testing.assert_array_equal(model(**inputs), model(**inputs))


@pytest.mark.parametrize("garbage", [np.nan, 1e30])
def test_values_of_padding_reach_nothing(garbage):
    model = small_transolver()
    padded, mask = padded_inputs([97, 50], 120, garbage)
    for i, count in enumerate([97, 50]):
        alone = {name: x[i : i + 1, :count] for name, x in padded.items()}
        output = forward(model, padded, mask)[i]
        assert_trees_close(output[:count], forward(model, alone)[0], 1e-5)
        np.testing.assert_array_equal(output[count:], 0)


@pytest.mark.parametrize("points", [1024, 16_384])
def test_a_layer_exchanges_one_array_forward_and_one_backward(points):
    batch, dim, heads, slices = 2, 16, 2, 127
    graph, weights = nnx.split(PhysicsAttention(dim, heads, slices, rngs=nnx.Rngs(0)))

    def apply(weights, x):
        return nnx.merge(graph, weights)(x)

    def step(weights, x, d_y):
        return jax.vjp(apply, weights, x)[1](d_y)

    x = jax.ShapeDtypeStruct((batch, points, dim), np.float32)
    with on_mesh(MESHES["points8"]):
        forward_text, text = text_of(apply, weights, x), text_of(step, weights, x, x)
    packed, tokens = slices * (dim // heads + 1), slices * dim // heads
    assert [(c.kind, c.shapes) for c in collectives(forward_text)] == [
        ("all-reduce", ((batch, heads, packed),))
    ]
    found = collectives(text)
    assert {c.kind for c in found} == {"all-reduce"}
    shapes = shapes_of(found)
    assert shapes["all-reduce", (batch, heads, packed)] == 1
    assert shapes["all-reduce", (batch, heads, tokens)] == 1
    # The gradients of weights come beside; nothing is of the number of points.
    assert all(np.prod(shape) <= 4 * dim * slices for _, shape in shapes)
    assert not [a for a in array_shapes(text) if slices in a and np.prod(a) >= points * slices]


def test_initial_weights_are_distributed_as_in_the_reference():
    model = Transolver(2, 1, 3, n_hidden=128, n_head=4, structured_shape=(8, 8), rngs=nnx.Rngs(0))
    attention = model.stack.blocks.attention
    assert np.std(attention.project_slice.kernel[...]) == pytest.approx(0.02, rel=0.05)
    np.testing.assert_array_equal(attention.temperature[...], 0.5)
    bound = (128 * 9) ** -0.5
    kernel = np.asarray(attention.project_point.kernel[...])
    assert np.abs(kernel).max() <= bound
    assert np.std(kernel) == pytest.approx(bound / np.sqrt(3), rel=0.02)


def test_bfloat16_gradient_of_a_grid_bias_is_gathered_in_float32():
    projection = GridProjection(3, 4, (65,), rngs=nnx.Rngs(0), dtype=np.dtype("bfloat16"))
    x = np.ones((1, 65 * 65, 3), np.float32)

    def total(projection):
        return projection(x).astype(np.float32).sum()

    gradient = nnx.grad(total)(projection)["bias"][...]
    # In bfloat16 the sum would end far below: more than 256 ones make no difference to it.
    np.testing.assert_allclose(gradient, 65 * 65, rtol=1e-3)


def test_structured_shape_of_one_axis_is_refused():
    with pytest.raises(ValueError, match="structured_shape: expected 2 or 3 positive integers"):
        small_transolver(structured_shape=(9,))


def test_shards_thinner_than_a_row_of_the_grid_hold_whole_rows():
    with on_mesh(MESHES["points8"]):
        x, _ = parallel.shard_points(np.ones((1, 6, 2), np.float32), structured_shape=(3, 2))
    assert x.shape == (1, 16, 2)
