"""FLARE: one source on any mesh, inputs as they come, padding invisible."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import (
    MESHES,
    assert_trees_close,
    cloud_inputs,
    forward,
    on_any_mesh,
    on_mesh,
    on_meshes,
    padded_inputs,
    placed,
    small_flare,
    step,
    value_and_gradients,
)
from flax import nnx

import parallel


def assert_same(actual, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# Law 1: one source, any mesh ---------------------------------------------------------------------


@cache
def double_model():
    return small_flare(param_dtype=np.float64)


@cache
def double_single_device(points: int, batch: int = 2):
    return value_and_gradients(double_model(), cloud_inputs(points, batch, np.float64))


@on_meshes
@pytest.mark.parametrize("points", [97, 1000])
def test_outputs_and_gradients_are_the_same_on_every_mesh(mesh, points, float64):
    with on_mesh(mesh):
        actual = value_and_gradients(placed(double_model()), cloud_inputs(points, 2, float64))
    assert_trees_close(actual, double_single_device(points), 1e-12)


@on_any_mesh
def test_each_sample_of_a_ragged_batch_is_as_if_alone(mesh, float64):
    lengths = [97, 41]
    samples = cloud_inputs(97, 2, float64)
    ragged = {
        name: [sample[:length] for sample, length in zip(value, lengths, strict=True)]
        for name, value in samples.items()
    }
    with on_mesh(mesh):
        output, (d_params, d_inputs) = value_and_gradients(placed(double_model()), ragged)
    alone = [alone_in_double(sample, length) for sample, length in enumerate(lengths)]
    for sample, (expected, (_, d_expected)) in enumerate(alone):
        assert_trees_close(output[sample], expected[0], 1e-12)
        assert_trees_close({k: v[sample] for k, v in d_inputs.items()}, d_expected, 1e-12)
    total = jax.tree.map(np.add, *(d_params for _, (d_params, _) in alone))
    assert_trees_close(d_params, total, 1e-12)


@cache
def alone_in_double(sample: int, length: int):
    """A sample by itself on one device; its input gradients without the batch axis."""
    inputs = {
        name: value[sample : sample + 1, :length]
        for name, value in cloud_inputs(97, 2, np.float64).items()
    }
    output, (d_params, d_inputs) = value_and_gradients(double_model(), inputs)
    return output, (d_params, {name: value[0] for name, value in d_inputs.items()})


def test_float32_is_the_same_on_a_mesh(model, single_device):
    with on_mesh(MESHES["data2_points2_heads2"]):
        output, gradients = value_and_gradients(placed(model), cloud_inputs(97))
    assert_trees_close(output, single_device[0], 1e-5)
    assert_trees_close(gradients, single_device[1], 5e-5)


@on_meshes
def test_initial_weights_are_the_same_on_every_mesh(mesh):
    assert_same(initial_weights(mesh), initial_weights(None))


def initial_weights(mesh) -> dict:
    with on_mesh(mesh):
        # Kernels of few different shapes, for each shape is drawn by a program of its own.
        model = small_flare(
            functional_dim=4,
            out_dim=8,
            embedding_dim=4,
            n_hidden=8,
            n_head=2,
            slice_num=4,
            mlp_ratio=2,
            act="prelu",
            time_input=True,
        )
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))


TRAINING_MESHES = {name: MESHES[name] for name in ("points8", "data2_points2_heads2")}


@pytest.mark.parametrize("mesh", TRAINING_MESHES.values(), ids=TRAINING_MESHES)
def test_training_gives_the_same_weights_on_every_mesh(mesh, model):
    assert_trees_close(trained(model, mesh), trained(model, None), 1e-5)


def trained(model, axes, steps: int = 20) -> dict:
    """Weights after some steps of AdamW."""
    with on_mesh(axes):
        graph, params, rest = nnx.split(placed(model), nnx.Param, ...)
        optimizer = optax.adamw(1e-3)
        inputs = cloud_inputs(97)
        target = np.sin(3 * inputs["embedding"][..., :2])
        (fx, mask), (embedding, _), (target, _) = map(
            parallel.shard_points, (inputs["fx"], inputs["embedding"], target)
        )

        def update(params, state):
            def loss(params):
                y = nnx.merge(graph, params, rest)(fx, embedding, point_mask=mask)
                return parallel.masked_mean((y - target) ** 2, mask).mean()

            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        update = jax.jit(update, donate_argnums=(0, 1))
        params = jax.tree.map(jnp.copy, params)  # the model's own must not be given away
        state = optimizer.init(params)
        for _ in range(steps):
            params, state = update(params, state)
    return nnx.to_pure_dict(params)


# Inputs as they come -----------------------------------------------------------------------------


@on_meshes
def test_unsharded_inputs_count_as_replicated(mesh, model, single_device):
    host = cloud_inputs(97)  # 97 divides by no mesh
    on_one = jax.device_put(host, jax.devices()[1])
    uncommitted = jax.tree.map(jnp.asarray, host)
    with on_mesh(mesh):
        on_the_mesh = placed(model)
        replicated = jax.tree.map(jnp.asarray, host)
        for inputs in (host, on_one, uncommitted, replicated):
            output = on_the_mesh(**inputs)
            assert output.shape == (2, 97, 2)
            assert_trees_close(output, single_device[0], 1e-5)


def test_inputs_may_differ_in_how_they_are_sharded(model, single_device):
    inputs = cloud_inputs(97)
    with on_mesh(MESHES["points4_heads2"]):
        fx, mask = parallel.shard_points(inputs["fx"])
        embedding = np.pad(inputs["embedding"], [(0, 0), (0, 3), (0, 0)])
        output = placed(model)(fx, jax.device_put(embedding, jax.devices()[0]), point_mask=mask)
        assert output.sharding.is_equivalent_to(fx.sharding, 3)
        output = parallel.unshard_points(output, num_points=97)
    assert_trees_close(output, single_device[0], 1e-5)


@pytest.mark.parametrize("grid", [(9, 7), (5, 4, 3)], ids=["2d", "3d"])
def test_flat_and_spatial_grids_agree_and_come_back_as_given(grid):
    model = small_flare(structured_shape=list(grid))
    flat = cloud_inputs(int(np.prod(grid)))
    spatial = {name: value.reshape(2, *grid, -1) for name, value in flat.items()}
    mixed = dict(fx=spatial["fx"], embedding=flat["embedding"])
    expected = np.asarray(forward(model, flat))
    assert expected.shape == (2, np.prod(grid), 2)
    assert_same(forward(model, spatial), expected.reshape(2, *grid, 2))
    with on_mesh(MESHES["data2_points4"]):
        on_the_mesh = placed(model)
        # Neither grid divides by four rows: unsharded it is padded by the model.
        output = np.asarray(forward(on_the_mesh, spatial))
        assert_trees_close(output, expected.reshape(2, *grid, 2), 1e-5)
        for inputs in (flat, mixed):
            sharded = {
                name: parallel.shard_points(value, grid)[0] for name, value in inputs.items()
            }
            mask = parallel.shard_points(inputs["fx"], grid)[1]
            output = forward(on_the_mesh, sharded, mask)
            assert output.sharding.is_equivalent_to(sharded["fx"].sharding, output.ndim)
            output = parallel.unshard_points(output, structured_shape=grid)
            assert output.shape == (*inputs["fx"].shape[:-1], 2)
            assert_trees_close(output.reshape(expected.shape), expected, 1e-5)


# Law 4: padding is invisible ---------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [None, MESHES["points8"]], ids=["single", "points8"])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_values_of_padding_change_nothing(mesh, garbage, model):
    # Of 8 shards the last five hold no real point of sample 1.
    expected, mask = padded_inputs([61, 19], 64, 0.0)
    filled, _ = padded_inputs([61, 19], 64, garbage)
    with on_mesh(mesh):
        on_the_mesh = placed(model)
        output, gradients = step(on_the_mesh, filled, mask)
        assert_same((output, gradients), step(on_the_mesh, expected, mask))
    np.testing.assert_array_equal(np.asarray(output)[~mask], 0)
    for gradient in gradients[1].values():
        np.testing.assert_array_equal(np.asarray(gradient)[~mask], 0)


@pytest.mark.parametrize("points", [104, 800])
def test_any_amount_of_padding_gives_the_same(points, model, single_device):
    inputs, mask = padded_inputs([97, 97], points, np.nan)
    with on_mesh(MESHES["points8"]):
        output, (d_params, _) = step(placed(model), inputs, mask)
    assert_trees_close(np.asarray(output)[:, :97], single_device[0], 1e-5)
    # The loss of `step` also counts padding rows, whose output is zero: nothing to differentiate.
    assert_trees_close(d_params, single_device[1][0], 5e-5)


def test_padding_may_lie_anywhere(model, single_device):
    where = np.sort(np.random.default_rng(0).permutation(160)[:97])
    mask = np.zeros((2, 160), bool)
    mask[:, where] = True
    inputs = {}
    for name, value in cloud_inputs(97).items():
        inputs[name] = np.full((2, 160, value.shape[-1]), np.nan, np.float32)
        inputs[name][:, where] = value
    with on_mesh(MESHES["points8"]):
        output = forward(placed(model), inputs, mask)
    assert_trees_close(np.asarray(output)[:, where], single_device[0], 1e-5)
