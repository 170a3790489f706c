"""Sharded attention equals dense attention in every placement, values and gradients."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, assert_trees_close, on_any_mesh, on_mesh

import parallel
from parallel import chunks

PLACEMENTS = list(itertools.product([False, True], [False, True]))
placements = pytest.mark.parametrize(
    ("queries_sharded", "keys_sharded"),
    PLACEMENTS,
    ids=[f"q_{'split' if q else 'whole'}-k_{'split' if k else 'whole'}" for q, k in PLACEMENTS],
)


def dense_attention(query, key, value, key_mask=None, scale=None, causal=False):
    """The definition, with all scores at once."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * jnp.einsum("bqhd,bkhd->bhqk", query, key)
    mask = jnp.ones(scores.shape[-2:], bool)[None, None]
    if key_mask is not None:
        mask = mask & key_mask[:, None, None]
    if causal:
        mask = mask & jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def inputs(batch=2, queries=24, keys=40, heads=2, width=4, value_width=6, factor=1.0):
    generator = np.random.default_rng(0)
    draw = generator.standard_normal
    return (
        factor * draw((batch, queries, heads, width)),
        draw((batch, keys, heads, width)),
        draw((batch, keys, heads, value_width)),
        draw((batch, queries, heads, value_width)),
    )


def value_and_gradients(function, query, key, value, d_output):
    def weighted(query, key, value):
        output = function(query, key, value)
        return (output * d_output).sum(), output

    (_, output), gradients = jax.jit(jax.value_and_grad(weighted, argnums=(0, 1, 2), has_aux=True))(
        query, key, value
    )
    return output, gradients


@placements
@pytest.mark.parametrize("masked", [False, True], ids=["all_keys", "key_mask"])
@on_any_mesh
def test_equals_dense_attention(queries_sharded, keys_sharded, masked, mesh, float64):
    query, key, value, d_output = inputs()
    mask = np.arange(40) < np.array([[33], [7]]) if masked else None  # the last shards are padding
    expected = value_and_gradients(
        lambda *qkv: dense_attention(*qkv, key_mask=mask), query, key, value, d_output
    )
    with on_mesh(mesh):
        actual = value_and_gradients(
            lambda *qkv: parallel.attention(
                *qkv, key_mask=mask, queries_sharded=queries_sharded, keys_sharded=keys_sharded
            ),
            query,
            key,
            value,
            d_output,
        )
    assert_trees_close(actual, expected, 1e-12)


@placements
def test_causal_positions_count_over_the_whole_array(queries_sharded, keys_sharded, float64):
    query, key, value, d_output = inputs(queries=40)
    expected = value_and_gradients(
        lambda *qkv: dense_attention(*qkv, causal=True), query, key, value, d_output
    )
    with on_mesh(MESHES["points8"]):
        actual = value_and_gradients(
            lambda *qkv: parallel.attention(
                *qkv, causal=True, queries_sharded=queries_sharded, keys_sharded=keys_sharded
            ),
            query,
            key,
            value,
            d_output,
        )
    assert_trees_close(actual, expected, 1e-12)


@placements
@pytest.mark.parametrize("budget", [24, 100, 1000])
def test_tiles_of_any_size_give_the_same(
    queries_sharded, keys_sharded, budget, float64, monkeypatch
):
    query, key, value, d_output = inputs()
    mask = np.arange(40) < np.array([[33], [7]])
    expected = value_and_gradients(
        lambda *qkv: dense_attention(*qkv, key_mask=mask, scale=0.3), query, key, value, d_output
    )
    monkeypatch.setitem(chunks._SCORES_A_CHUNK, "cpu", budget)
    jax.clear_caches()
    with on_mesh(dict(points=2)):
        actual = value_and_gradients(
            lambda *qkv: parallel.attention(
                *qkv,
                key_mask=mask,
                scale=0.3,
                queries_sharded=queries_sharded,
                keys_sharded=keys_sharded,
            ),
            query,
            key,
            value,
            d_output,
        )
    jax.clear_caches()
    assert_trees_close(actual, expected, 1e-12)


@placements
@pytest.mark.parametrize("factor", [1.0, 1e4], ids=["logits_1", "logits_1e4"])
def test_extreme_logits_and_a_single_real_key_stay_finite(queries_sharded, keys_sharded, factor):
    query, key, value, d_output = (x.astype(np.float32) for x in inputs(factor=factor))
    mask = np.zeros((2, 40), bool)
    mask[0, 17] = True  # the only real key of sample 0 lies on one shard
    mask[1] = True
    with on_mesh(MESHES["points8"]):
        output, gradients = value_and_gradients(
            lambda *qkv: parallel.attention(
                *qkv,
                key_mask=mask,
                scale=1.0,
                queries_sharded=queries_sharded,
                keys_sharded=keys_sharded,
            ),
            query,
            key,
            value,
            d_output,
        )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((output, gradients)))
    np.testing.assert_allclose(output[0], np.broadcast_to(value[0, 17], output[0].shape), rtol=1e-5)
    expected = dense_attention(*(x.astype(np.float64) for x in (query, key, value)), scale=1.0)
    np.testing.assert_allclose(output[1], expected[1], atol=1e-4 if factor == 1.0 else 1e-2)


def test_queries_without_any_key_get_zeros_and_no_gradient():
    query, key, value, d_output = (x.astype(np.float32) for x in inputs())
    mask = np.zeros((2, 40), bool)
    output, gradients = value_and_gradients(
        lambda *qkv: parallel.attention(
            *qkv, key_mask=mask, queries_sharded=False, keys_sharded=True
        ),
        query,
        key,
        value,
        d_output,
    )
    for leaf in jax.tree.leaves((output, gradients)):
        np.testing.assert_array_equal(leaf, 0)


def test_bfloat16_reduces_in_float32():
    # 4,096 equal keys: a bfloat16 sum of weights would stop growing at 256.
    query = jnp.zeros((1, 8, 1, 4), jnp.bfloat16)
    key = jnp.zeros((1, 4096, 1, 4), jnp.bfloat16)
    value = jnp.ones((1, 4096, 1, 4), jnp.bfloat16)
    output = parallel.attention(query, key, value, queries_sharded=False, keys_sharded=True)
    assert output.dtype == jnp.bfloat16
    np.testing.assert_array_equal(output.astype(np.float32), 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(causal=True), "causal needs as many queries as keys"),
        (dict(dropout_rate=0.1), "dropout of attention weights is not available"),
        (dict(key_mask=np.ones((2, 39), bool)), "expected key_mask bool"),
        (dict(key_mask=np.ones((2, 40), np.int32)), "expected key_mask bool"),
    ],
)
@pytest.mark.usefixtures("unchecked_calls")
def test_bad_options_are_refused(change, message):
    query, key, value, _ = inputs()
    with pytest.raises(ValueError, match=message):
        parallel.attention(query, key, value, queries_sharded=True, keys_sharded=True, **change)


@pytest.mark.parametrize("wrong", ["rank", "width", "length", "heads"])
@pytest.mark.usefixtures("unchecked_calls")
def test_bad_shapes_are_named(wrong):
    query, key, value, _ = inputs()
    if wrong == "rank":
        query = query[0]
    elif wrong == "width":
        query = query[..., :3]
    elif wrong == "length":
        value = value[:, :-1]
    else:
        query = query[:, :, :1]
    with pytest.raises(ValueError, match=r"attention: expected .* got query \("):
        parallel.attention(query, key, value, queries_sharded=True, keys_sharded=True)
