"""Attention whose queries, keys and values are each replicated, or split over the points.

| queries | keys, values | how | communication |
| --- | --- | --- | --- |
| replicated | split | log-sum-exp merge | a maximum and a packed sum forward, one sum backward |
| split | replicated | local | one packed sum backward |
| split | split | ring (Liu et al., arXiv 2310.01889) | keys and values travel around the axis |
| replicated | replicated | local | none |

Each shard works on tiles, see `attention_tiles`.
"""

from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, PyTree

from parallel import chunks, softmax
from parallel import mesh as mesh_lib
from parallel.annotations import AnyArray, Position
from parallel.attention_tiles import Gradients, Scoring, fold, fold_gradient
from parallel.mesh import POINTS
from parallel.precision import accumulation_dtype

# A shard's keys, values and mask.
_Block = tuple[Array, Array, Array | None]
_Passed = TypeVar("_Passed")


@dataclass(frozen=True)
class _Layout:
    """What of an attention call is static."""

    scoring: Scoring
    queries_sharded: bool
    keys_sharded: bool

    @property
    def query_spec(self) -> P:
        return P(None, POINTS) if self.queries_sharded else P()

    @property
    def key_spec(self) -> P:
        return P(None, POINTS) if self.keys_sharded else P()

    @property
    def sums_spec(self) -> P:
        return P(None, None, POINTS) if self.queries_sharded else P()


def attention(
    query: Float[AnyArray, "B Q H D"],
    key: Float[AnyArray, "B K H D"],
    value: Float[AnyArray, "B K H D_v"],
    *,
    queries_sharded: bool,
    keys_sharded: bool,
    key_mask: Bool[AnyArray, "B K"] | None = None,
    scale: float | None = None,
    causal: bool = False,
    dropout_rate: float = 0.0,
) -> Float[Array, "B Q H D_v"]:
    """Softmax attention, `softmax(scale * query @ key^T) @ value`, on points split over the mesh.

    Reductions are in float32 or wider. A query whose every key is masked gets zeros.

    Args:
        query: queries. Split arrays must have a length that divides by the `points` axis.
        key: keys.
        value: values; their width may differ from that of the keys.
        queries_sharded: whether axis 1 of `query` is split over `points`, else replicated.
        keys_sharded: likewise for `key`, `value` and `key_mask`.
        key_mask: True where a key is real.
        scale: factor of the scores, `D ** -0.5` by default.
        causal: a query sees only the keys at its own position and before. Positions are those in
            the whole array, whatever the split.
        dropout_rate: must be 0. Dropout of attention weights would need the same random numbers
            for a pair of query and key on every mesh; use dropout on the output.

    Returns:
        The attended values, laid out as the queries, in the type of `value`.

    Raises:
        ValueError: shapes that do not fit, `causal` with different numbers of queries and keys,
            or a `dropout_rate` other than 0.
    """
    _check(query, key, value, key_mask, causal, dropout_rate)
    layout = _Layout(
        Scoring(query.shape[-1] ** -0.5 if scale is None else float(scale), causal),
        queries_sharded=queries_sharded,
        keys_sharded=keys_sharded,
    )
    return _attend_jitted(layout, query, key, value, key_mask)


def _check(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    key_mask: AnyArray | None,
    causal: bool,
    dropout_rate: float,
) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"attention: expected arrays (B, N, H, D), got {shapes}")
    if (
        key.shape[:3] != value.shape[:3]
        or query.shape[::2] != key.shape[::2]
        or query.shape[3] != key.shape[3]
    ):
        raise ValueError(
            "attention: expected query (B, Q, H, D), key (B, K, H, D), value (B, K, H, D_v), "
            f"got {shapes}"
        )
    if key_mask is not None and (key_mask.shape != key.shape[:2] or key_mask.dtype != bool):
        raise ValueError(
            f"attention: expected key_mask bool {key.shape[:2]}, got {key_mask.dtype} "
            f"{key_mask.shape}"
        )
    if causal and query.shape[1] != key.shape[1]:
        raise ValueError(
            "attention: causal needs as many queries as keys, since both count the same positions; "
            f"got {query.shape[1]} and {key.shape[1]}"
        )
    if dropout_rate:
        raise ValueError(
            f"attention: dropout of attention weights is not available, got dropout_rate="
            f"{dropout_rate}; drop out the output instead"
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    layout: _Layout, query: Array, key: Array, value: Array, key_mask: Array | None
) -> Array:
    return _attend_forward(layout, query, key, value, key_mask)[0]


def _attend_forward(
    layout: _Layout, query: Array, key: Array, value: Array, key_mask: Array | None
) -> tuple[Array, PyTree]:
    run = mesh_lib.island(
        partial(_forward, layout),
        in_specs=(layout.query_spec, layout.key_spec, layout.key_spec, layout.key_spec),
        out_specs=(layout.query_spec, layout.sums_spec),
    )
    output, log_sum_exp = run(query, key, value, chunks.tie(key_mask, key))
    return output, (query, key, value, key_mask, output, log_sum_exp)


def _attend_backward(
    layout: _Layout, residuals: PyTree, d_output: Array
) -> tuple[Array | None, ...]:
    run = mesh_lib.island(
        partial(_backward, layout),
        in_specs=(
            layout.query_spec,
            layout.key_spec,
            layout.key_spec,
            layout.key_spec,
            layout.query_spec,
            layout.sums_spec,
            layout.query_spec,
        ),
        out_specs=(layout.query_spec, layout.key_spec, layout.key_spec),
    )
    return *run(*residuals, d_output), None


_attend.defvjp(_attend_forward, _attend_backward)
# Eager calls compile once a shape; inside a compiled program this is inlined.
_attend_jitted = jax.jit(_attend, static_argnums=0)


def _forward(
    layout: _Layout,
    query: Array,
    key: Array,
    value: Array,
    key_mask: Array | None,
    *,
    axis: str | None,
) -> tuple[Array, Array]:
    """One shard's part of the output and of the log-sum-exp."""
    dtype = accumulation_dtype(query.dtype, key.dtype, value.dtype)
    batch, queries, heads, _ = query.shape
    sums = softmax.start(batch, heads, queries, value.shape[-1], dtype)
    first_query = _first_position(layout.queries_sharded, queries, axis)

    if layout.queries_sharded and layout.keys_sharded and axis is not None:
        block: _Block = (key, value, key_mask)
        shards = jax.lax.axis_size(axis)

        def turn(
            step: Array, carry: tuple[softmax.SoftmaxSums, _Block]
        ) -> tuple[softmax.SoftmaxSums, _Block]:
            sums, block = carry
            block = _pass_on(block, axis)
            owner = (jax.lax.axis_index(axis) - step) % shards
            first_key = owner * key.shape[1]
            return fold(layout.scoring, sums, query, *block, first_query, first_key), block

        first_key = _first_position(True, key.shape[1], axis)
        sums = fold(layout.scoring, sums, query, *block, first_query, first_key)
        sums, _ = jax.lax.fori_loop(1, shards, turn, (sums, block))
    else:
        first_key = _first_position(layout.keys_sharded, key.shape[1], axis)
        sums = fold(layout.scoring, sums, query, key, value, key_mask, first_query, first_key)
        if layout.keys_sharded:
            sums = softmax.merge(sums, axis)

    output, log_sum_exp = softmax.finish(sums)
    return output.swapaxes(1, 2).astype(value.dtype), log_sum_exp


def _backward(
    layout: _Layout,
    query: Array,
    key: Array,
    value: Array,
    key_mask: Array | None,
    output: Array,
    lse: Array,
    d_output: Array,
    *,
    axis: str | None,
) -> Gradients:
    """One shard's part of the gradients of query, key and value."""
    dtype = lse.dtype
    delta = jnp.einsum("bqhd,bqhd->bhq", d_output.astype(dtype), output.astype(dtype))
    first_query = _first_position(layout.queries_sharded, query.shape[1], axis)
    d_query = jnp.zeros(query.shape, dtype)
    d_block = (jnp.zeros(key.shape, dtype), jnp.zeros(value.shape, dtype))
    fixed = (query, d_output, lse, delta)

    if layout.queries_sharded and layout.keys_sharded and axis is not None:
        shards = jax.lax.axis_size(axis)
        block: _Block = (key, value, key_mask)

        def turn(
            step: Array, carry: tuple[Array, _Block, tuple[Array, Array]]
        ) -> tuple[Array, _Block, tuple[Array, Array]]:
            d_query, block, d_block = carry
            block, d_block = _pass_on((block, d_block), axis)
            owner = (jax.lax.axis_index(axis) - step) % shards
            first_key = owner * key.shape[1]
            d_query, d_key, d_value = fold_gradient(
                layout.scoring, (d_query, *d_block), fixed, *block, first_query, first_key
            )
            return d_query, block, (d_key, d_value)

        first_key = _first_position(True, key.shape[1], axis)
        d_query, d_key, d_value = fold_gradient(
            layout.scoring, (d_query, *d_block), fixed, *block, first_query, first_key
        )
        d_query, _, d_block = jax.lax.fori_loop(1, shards, turn, (d_query, block, (d_key, d_value)))
        d_key, d_value = _pass_on(d_block, axis)
    else:
        first_key = _first_position(layout.keys_sharded, key.shape[1], axis)
        d_query, d_key, d_value = fold_gradient(
            layout.scoring, (d_query, *d_block), fixed, key, value, key_mask, first_query, first_key
        )
        if axis is not None and layout.keys_sharded and not layout.queries_sharded:
            d_query = jax.lax.psum(d_query, axis)
        if axis is not None and layout.queries_sharded and not layout.keys_sharded:
            packed = jax.lax.psum(jnp.concatenate([d_key, d_value], axis=-1), axis)
            d_key, d_value = jnp.split(packed, [key.shape[-1]], axis=-1)
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype)


def _first_position(sharded: bool, length: int, axis: str | None) -> Position:
    """Position in the whole array of a shard's first entry."""
    return jax.lax.axis_index(axis) * length if sharded and axis is not None else 0


def _pass_on(block: _Passed, axis: str) -> _Passed:
    """Every shard hands its arrays to the next shard of the ring."""
    shards = jax.lax.axis_size(axis)
    ring = [(i, (i + 1) % shards) for i in range(shards)]
    return jax.tree.map(lambda array: jax.lax.ppermute(array, axis, ring), block)
