"""GeoTransolver: one source on any mesh, with every source of context, stream and noise."""

from functools import cache

import jax
import numpy as np
import pytest
from conftest import assert_trees_close, on_mesh, placed
from flax import nnx
from geotransolver_steps import (
    CONTEXT,
    LOCAL,
    OPTIONS,
    STREAMS,
    double_model,
    evaluated,
    forward,
    inputs_of,
    sharded_step,
    small,
    step,
)

on_two_meshes = pytest.mark.parametrize(
    "mesh", [dict(points=8), dict(data=2, points=2, heads=2)], ids=str
)


@cache
def single_device(option: str):
    model = double_model(option)
    return step(model, inputs_of(model, 97, 61))


# The reference cases run on every mesh.
@on_two_meshes
@pytest.mark.parametrize("option", list(OPTIONS)[:5])
def test_clouds_are_the_same_on_every_mesh(option, mesh, float64):
    expected = single_device(option)
    model = double_model(option)
    with on_mesh(mesh):
        actual = sharded_step(placed(model), inputs_of(model, 97, 61))
    assert_trees_close(actual, expected, 1e-12)


NOISY = {
    "concrete": dict(**CONTEXT, concrete_dropout=True, dropout=0.2),
    "concrete_fa": dict(**CONTEXT, concrete_dropout=True, attention_type="GALE_FA"),
    "gumbel": dict(**CONTEXT, **STREAMS, plus=True, dropout=0.2),
}


# On eight shards there are more than global tokens, which then get padding between them.
@pytest.mark.parametrize(
    ("option", "mesh"),
    [*((option, dict(data=2, points=2, heads=2)) for option in NOISY), ("gumbel", dict(points=8))],
    ids=str,
)
def test_noise_is_the_same_on_every_mesh(option, mesh, float64):
    model = small(**NOISY[option], param_dtype=np.float64)
    inputs = inputs_of(model, 97, 61)
    expected = step(nnx.clone(model), inputs)
    with on_mesh(mesh):
        actual = sharded_step(placed(model), inputs)
    assert_trees_close(actual, expected, 1e-12)
    quiet = forward(evaluated(nnx.clone(model)), inputs)
    difference = jax.tree.map(lambda a, b: np.abs(a - b).max(), quiet, expected[0])
    assert min(jax.tree.leaves(difference)) > 1e-3


@pytest.mark.parametrize(
    ("option", "mesh"), [("global_concat", dict(points=8)), ("fa", dict(data=2, points=4))], ids=str
)
def test_kept_latents_change_nothing(option, mesh, float64):
    model, kept = double_model(option), double_model(option, remat="attention")
    inputs = inputs_of(model, 97, 61)
    with on_mesh(mesh):
        actual = sharded_step(placed(kept), inputs)
    assert_trees_close(actual, step(model, inputs), 1e-12)


def test_every_option_at_once_compiles_on_samples_and_heads_alone(float64):
    # Not at the radii of the other tests: there the gradient of a temperature is so sensitive that
    # two compilations for one device already differ by 9e-13.
    local = LOCAL | dict(radii=[0.9, 2.0], n_hidden_local=4)
    model = small(
        **CONTEXT, **local, **STREAMS, plus=True, concrete_dropout=True, remat="block",
        param_dtype=np.float64,
    )  # fmt: skip
    inputs = inputs_of(model, 9, 11)
    expected = step(nnx.clone(model), inputs)
    with on_mesh(dict(data=2, heads=4)):
        actual = sharded_step(placed(model), inputs)
    assert_trees_close(actual, expected, 1e-12)


@pytest.mark.parametrize(
    ("option", "mesh"), [("fa", dict(points=8)), ("local", dict(data=2, points=4))], ids=str
)
def test_samples_of_different_length_equal_each_alone(option, mesh, float64):
    model = double_model(option)
    whole = inputs_of(model, 97, 61)
    lengths = {"local_embedding": [97, 31], "local_positions": [97, 31], "geometry": [40, 61]}
    ragged = {
        name: [x[i, :n] for i, n in enumerate(lengths[name])] if name in lengths else x
        for name, x in whole.items()
    }
    with on_mesh(mesh):
        (outputs, context, features), _, d_inputs = sharded_step(placed(model), ragged)
    for i in range(2):
        alone = {name: x[i][None] for name, x in ragged.items()}
        expected, _, d_expected = step(model, alone)
        own = (outputs[i][None], context[i : i + 1], features[i][None])
        assert_trees_close(own, expected, 1e-12)
        own = {name: x[i][None] for name, x in d_inputs.items()}
        assert_trees_close(own, d_expected, 1e-12)
