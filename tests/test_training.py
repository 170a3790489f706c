"""The training step: its loss and its state, and that no mesh and no padding changes them."""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_trees_close, on_mesh, placed, relative_difference, small_flare
from flax import nnx

import parallel
from experiments.configuration.schema import OptimizerConfig
from experiments.data.batch import Batch, Scale, Statistics, Stream, StreamStatistics
from experiments.results.field_errors import field_errors
from experiments.training.optimizer import make_optimizer
from experiments.training.steps import (
    TrainState,
    initial_state,
    make_evaluation,
    make_step,
    predict,
    relative_l2,
)

STEPS = 20
DECAY = 0.9
MESHES = {
    "points8": dict(points=8),
    "data2_points4": dict(data=2, points=4),
    "data2_points2_heads2": dict(data=2, points=2, heads=2),
}
on_meshes = pytest.mark.parametrize("mesh", MESHES)
on_any_mesh = pytest.mark.parametrize("mesh", ["single", *MESHES])
# No number of points divides over a mesh; on 8 shards the short samples leave some all padding.
LENGTHS = (13, 11, 7, 3)
# Muon for kernels, Adam for the rest: any difference of the gradients shows in their direction.
MUON = OptimizerConfig(name="muon", learning_rate=2e-2, adam_learning_rate=2e-3)


def scale(mean, deviation) -> Scale:
    return Scale(np.array(mean, np.float32), np.array(deviation, np.float32))


FX = scale([0.5, -1.0], [2.0, 0.5])
EMBEDDING = scale([0.1, 0.2, 0.3], [1.0, 2.0, 3.0])
TARGET = scale([4.0, -6.0], [3.0, 0.1])
STATISTICS = Statistics((StreamStatistics(EMBEDDING, TARGET, FX),))


@cache
def small_model(**options) -> nnx.Module:
    return small_flare(**options)


class Cloud(NamedTuple):
    """One sample on the host."""

    fx: np.ndarray
    embedding: np.ndarray
    target: np.ndarray


def clouds(lengths=LENGTHS, seed=0) -> list[Cloud]:
    generator = np.random.default_rng(seed)

    def draw(length, mean, deviation):
        values = mean + deviation * generator.standard_normal((length, len(mean)))
        return values.astype(np.float32)

    return [
        Cloud(
            draw(length, *FX),
            draw(length, *EMBEDDING),
            draw(length, *TARGET),
        )
        for length in lengths
    ]


def place(samples: list[Cloud]) -> Batch:
    placed = [parallel.shard_points(list(part)) for part in zip(*samples, strict=True)]
    (fx, mask), (embedding, _), (target, _) = placed
    return Batch((Stream(embedding, target, fx, mask=mask),))


def start_of(model, optimizer, average=True) -> TrainState:
    return initial_state(model, optimizer, STATISTICS, seed=0, average=average)


def to_host(tree):
    """A copy: a view of a device's buffer would keep the step from consuming it."""
    return jax.tree.map(np.array, tree)


class Run(NamedTuple):
    """What a training left, on the host but for its last state."""

    state: TrainState
    params: list[Any]
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    programs: int
    first_deleted: list[bool]


def train(model, optimizer, batches, ema_decay=None) -> Run:
    """Trains for one step on each entry of `batches`."""
    state = first = start_of(model, optimizer, average=ema_decay is not None)
    step = make_step(model, optimizer, ema_decay, state)
    params, metrics = [to_host(state.params)], []
    for entry in batches:
        state, reported = step(state, entry)
        params.append(to_host(state.params))
        metrics.append([float(value) for value in reported])
    deleted = [leaf.is_deleted() for leaf in jax.tree.leaves((first.params, first.optimizer))]
    return Run(state, params, *zip(*metrics, strict=True), step._cache_size(), deleted)


@cache
def trained(mesh: str) -> Run:
    """20 steps with dropout and a moving average, on a mesh."""
    model = small_model(dropout=0.1)
    with on_mesh(MESHES.get(mesh)):
        batches = [(place(clouds(seed=step % 5)),) for step in range(STEPS)]
        return train(placed(model), make_optimizer(MUON, STEPS), batches, DECAY)


def relative_l1(prediction, target, mask=None):
    return field_errors(jnp.asarray(prediction), jnp.asarray(target), mask).relative_l1


@pytest.mark.parametrize(("relative", "order"), [(relative_l1, 1), (relative_l2, 2)])
def test_relative_error_is_a_ratio_of_norms_for_each_sample_and_field(relative, order):
    generator = np.random.default_rng(0)
    prediction, target = generator.standard_normal((2, 3, 5, 2))
    target[1] *= 100
    expected = np.linalg.norm(prediction - target, order, axis=1) / np.linalg.norm(
        target, order, axis=1
    )
    actual = relative(prediction.astype(np.float32), target.astype(np.float32))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("relative", [relative_l1, relative_l2])
def test_relative_error_does_not_see_padding(relative):
    generator = np.random.default_rng(0)
    prediction, target = generator.standard_normal((2, 3, 5, 2)).astype(np.float32)
    mask = np.arange(5) < np.array([[5], [3], [1]])
    garbage = jnp.where(mask[..., None], prediction, 1e6), jnp.where(mask[..., None], target, -1e6)
    expected = [
        relative(prediction[i : i + 1, :n], target[i : i + 1, :n])[0]
        for i, n in enumerate((5, 3, 1))
    ]
    np.testing.assert_allclose(relative(*garbage, mask), expected, rtol=1e-6)
    if relative is relative_l2:
        gradient = jax.grad(lambda p: relative(p, garbage[1], mask).sum())(garbage[0])
        assert (np.asarray(gradient)[~mask] == 0).all()


def test_exact_prediction_has_no_error_and_a_finite_gradient():
    target = jnp.ones((2, 5, 1))
    error, gradient = jax.value_and_grad(lambda p: relative_l2(p, target).sum())(target)
    assert error < 1e-18
    assert np.isfinite(gradient).all()


def test_target_of_zeros_has_a_finite_error():
    error, gradient = jax.value_and_grad(lambda p: relative_l2(p, jnp.zeros((1, 5, 1)))[0, 0])(
        jnp.ones((1, 5, 1))
    )
    assert np.isfinite(error)
    assert np.isfinite(gradient).all()


def test_relative_l2_of_a_narrow_prediction_is_float32():
    prediction = jnp.full((1, 1000, 1), 1.0, jnp.bfloat16)
    error = relative_l2(prediction, jnp.full((1, 1000, 1), 1.001, jnp.float32))
    assert error.dtype == jnp.float32
    np.testing.assert_allclose(error, 0.001 / 1.001, rtol=1e-3)


def test_model_of_zeros_predicts_the_mean_of_the_target():
    batch = place(clouds())
    (prediction,) = predict(lambda fx, embedding, point_mask: 0 * fx, STATISTICS, batch)
    assert (prediction == TARGET.mean).all()


def test_model_sees_normalized_values_and_predicts_in_physical_units():
    seen = {}

    def model(fx, embedding, point_mask):
        seen.update(fx=fx, embedding=embedding, point_mask=point_mask)
        return jnp.ones_like(fx)

    batch = place(clouds())
    (prediction,), (stream,) = predict(model, STATISTICS, batch), batch.streams
    np.testing.assert_allclose(FX.restore(seen["fx"]), stream.fx, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        EMBEDDING.restore(seen["embedding"]),
        stream.embedding,
        rtol=1e-5,
        atol=1e-5,
    )
    assert seen["point_mask"] is stream.mask
    np.testing.assert_array_equal(prediction[0, 0], TARGET.mean + TARGET.deviation)


def test_training_lowers_the_loss():
    losses = trained("single").losses
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])


@on_meshes
def test_training_loss_with_uneven_points_is_that_of_one_device(mesh):
    # The first: before any rounding of an update comes in.
    assert relative_difference(trained(mesh).losses[0], trained("single").losses[0]) < 1e-6
    assert relative_difference(trained(mesh).losses, trained("single").losses) < 1e-5
    norms = trained(mesh).gradient_norms, trained("single").gradient_norms
    assert relative_difference(*norms) < 5e-5


@on_meshes
def test_parameters_after_20_steps_are_those_of_one_device(mesh):
    assert_trees_close(trained(mesh).params[-1], trained("single").params[-1], 1e-5)
    assert_trees_close(trained(mesh).state.average, trained("single").state.average, 1e-5)


@on_any_mesh
def test_step_is_compiled_once(mesh):
    assert trained(mesh).programs == 1


@on_any_mesh
def test_step_consumes_its_state(mesh):
    assert all(trained(mesh).first_deleted)


@on_any_mesh
def test_step_counts_itself(mesh):
    assert int(trained(mesh).state.step) == STEPS


@cache
def losses_of_dropout(batches: int) -> tuple[float, ...]:
    """Losses of weights that stay, on a batch that comes `batches` times a step."""
    entry = (place(clouds()),) * batches
    return train(small_model(dropout=0.5), optax.sgd(0.0), [entry] * 3).losses


def test_dropout_differs_from_step_to_step():
    assert len(set(losses_of_dropout(batches=2))) == 3


def test_accumulated_batches_draw_different_dropout():
    # With the same draws the mean over any number of equal batches would be the same.
    difference = losses_of_dropout(batches=3)[0] - losses_of_dropout(batches=2)[0]
    assert abs(difference) > 1e-4


def test_moving_average_is_that_of_its_formula():
    run = trained("single")
    average = run.params[0]
    for params in run.params[1:]:
        average = jax.tree.map(lambda a, p: DECAY * a + (1 - DECAY) * p, average, params)
    # 20 roundings of float32.
    assert_trees_close(run.state.average, average, 2e-6)
    assert (
        relative_difference(
            run.state.average["project_out"]["kernel"], run.params[-1]["project_out"]["kernel"]
        )
        > 1e-3
    )


def shardings(tree) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path): leaf.sharding
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def assert_lies_as_its_parameters(state: TrainState) -> None:
    params = shardings(state.params)
    assert any("heads" in str(sharding.spec) for sharding in params.values())
    assert shardings(state.average) == params
    met = []
    for path, sharding in shardings(state.optimizer).items():
        ends = [parameter for parameter in params if path.endswith(parameter)]
        if ends:
            parameter = max(ends, key=len)
            assert sharding == params[parameter], path
            met.append(parameter)
    assert set(met) == set(params)


def test_optimizer_state_lies_as_its_parameters_and_stays_there():
    assert_lies_as_its_parameters(trained("data2_points2_heads2").state)


def test_state_of_adamw_lies_as_its_parameters():
    with on_mesh(MESHES["data2_points2_heads2"]):
        optimizer = make_optimizer(OptimizerConfig(name="adamw"), STEPS)
        assert_lies_as_its_parameters(start_of(placed(small_model(dropout=0.1)), optimizer))


def test_two_batches_of_four_make_the_step_of_one_of_eight():
    samples = clouds((13, 11, 7, 3, 13, 2, 5, 9))
    optimizer = optax.sgd(0.05, momentum=0.9)
    model = small_model()
    twice = train(model, optimizer, [(place(samples[:4]), place(samples[4:]))] * 3)
    once = train(model, optimizer, [(place(samples),)] * 3)
    np.testing.assert_allclose(twice.losses, once.losses, rtol=1e-6)
    assert_trees_close(twice.params[-1], once.params[-1], 1e-6)
    assert (
        relative_difference(
            once.params[-1]["project_out"]["kernel"], once.params[0]["project_out"]["kernel"]
        )
        > 1e-3
    )


def first_step(**options) -> Run:
    """The first step of `trained("single")` with another model of the same weights."""
    model = small_model(dropout=0.1, **options)
    return train(model, optax.sgd(0.05, momentum=0.9), [(place(clouds()),)], DECAY)


def test_bfloat16_computes_narrow_and_keeps_float32():
    run, expected = first_step(dtype=jnp.bfloat16), trained("single")
    kept = jax.tree.leaves((run.state.params, run.state.average, run.state.optimizer))
    assert {leaf.dtype for leaf in kept} == {jnp.dtype(jnp.float32)}
    # bfloat16 has 8 bits; no difference at all would mean that it computed in float32.
    assert 1e-6 < relative_difference(run.losses[0], expected.losses[0]) < 2e-2
    assert relative_difference(run.gradient_norms[0], expected.gradient_norms[0]) < 5e-2


def test_rematerialization_changes_no_number():
    run, expected = first_step(remat="block"), trained("single")
    assert relative_difference(run.losses[0], expected.losses[0]) < 1e-6
    assert relative_difference(run.gradient_norms[0], expected.gradient_norms[0]) < 1e-6


def evaluated(mesh: str | None, samples: list[Cloud]):
    """Predictions and errors of the samples, on the host."""
    model = small_model(dropout=0.5)
    with on_mesh(MESHES.get(mesh)):
        model = placed(model)
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        (prediction,), errors = make_evaluation(model)(params, STATISTICS, place(samples))
        lengths = [len(sample.fx) for sample in samples]
        return parallel.unshard_points(prediction, lengths), errors.relative_l2


@pytest.mark.parametrize("mesh", ["single", "data2_points2_heads2"])
def test_evaluation_of_a_batch_is_that_of_each_sample_alone(mesh):
    samples = clouds()
    predictions, errors = evaluated(mesh, samples)
    for index in (0, 3):
        (alone,), (error,) = evaluated(None, [samples[index]])
        assert relative_difference(predictions[index], alone) < 1e-5
        assert relative_difference(errors[index], error) < 1e-5
        target = samples[index].target
        expected = np.linalg.norm(alone - target, axis=0) / np.linalg.norm(target, axis=0)
        np.testing.assert_allclose(error, expected, rtol=1e-5)


@pytest.mark.parametrize("axes", [dict(data=4, points=2), dict(data=2, points=2, heads=2)])
def test_weights_split_over_data_are_the_same_and_take_their_part(axes):
    trained, held = [], []
    for shard in (False, True):
        with on_mesh(axes):
            model, optimizer = placed(small_model()), make_optimizer(MUON, 10)
            state = initial_state(model, optimizer, STATISTICS, 0, average=True, shard=shard)
            step = make_step(model, optimizer, DECAY, state)
            batches = [(place(clouds(seed=seed)),) for seed in range(3)]
            memory = step.lower(state, batches[0]).compile().memory_analysis()
            held.append(memory.argument_size_in_bytes)
            for batch in batches:
                state, _ = step(state, batch)
            assert step._cache_size() == 1
            trained.append(to_host(state.params))
    assert_trees_close(trained[1], trained[0], 1e-5)
    # Beside the weights, and what goes with them, a step is given a batch of a few points.
    assert held[1] < held[0] / axes["data"] + 5000
