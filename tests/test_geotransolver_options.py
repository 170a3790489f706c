"""GeoTransolver: grids, local features, dropout rates and initial weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_trees_close, on_mesh, placed
from flax import nnx
from geotransolver_steps import (
    CONTEXT,
    OPTIONS,
    double_model,
    evaluated,
    inputs_of,
    sharded_step,
    small,
    step,
    untouched,
)

from geotransolver_jax import GeoTransolver, Neighborhoods
from geotransolver_jax.concrete_dropout import ConcreteDropout, dropout_rates, regularization_loss
from geotransolver_jax.geotransolver import _two_rows_a_shard
from parallel.neighbors import Neighbors

# Grids -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention_type", ["GALE", "GALE_FA"])
@pytest.mark.parametrize("grid", [(9, 7), (5, 4, 3), (3, 2)], ids=str)
def test_grids_of_any_number_of_rows_are_the_same_on_every_mesh(grid, attention_type, float64):
    options = dict(structured_shape=list(grid), n_layers=1, attention_type=attention_type)
    model = evaluated(small(**CONTEXT, **options, param_dtype=np.float64))
    inputs = inputs_of(model, 0, 0, grid=grid)
    expected = step(model, inputs)
    with on_mesh(dict(points=8)):
        actual = sharded_step(placed(model), inputs, grid)
    assert_trees_close(actual, expected, 1e-12)


def test_a_large_grid_is_the_same_on_a_mesh(float64):
    grid = (85, 85)
    model = evaluated(small(geometry_dim=3, structured_shape=grid, n_layers=1, param_dtype=float64))
    inputs = inputs_of(model, 0, 0, batch=1, grid=grid)
    expected = step(model, inputs)
    with on_mesh(dict(points=8)):
        actual = sharded_step(placed(model), inputs, grid)
    assert_trees_close(actual, expected, 1e-12)


def test_flat_and_spatial_grids_agree(float64):
    grid = (9, 7)
    model = evaluated(small(geometry_dim=3, structured_shape=grid, n_layers=1, param_dtype=float64))
    inputs = inputs_of(model, 0, 0, grid=grid)
    flat = {name: x.reshape(2, 63, -1) for name, x in inputs.items()}
    mixed = {**inputs, "geometry": flat["geometry"]}
    expected = model(**inputs)
    assert expected.shape == (2, 9, 7, 2)
    np.testing.assert_array_equal(model(**flat), expected.reshape(2, 63, 2))
    np.testing.assert_array_equal(model(**mixed), expected)


# Local features ----------------------------------------------------------------------------------


def neighbors_by_hand(queries, points, radius: float, count: int) -> Neighbors:
    """What a data pipeline would find with a k-d tree."""
    distances = np.linalg.norm(queries[:, :, None] - points[:, None], axis=-1)
    order = np.argsort(distances, axis=-1, kind="stable")[..., :count]
    nearest = np.take_along_axis(distances, order, -1)
    inside = nearest <= radius
    return Neighbors(
        np.where(inside, order, -1).astype(np.int32), np.where(inside, nearest, np.inf)
    )


@pytest.mark.parametrize("mesh", [None, dict(points=8)], ids=str)
def test_neighbours_may_be_found_before(mesh, float64, monkeypatch):
    model = double_model("local")
    inputs = inputs_of(model, 97, 61)
    positions, geometry = inputs["local_positions"], inputs["geometry"]
    expected = step(model, inputs)
    found = Neighborhoods(
        neighbors_by_hand(positions, geometry, 2.0, 6),
        neighbors_by_hand(geometry, positions, 2.0, 6),
    )
    assert (found.of_points.indices < 0).any()

    def refuse(*_):
        raise AssertionError("nothing is to be searched")

    monkeypatch.setattr("geotransolver_jax.context.ContextBuilder.search", refuse)
    with on_mesh(mesh):
        actual = step(placed(model), inputs, {"neighborhoods": found})
    assert_trees_close(actual, expected, 1e-12)


def test_points_and_geometry_far_apart_have_no_local_features():
    model = evaluated(small(**OPTIONS["local"]))
    inputs = {k: x.astype(np.float32) for k, x in inputs_of(model, 20, 10).items()}
    far = inputs | {"local_positions": inputs["local_positions"] + 100}
    farther = inputs | {"local_positions": inputs["local_positions"] + 1000}
    np.testing.assert_array_equal(model(**far), model(**farther))
    assert np.abs(model(**inputs) - model(**far)).max() > 1e-4


# Global tokens -----------------------------------------------------------------------------------


def test_no_shard_has_a_single_token():
    token = np.ones((1, 1, 2), np.float32)
    x, *rest = _two_rows_a_shard(token, None)
    assert x.shape == (1, 1, 2)
    assert rest == [None, None]
    with on_mesh(dict(points=8)):
        x, mask, number = jax.jit(_two_rows_a_shard)(np.ones((3, 8, 2), np.float32), None)
        assert x.shape == (3, 16, 2)
        np.testing.assert_array_equal(mask.sum(1), 8)
        np.testing.assert_array_equal(np.asarray(x)[np.asarray(mask)], 1)
        np.testing.assert_array_equal(np.asarray(x)[~np.asarray(mask)], 0)
        np.testing.assert_array_equal(np.asarray(number)[0][np.asarray(mask)[0]], range(8))
        x, *_ = jax.jit(_two_rows_a_shard)(np.ones((1, 16, 2), np.float32), None)
        assert x.shape == (1, 16, 2)
    with on_mesh(dict(data=8)):
        x, *_ = jax.jit(_two_rows_a_shard)(np.ones((8, 1, 2), np.float32), None)
        assert x.shape == (8, 2, 2)


# Dropout rates -----------------------------------------------------------------------------------


def test_rates_of_concrete_dropout_are_read_and_regularized():
    model = untouched(**CONTEXT, concrete_dropout=True, dropout=0.2)
    rates = dropout_rates(model)
    of_block = ("attention.concrete", "attention_dropout", "mlp_dropout")
    blocks = [f"stack.blocks.{i}.{name}" for i in range(2) for name in of_block]
    assert set(rates) == {"context.geometry.concrete", "context.globals.concrete", *blocks}
    assert all(rate == pytest.approx(0.2) for rate in rates.values())
    entropy = 0.2 * np.log(0.2) + 0.8 * np.log(0.8)
    assert regularization_loss(model) == pytest.approx(8 * entropy, rel=1e-5)
    gradient = nnx.grad(regularization_loss)(model)
    slopes = [leaf for leaf in jax.tree.leaves(gradient) if np.abs(leaf).max() > 0]
    # d/dlogit of the negative entropy is rate (1 - rate) logit.
    for slope in slopes:
        np.testing.assert_allclose(slope, 0.2 * 0.8 * np.log(0.25), rtol=1e-4)
    assert sum(np.size(slope) for slope in slopes) == 8


def test_models_without_concrete_dropout_have_no_rates():
    model = small(**CONTEXT)
    assert dropout_rates(model) == {}
    assert regularization_loss(model) == 0


def test_concrete_dropout_starts_at_no_less_than_the_reference_does():
    rates = dropout_rates(untouched(concrete_dropout=True, dropout=0.0))
    assert len(rates) == 6
    assert all(rate == pytest.approx(0.05) for rate in rates.values())


def test_rate_beyond_its_bound_still_gets_a_gradient():
    dropout = ConcreteDropout(0.1)
    dropout.logit[...] = -30.0

    def loss(dropout):
        return jnp.sum(dropout(jnp.ones((4, 4096, 8)), jax.random.key(0)) ** 2)

    gradient = nnx.grad(loss)(dropout)["logit"][...]
    assert np.isfinite(gradient)
    assert np.abs(gradient) > 0


# Weights -----------------------------------------------------------------------------------------


def test_initial_weights_are_distributed_as_in_the_reference():
    model = GeoTransolver(
        5, 1, 3, 2, n_hidden=128, n_head=4, slice_num=16, n_layers=1, rngs=nnx.Rngs(0)
    )
    attention = model.stack.blocks.attention
    slices = np.asarray(attention.project_slice.kernel[...])[0]
    np.testing.assert_allclose(slices.T @ slices, np.eye(16), atol=1e-5)
    for layer, inputs in (
        (attention.project_point, 128),
        (attention.cross.key, 64),
        (model.context.geometry.project_point, 3),
        (model.context.geometry.project_slice, 32),
        (model.preprocess[0].linear_in, 5),
        (model.project_out[0], 128),
    ):
        bound = inputs**-0.5
        for weight in (layer.kernel[...], layer.bias[...]):
            assert np.abs(weight).max() <= bound
        assert np.std(layer.kernel[...]) == pytest.approx(bound / np.sqrt(3), rel=0.1)
    np.testing.assert_array_equal(attention.temperature[...], 0.5)
    np.testing.assert_array_equal(attention.cross.mixing[...], 0)


def test_width_of_heads_need_not_divide_that_of_the_points():
    # 16 + 2 x 5 channels in 4 heads of 6: as in the reference, the heads are narrower together.
    model = evaluated(small(**OPTIONS["local"]))
    attention = model.stack.blocks.attention
    assert attention.project_point.kernel.shape[1:] == (26, 24)
    assert attention.project_out.kernel.shape[1:] == (24, 26)


def test_hidden_width_need_not_divide_over_the_heads(float64):
    # 16 + 2 x 5 channels: the perceptron is then whole on every device.
    model = evaluated(small(**OPTIONS["local"], mlp_ratio=1, n_layers=1, param_dtype=float64))
    inputs = inputs_of(model, 19, 11)
    expected = step(model, inputs)
    with on_mesh(dict(points=2, heads=4)):
        copy = placed(model)
        assert copy.stack.blocks.mlp.linear_in.kernel[...].sharding.is_fully_replicated
        assert not copy.stack.blocks.attention.project_out.kernel[...].sharding.is_fully_replicated
        actual = sharded_step(copy, inputs)
    assert_trees_close(actual, expected, 1e-12)
