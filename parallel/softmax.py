"""A softmax over keys that come in pieces: chunks of one device, or shards of many.

The state of an unfinished softmax is, for each query, the largest score so far and two sums
relative to it (online softmax: Milakov and Gimelshein, arXiv 1805.02867). Two states merge by
log-sum-exp, which is how the shards of an axis become one result.

Masked scores are the most negative number of the type, and the maximum starts at half of it: then
`exp(masked - maximum)` is zero whatever comes, no infinity is ever subtracted from another, and a
shard whose every key is padding contributes nothing.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from parallel.annotations import Size
from parallel.contraction import product, sum_of_products
from parallel.precision import accumulation_dtype


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


def mask_scores(
    scores: Float[Array, "B H Q K"], mask: Bool[Array, "#B #H #Q #K"] | None
) -> Float[Array, "B H Q K"]:
    """Scores with the most negative number where the mask is False."""
    if mask is None:
        return scores
    return jnp.where(mask, scores, jnp.finfo(scores.dtype).min)


def start(batch: Size, heads: int, queries: Size, width: int, dtype: jnp.dtype) -> SoftmaxSums:
    """The state before any key was seen."""
    return SoftmaxSums(
        jnp.full((batch, heads, queries), jnp.finfo(dtype).min / 2, dtype),
        jnp.zeros((batch, heads, queries), dtype),
        jnp.zeros((batch, heads, queries, width), dtype),
    )


def accumulate(
    sums: SoftmaxSums, scores: Float[Array, "B H Q K"], values: Float[Array, "B H D K"]
) -> SoftmaxSums:
    """The state after some more keys, whose masked scores and values are given."""
    maximum = jnp.maximum(sums.maximum, scores.max(-1))
    decay = jnp.exp(sums.maximum - maximum)
    weights = jnp.exp(scores - maximum[..., None])
    weighted = product("bhqk,bhdk->bhqd", weights.astype(values.dtype), values)
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


@jax.custom_vjp
def shares(scores: Float[Array, "B H S n"]) -> Float[Array, "B H S n"]:
    """Softmax over the latents of a chunk of points."""
    powers = jnp.exp(scores - scores.max(2, keepdims=True))
    return powers / powers.sum(2, keepdims=True)


def _shares_forward(scores: Array) -> tuple[Array, Array]:
    weights = shares(scores)
    return weights, weights


def _shares_backward(weights: Array, d_weights: Array) -> tuple[Array]:
    return (weights * (d_weights - sum_of_products(weights, d_weights, -2)),)


shares.defvjp(_shares_forward, _shares_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def mix(
    dtype: jax.typing.DTypeLike,
    scores: Float[Array, "B H S n"],
    values: Float[Array, "B H S D"],
) -> Float[Array, "B H D n"]:
    """What each point of a chunk gets of latents, by a softmax over them.

    Args:
        dtype: type to multiply in.
        scores: in float32 or wider.
        values: of the latents.

    Returns:
        `sum_s softmax_s(scores) values_s`, in float32 or wider.
    """
    return _mix_forward(dtype, scores, values)[0]


def _mix_forward(
    dtype: jax.typing.DTypeLike, scores: Array, values: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    weights = shares(scores)
    y = product("bhsd,bhsn->bhdn", values.astype(dtype), weights.astype(dtype))
    return y, (weights, values, y)


def _mix_backward(
    dtype: jax.typing.DTypeLike, residuals: tuple[Array, Array, Array], d_y: Array
) -> tuple[Array, Array]:
    """Their common part is had from the output, which has fewer channels than there are scores.

    Not so in a narrow type: there the output was made by rounded weights, which no longer sum to
    one, and what should cancel would not.
    """
    weights, values, y = residuals
    wide_d_y, d_y = d_y, d_y.astype(dtype)
    d_values = product("bhsn,bhdn->bhsd", weights.astype(dtype), d_y)
    d_weights = product("bhsd,bhdn->bhsn", values.astype(dtype), d_y)
    if accumulation_dtype(dtype) == dtype:
        common = sum_of_products(wide_d_y, y, -2)
    else:
        common = sum_of_products(weights, d_weights, -2)
    return weights * (d_weights - common), d_values.astype(values.dtype)


mix.defvjp(_mix_forward, _mix_backward)
