"""Optimizers and learning-rate schedules."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.configuration.schema import OPTIMIZERS, SCHEDULES, OptimizerConfig
from experiments.training.optimizer import make_optimizer, make_schedule

STEPS = 50
PEAK = 0.3
# One stacked kernel, one plain one, and weights that are not kernels, of one shape with kernels.
PARAMS = {
    "blocks": {"kernel": (3, 8, 4), "bias": (3, 4), "latents": (3, 8, 4)},
    "out": {"kernel": (4, 2), "scale": (4,)},
}


def draw(scale=1.0, seed=0):
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(scale * generator.standard_normal(shape), jnp.float32),
        PARAMS,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def is_kernel(path) -> bool:
    return path[-1].key == "kernel"


def rates(schedule, steps=STEPS, **options):
    config = OptimizerConfig(schedule=schedule, **options)
    return np.asarray(jax.jit(jax.vmap(make_schedule(config, PEAK, steps)))(jnp.arange(steps + 1)))


def test_one_cycle_rises_to_its_peak_and_falls_to_its_last_fraction():
    values = rates("one_cycle", warmup=0.2, final_fraction=1e-2)
    assert values.argmax() == 10
    assert values[0] == pytest.approx(PEAK / 25, rel=1e-5)
    assert values[10] == pytest.approx(PEAK, rel=1e-6)
    assert values[-1] == pytest.approx(PEAK * 1e-2, rel=1e-5)
    assert (np.diff(values[:11]) > 0).all()
    assert (np.diff(values[10:]) < 0).all()


def test_one_cycle_is_a_cosine_on_both_sides_of_its_peak():
    values = rates("one_cycle", warmup=0.2, final_fraction=1e-2)
    assert values[5] == pytest.approx((PEAK / 25 + PEAK) / 2, rel=1e-5)
    assert values[30] == pytest.approx((PEAK + PEAK * 1e-2) / 2, rel=1e-5)


def test_cosine_warms_up_linearly_and_falls_to_its_last_fraction():
    values = rates("cosine", warmup=0.2, final_fraction=0.1)
    np.testing.assert_allclose(values[:11], PEAK * np.arange(11) / 10, rtol=1e-5, atol=1e-7)
    assert values[30] == pytest.approx((PEAK + 0.1 * PEAK) / 2, rel=1e-5)
    assert values[-1] == pytest.approx(0.1 * PEAK, rel=1e-5)


@pytest.mark.parametrize("schedule", ["one_cycle", "cosine"])
def test_last_rate_may_be_zero(schedule):
    assert abs(rates(schedule, final_fraction=0.0)[-1]) < 1e-8


def test_cosine_without_warmup_starts_at_its_peak():
    assert rates("cosine", warmup=0.0)[0] == np.float32(PEAK)


def test_constant_stays():
    assert (rates("constant") == np.float32(PEAK)).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0.0, 0.99])
# 1 / 49 * 49 is less than 1 in floating point: a warm-up of no step at all.
@pytest.mark.parametrize("steps", [1, 3, 49])
def test_schedule_of_any_length_stays_between_zero_and_its_peak(schedule, warmup, steps):
    values = rates(schedule, steps, warmup=warmup)
    assert (values >= 0).all()
    assert (values <= PEAK * (1 + 1e-6)).all()


@cache
def compiled(**options):
    """An optimizer of a constant rate: its initial state, and its compiled update."""
    optimizer = make_optimizer(OptimizerConfig(schedule="constant", **options), STEPS)
    return optimizer.init, jax.jit(optimizer.update)


def updates(gradients, params=None, **options):
    """The updates of an optimizer for gradients that come one after another."""
    params = draw(seed=9) if params is None else params
    init, update = compiled(**options)
    state, results = init(params), []
    for gradient in gradients:
        change, state = update(gradient, state, params)
        results.append(change)
    return results


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_large_gradient_is_clipped_by_its_global_norm(name):
    # The second gradient: Adam divides the scale of a first one away.
    small, large = draw(0.01), draw(100.0, seed=1)
    by_hand = jax.tree.map(lambda leaf: leaf * 0.5 / optax.tree.norm(large), large)
    clipped = updates([small, large], name=name, clip_norm=0.5)
    expected = updates([small, by_hand], name=name, clip_norm=None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), clipped, expected)
    unclipped = updates([small, large], name=name, clip_norm=None)
    assert jnp.abs(clipped[1]["out"]["scale"] - unclipped[1]["out"]["scale"]).max() > 1e-5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_small_gradient_is_not_clipped(name):
    gradients = [draw(0.01), draw(0.02, seed=1)]
    loose = updates(gradients, name=name, clip_norm=0.5)
    free = updates(gradients, name=name, clip_norm=None)
    # The compiler rounds the two programs differently.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), loose, free)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_kernels_decay(name):
    params = draw(seed=9)
    zeros = jax.tree.map(jnp.zeros_like, params)
    (update,) = updates([zeros], params, name=name, learning_rate=PEAK, weight_decay=0.1)

    def check(path, update, param):
        expected = -PEAK * 0.1 * param if is_kernel(path) else jnp.zeros_like(param)
        np.testing.assert_allclose(update, expected, rtol=1e-5)

    jax.tree_util.tree_map_with_path(check, update, params)


WITHOUT_DECAY = dict(
    name="muon", learning_rate=PEAK, adam_learning_rate=0.01, weight_decay=0.0, clip_norm=None
)


def test_muon_orthogonalizes_kernels_and_leaves_the_rest_to_adam():
    gradient = draw(seed=3)
    (update,) = updates([gradient], **WITHOUT_DECAY)
    adam = optax.adamw(0.01, weight_decay=0.0, nesterov=True)
    adam, _ = adam.update(gradient, adam.init(gradient), gradient)

    for group, leaf in (("blocks", "bias"), ("blocks", "latents"), ("out", "scale")):
        np.testing.assert_allclose(update[group][leaf], adam[group][leaf], rtol=1e-5)
    for kernel in [*update["blocks"]["kernel"], update["out"]["kernel"]]:
        singular = np.linalg.svd(kernel, compute_uv=False)
        # Newton-Schulz brings singular values near one, not to it.
        assert singular.min() > 0.5 * singular.max()


def test_blocks_of_a_stack_are_orthogonalized_each_for_itself():
    gradient = draw(seed=3)
    (update,) = updates([gradient], **WITHOUT_DECAY)
    for block in range(3):
        alone = jax.tree.map(jnp.zeros_like, gradient)
        kernel = gradient["blocks"]["kernel"]
        alone["blocks"]["kernel"] = alone["blocks"]["kernel"].at[block].set(kernel[block])
        (expected,) = updates([alone], **WITHOUT_DECAY)
        np.testing.assert_allclose(
            update["blocks"]["kernel"][block], expected["blocks"]["kernel"][block], rtol=1e-4
        )


def test_muon_keeps_one_moment_of_kernels_and_two_of_the_rest():
    state = make_optimizer(OptimizerConfig(name="muon"), STEPS).init(draw())
    leaves = jax.tree_util.tree_leaves_with_path(state)
    moments = {}
    for path, _ in leaves:
        if isinstance(path[-1], jax.tree_util.DictKey):
            name = jax.tree_util.keystr(path[-2:])
            moments[name] = moments.get(name, 0) + 1
    assert moments == {
        "['blocks']['kernel']": 1,
        "['out']['kernel']": 1,
        "['blocks']['bias']": 2,
        "['blocks']['latents']": 2,
        "['out']['scale']": 2,
    }


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"optimizer\.name: expected one of adamw, muon; got 'x'"):
        make_optimizer(OptimizerConfig(name="x"), STEPS)
    with pytest.raises(ValueError, match=r"optimizer\.schedule: expected one of .*; got 'x'"):
        make_optimizer(OptimizerConfig(schedule="x"), STEPS)
