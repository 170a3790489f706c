"""A softmax over keys that come in pieces: chunks of one device, or shards of many.

The state of an unfinished softmax is, for each query, the largest score so far and two sums
relative to it (online softmax: Milakov and Gimelshein, arXiv 1805.02867). Two states merge by
log-sum-exp, which is how the shards of an axis become one result.

Masked scores are the most negative number of the type, and the maximum starts at half of it: then
`exp(masked - maximum)` is zero whatever comes, no infinity is ever subtracted from another, and a
shard whose every key is padding contributes nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class SoftmaxSums(NamedTuple):
    """State of a softmax over keys, weighting values.

    Attributes:
        maximum: `(B, H, Q)`, the largest score seen.
        denominator: `(B, H, Q)`, the sum of `exp(score - maximum)`.
        numerator: `(B, H, Q, D)`, the same weights times the values.
    """

    maximum: Float[Array, "B H Q"]
    denominator: Float[Array, "B H Q"]
    numerator: Float[Array, "B H Q D"]


def accumulation_dtype(*dtypes: jax.typing.DTypeLike) -> jnp.dtype:
    """The type in which to reduce: float32, or wider where an operand is wider."""
    return jnp.result_type(jnp.float32, *dtypes)


def mask_scores(
    scores: Float[Array, "B H Q K"], mask: Bool[Array, "B #H #Q K"] | None
) -> Float[Array, "B H Q K"]:
    """Scores with the most negative number where the mask is False."""
    if mask is None:
        return scores
    return jnp.where(mask, scores, jnp.finfo(scores.dtype).min)


def start(batch: int, heads: int, queries: int, width: int, dtype: jnp.dtype) -> SoftmaxSums:
    """The state before any key was seen."""
    return SoftmaxSums(
        jnp.full((batch, heads, queries), jnp.finfo(dtype).min / 2, dtype),
        jnp.zeros((batch, heads, queries), dtype),
        jnp.zeros((batch, heads, queries, width), dtype),
    )


def accumulate(
    sums: SoftmaxSums, scores: Float[Array, "B H Q K"], values: Float[Array, "B K H D"]
) -> SoftmaxSums:
    """The state after some more keys, whose masked scores and values are given."""
    maximum = jnp.maximum(sums.maximum, scores.max(-1))
    decay = jnp.exp(sums.maximum - maximum)
    weights = jnp.exp(scores - maximum[..., None])
    weighted = jnp.einsum(
        "bhqk,bkhd->bhqd",
        weights.astype(values.dtype),
        values,
        preferred_element_type=scores.dtype,
    )
    return SoftmaxSums(
        maximum,
        sums.denominator * decay + weights.sum(-1),
        sums.numerator * decay[..., None] + weighted,
    )


def merge(sums: SoftmaxSums, axis: str | None) -> SoftmaxSums:
    """Merges the states of all shards of a mesh axis: one maximum, one packed sum.

    Called inside an island; `axis` is None where the keys are not split.
    """
    if axis is None:
        return sums
    maximum = jax.lax.pmax(sums.maximum, axis)
    packed = jnp.concatenate([sums.numerator, sums.denominator[..., None]], axis=-1)
    packed = jax.lax.psum(packed * jnp.exp(sums.maximum - maximum)[..., None], axis)
    return SoftmaxSums(maximum, packed[..., -1], packed[..., :-1])


def finish(sums: SoftmaxSums) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    """The weighted values, and the log-sum-exp of the scores.

    A query that saw no key gets zeros, and a log-sum-exp of zero, from which `weights` makes zeros.
    """
    seen = sums.denominator > 0
    denominator = jnp.where(seen, sums.denominator, 1)
    log_sum_exp = jnp.where(seen, sums.maximum + jnp.log(denominator), 0)
    return sums.numerator / denominator[..., None], log_sum_exp


def weights(
    scores: Float[Array, "B H Q K"], log_sum_exp: Float[Array, "B H Q"]
) -> Float[Array, "B H Q K"]:
    """Softmax weights again, from masked scores and the merged log-sum-exp."""
    return jnp.exp(scores - log_sum_exp[..., None])
