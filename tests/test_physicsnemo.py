"""Weights of PhysicsNeMo are copied whole or not at all, and every key that does not fit is named.

That the copied weights give the reference's numbers is the claim of `test_golden.py`.
"""

import jax
import numpy as np
import pytest
from conftest import MESHES, load_golden, on_mesh
from flax import nnx

from experiments.physicsnemo.weights import load_state_dict
from flare_jax import FLARE, FLAREAttention


def build(name: str, **options) -> tuple[FLARE, dict[str, np.ndarray]]:
    """The model of a reference case, with other weights than its own, and those."""
    case = load_golden(name)
    kwargs = {key: value for key, value in case["meta"]["kwargs"].items() if key != "use_te"}
    return FLARE(**kwargs | options, rngs=nnx.Rngs(0)), dict(case["param"])


def weights(model) -> dict:
    return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def assert_refused(model, state_dict, *parts: str) -> None:
    """It is an error of one line that names every part, and the model is as it was."""
    before = weights(model)
    with pytest.raises(ValueError, match="the weights do not fit this FLARE: ") as error:
        load_state_dict(model, state_dict)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    jax.tree.map(np.testing.assert_array_equal, weights(model), before)


@pytest.fixture(scope="module")
def time_case():
    return build("flare_time")


def test_every_weight_is_copied():
    model, state_dict = build("flare_time")
    before = weights(model)
    load_state_dict(model, state_dict)
    after = weights(model)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, after)
    assert all(jax.tree.leaves(changed)), changed
    block = after["stack"]["blocks"]
    np.testing.assert_array_equal(
        block["mlp"]["linear_in"]["kernel"][1],
        state_dict["blocks.1.ln_mlp1.1.layers.0.weight"].T,
    )
    np.testing.assert_array_equal(
        block["attention"]["latent_queries"][0], state_dict["blocks.0.Attn.q_global"][0]
    )


def test_missing_surplus_and_misshapen_keys_are_all_named_at_once(time_case):
    model, state_dict = time_case
    wrong = dict(state_dict)
    del wrong["time_fc.0.bias"]
    del wrong["blocks.1.ln_1.weight"]
    wrong["blocks.2.ln_1.weight"] = np.ones(32, np.float32)
    wrong["head.weight"] = np.ones(1, np.float32)
    wrong["preprocess.layers.0.weight"] = wrong["preprocess.layers.0.weight"].T
    wrong["blocks.0.Attn.q_global"] = wrong["blocks.0.Attn.q_global"][0]
    assert_refused(
        model,
        wrong,
        "missing blocks.1.ln_1.weight, time_fc.0.bias;",
        "surplus blocks.2.ln_1.weight, head.weight;",
        "preprocess.layers.0.weight expected shape (64, 5), got (5, 64)",
        "blocks.0.Attn.q_global expected shape (1, 4, 8, 8), got (4, 8, 8)",
    )


def test_empty_state_dict_names_every_key(time_case):
    model, state_dict = time_case
    buffers = {"time_embed.freqs"}
    assert_refused(model, {}, "missing " + ", ".join(sorted(state_dict.keys() - buffers)))


def test_model_of_another_depth_is_refused():
    model, state_dict = build("flare_irregular", n_layers=3)
    assert_refused(
        model,
        state_dict,
        "blocks.2.Attn.q_global",
        # The output layer stands in the last block of either.
        "surplus blocks.1.ln_mlp2.0.bias, blocks.1.ln_mlp2.0.weight, blocks.1.ln_mlp2.1.bias",
    )


@pytest.mark.parametrize(
    ("case", "buffer"), [("flare_time", "time_embed.freqs"), ("flare_unified_pos", "embedding")]
)
def test_buffer_may_be_missing_but_not_differ(case, buffer):
    model, state_dict = build(case)
    given = state_dict.pop(buffer)
    load_state_dict(model, state_dict)
    load_state_dict(model, state_dict | {buffer: given})
    load_state_dict(model, state_dict | {buffer: given + np.float32(1e-6)})

    model, _ = build(case)
    differs = f"{buffer} differs from the values that the model computes"
    changed = given.copy()
    changed.flat[-1] += 1e-3
    assert_refused(model, state_dict | {buffer: changed}, differs)
    assert_refused(model, state_dict | {buffer: np.full_like(given, np.nan)}, differs)
    short = f"{buffer} expected shape {given.shape}, got {given[..., :-1].shape}"
    assert_refused(model, state_dict | {buffer: given[..., :-1]}, short)


def test_buffer_of_another_model_is_surplus():
    model, state_dict = build("flare_irregular")
    assert_refused(model, state_dict | {"embedding": np.ones((1, 97, 3))}, "surplus embedding")


def mlp_names(state_dict) -> list[str]:
    """Names of the perceptrons: those of which there is a second layer."""
    ending = ".layers.2.weight"
    return [key.removesuffix(ending) for key in state_dict if key.endswith(ending)]


@pytest.mark.parametrize(("act", "key"), [("prelu", "weight"), ("stan", "beta")])
def test_learned_activation_has_a_key_in_every_perceptron(act, key):
    model, state_dict = build("flare_irregular", act=act)
    names = [f"{name}.layers.1.{key}" for name in mlp_names(state_dict)]
    assert len(names) == 3
    assert_refused(model, state_dict, "missing " + ", ".join(sorted(names)))
    learned = {name: np.full(1, 0.1 * (i + 1), np.float32) for i, name in enumerate(names)}
    load_state_dict(model, state_dict | learned)
    np.testing.assert_array_equal(model.preprocess.activation.parameter[...], learned[names[0]])
    np.testing.assert_array_equal(
        model.stack.blocks.mlp.activation.parameter[...],
        np.stack([learned[name] for name in names[1:]]),
    )


@pytest.mark.parametrize("act", ["capped_gelu", "cappek_leaky_relu"])
def test_caps_of_activations_are_buffers(act):
    model, state_dict = build("flare_irregular", act=act)
    load_state_dict(model, state_dict)
    caps = {f"{name}.layers.1.cap": np.ones((), np.float32) for name in mlp_names(state_dict)}
    load_state_dict(model, state_dict | caps)
    name = "blocks.1.ln_mlp1.1.layers.1.cap"
    assert_refused(model, state_dict | caps | {name: np.float32(2)}, f"{name} differs")


def test_only_whole_models_are_known():
    layer = FLAREAttention(8, 2, 4, rngs=nnx.Rngs(0))
    with pytest.raises(
        TypeError, match="expected one of FLARE, Transolver, GeoTransolver; got FLAREAttention"
    ):
        load_state_dict(layer, {})


def test_a_model_derived_from_ours_takes_the_same_weights():
    class Derived(FLARE):
        pass

    model, state_dict = build("flare_irregular")
    load_state_dict(model, state_dict)
    kwargs = load_golden("flare_irregular")["meta"]["kwargs"]
    kwargs = {key: value for key, value in kwargs.items() if key != "use_te"}
    derived = Derived(**kwargs, rngs=nnx.Rngs(1))
    load_state_dict(derived, state_dict)
    jax.tree.map(np.testing.assert_array_equal, weights(derived), weights(model))


def test_weights_stay_where_they_are_placed():
    alone, state_dict = build("flare_irregular")
    load_state_dict(alone, state_dict)
    with on_mesh(MESHES["points4_heads2"]):
        model, _ = build("flare_irregular")
        before = [leaf.sharding for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
        load_state_dict(model, state_dict)
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert [leaf.sharding for leaf in leaves] == before
    queries = model.stack.blocks.attention.latent_queries[...]
    assert queries.addressable_shards[0].data.shape == (2, 2, 8, 8)  # two of four heads
    jax.tree.map(np.testing.assert_array_equal, weights(model), weights(alone))


def test_weights_take_the_type_of_the_model():
    model, state_dict = build("flare_irregular")
    narrow = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), nnx.state(model, nnx.Param))
    nnx.update(model, narrow)
    load_state_dict(model, state_dict)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(weights(model))} == {"bfloat16"}
