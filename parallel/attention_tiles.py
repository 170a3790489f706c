"""Attention of one shard, a tile of queries and keys at a time.

Scores exist for a tile, and are computed again for the gradient (FlashAttention: Dao et al.,
arXiv 2205.14135, section 3.1).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from parallel import chunks, softmax
from parallel.annotations import Position, Size
from parallel.contraction import product

# Of query, key and value.
Gradients = tuple[Array, Array, Array]
# Queries that a tile has at least before its keys are cut shorter.
_TILE_QUERIES = 256


class Scoring(NamedTuple):
    """How scores are made of queries and keys.

    Attributes:
        scale: factor of their products.
        causal: a query sees the keys up to its own position.
    """

    scale: float
    causal: bool


def _tile_lengths(query: Array, key: Array) -> tuple[int, int]:
    batch, queries, heads, _ = query.shape
    key_length = chunks.chunk_length(key.shape[1], batch, heads, min(queries, _TILE_QUERIES))
    return chunks.chunk_length(queries, batch, heads, key_length), key_length


def _scores(
    scoring: Scoring,
    query: Array,
    key: Array,
    key_mask: Array | None,
    first_query: Position,
    first_key: Position,
) -> Array:
    """Masked scores (B, H, Q, K) of a tile."""
    scores = scoring.scale * product("bqhd,bkhd->bhqk", query, key)
    mask = None if key_mask is None else key_mask[:, None, None, :]
    if scoring.causal:
        first_query, first_key = chunks.tie((first_query, first_key), query)
        query_position = first_query + jnp.arange(query.shape[1])
        key_position = first_key + jnp.arange(key.shape[1])
        seen = (query_position[:, None] >= key_position)[None, None]
        mask = seen if mask is None else mask & seen
    return softmax.mask_scores(scores, mask)


def fold(
    scoring: Scoring,
    sums: softmax.SoftmaxSums,
    query: Array,
    key: Array,
    value: Array,
    key_mask: Array | None,
    first_query: Position,
    first_key: Position,
) -> softmax.SoftmaxSums:
    """The softmax sums of all queries after one more block of keys, tile by tile."""
    query_length, key_length = _tile_lengths(query, key)

    def over_queries(
        q_start: Position, q_size: Size, sums: softmax.SoftmaxSums
    ) -> softmax.SoftmaxSums:
        query_chunk = chunks.take(query, q_start, q_size, 1)

        def over_keys(
            k_start: Position, k_size: Size, chunk_sums: softmax.SoftmaxSums
        ) -> softmax.SoftmaxSums:
            scores = _scores(
                scoring,
                query_chunk,
                chunks.take(key, k_start, k_size, 1),
                chunks.take(key_mask, k_start, k_size, 1),
                first_query + q_start,
                first_key + k_start,
            )
            values = jnp.moveaxis(chunks.take(value, k_start, k_size, 1), 1, 3)
            return softmax.accumulate(chunk_sums, scores, values)

        chunk_sums = softmax.SoftmaxSums(*(chunks.take(x, q_start, q_size, 2) for x in sums))
        chunk_sums = chunks.for_chunks(key.shape[1], key_length, over_keys, chunk_sums)
        return softmax.SoftmaxSums(
            *(chunks.put(x, c, q_start, 2) for x, c in zip(sums, chunk_sums, strict=True))
        )

    return chunks.for_chunks(query.shape[1], query_length, over_queries, sums)


def fold_gradient(
    scoring: Scoring,
    gradients: Gradients,
    fixed: tuple[Array, ...],
    key: Array,
    value: Array,
    key_mask: Array | None,
    first_query: Position,
    first_key: Position,
) -> Gradients:
    """The gradients (d_query, d_key, d_value) after one more block of keys, tile by tile."""
    query, d_output, lse, delta = fixed
    query_length, key_length = _tile_lengths(query, key)

    def over_keys(k_start: Position, k_size: Size, gradients: Gradients) -> Gradients:
        d_query, d_key, d_value = gradients
        key_chunk = chunks.take(key, k_start, k_size, 1)
        value_chunk = chunks.take(value, k_start, k_size, 1)
        mask_chunk = chunks.take(key_mask, k_start, k_size, 1)

        def over_queries(q_start: Position, q_size: Size, carry: PyTree) -> PyTree:
            d_query, d_key_chunk, d_value_chunk = carry
            query_chunk = chunks.take(query, q_start, q_size, 1)
            d_output_chunk = chunks.take(d_output, q_start, q_size, 1)
            scores = _scores(
                scoring,
                query_chunk,
                key_chunk,
                mask_chunk,
                first_query + q_start,
                first_key + k_start,
            )
            weights = softmax.weights(scores, chunks.take(lse, q_start, q_size, 2))
            d_value_chunk += product("bhqk,bqhd->bkhd", weights.astype(value.dtype), d_output_chunk)
            d_weights = product("bqhd,bkhd->bhqk", d_output_chunk, value_chunk)
            d_scores = weights * (d_weights - chunks.take(delta, q_start, q_size, 2)[..., None])
            d_scores = (scoring.scale * d_scores).astype(query.dtype)
            d_key_chunk += product("bhqk,bqhd->bkhd", d_scores, query_chunk)
            d_query_chunk = product("bhqk,bkhd->bqhd", d_scores, key_chunk)
            d_query_chunk += chunks.take(d_query, q_start, q_size, 1)
            return chunks.put(d_query, d_query_chunk, q_start, 1), d_key_chunk, d_value_chunk

        carry = (
            d_query,
            chunks.take(d_key, k_start, k_size, 1),
            chunks.take(d_value, k_start, k_size, 1),
        )
        d_query, d_key_chunk, d_value_chunk = chunks.for_chunks(
            query.shape[1], query_length, over_queries, carry
        )
        return (
            d_query,
            chunks.put(d_key, d_key_chunk, k_start, 1),
            chunks.put(d_value, d_value_chunk, k_start, 1),
        )

    return chunks.for_chunks(key.shape[1], key_length, over_keys, gradients)
