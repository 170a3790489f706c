"""FLARE attention through one fused kernel, cuDNN's, on all points of a shard at once.

Such a kernel returns weighted values, and neither it nor `jax.nn.dot_product_attention` gives what
merging the shards needs beside them: the log-sum-exp, in float32 and with a gradient. So every
shard gets one more point, of a score `r` that is the same on all of them, whose value is a one in a
channel of its own. What that channel returns is the share of this point, and tells the weight of
the others:

    w = e^r / (e^r + Z)                     1 / w - 1 = Z / e^r
    o = sum_n e^s_n v_n / (e^r + Z)         o / w = sum_n e^s_n v_n / e^r

Their sums over the shards are the numerator and the denominator of the whole softmax. The score is
a little below the greatest one of the latent: by so much that a narrow `w` loses no digits of Z,
and by no more, so that it does not vanish.

Padding scores by a channel, too: a mask would be an array of all scores.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from flare_jax.heads import HeadLinear, HeadScores, LatentWeights, hide, visible
from parallel import mesh as mesh_lib
from parallel import softmax
from parallel.contraction import contract, product
from parallel.precision import accumulation_dtype
from parallel.streaming import Chunking, Held, Places, greatest_over_points, sum_over_points

BACKENDS = ("auto", "xla", "cudnn")
# What `jax.nn.dot_product_attention` calls it.
_IMPLEMENTATION: Literal["cudnn"] = "cudnn"
_NARROW = ("bfloat16", "float16")
_CHANNELS, _MOST_CHANNELS = 8, 128
# Channels beside those of a head: of padding and of the point more, or of a bias in two parts.
_EXTRA = 2
_PADDING_SCORE = -3e4
# By how much the point more scores below the greatest.
_BELOW = 20.0


def check_backend(name: str, dtype: jax.typing.DTypeLike, width: int) -> None:
    """Refuses what cannot run.

    Args:
        name: `auto` (`xla`, until another one has been measured to be faster), `xla` (chunks of
            points, any type and device) or `cudnn`.
        dtype: type to compute in.
        width: channels of a head.

    Raises:
        ValueError: the backend is unknown, or does not take the type or the width.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention_backend: expected one of {', '.join(BACKENDS)}; got {name!r}")
    if name != "cudnn":
        return
    if jnp.dtype(dtype).name not in _NARROW:
        raise ValueError(
            "attention_backend: 'cudnn' expects dtype bfloat16 or float16, which its kernels "
            f"compute in; got {jnp.dtype(dtype).name}"
        )
    if width + _EXTRA > _MOST_CHANNELS:
        raise ValueError(
            f"attention_backend: 'cudnn' expects heads of at most {_MOST_CHANNELS - _EXTRA} "
            f"channels; got {width}"
        )


def uses_kernel(backend: str) -> bool:
    """Whether attention is to go through the fused kernel, in the current context.

    Raises:
        ValueError: it is to, but the context compiles for another device than a GPU.
    """
    if backend != "cudnn":
        return False
    if mesh_lib.platform() != "gpu":
        raise ValueError(
            "attention_backend: 'cudnn' expects an NVIDIA GPU to compile for; got "
            f"{mesh_lib.platform()!r}"
        )
    return True


def whole_shard(heads: int, latents: int) -> Chunking:
    """All points of a shard at once: the kernel itself goes through them in tiles."""
    return Chunking(heads, latents, 2**31 - 1)


def gather(
    weights: LatentWeights, points: dict[str, jax.Array]
) -> tuple[Float[Array, "B H S D"], Held]:
    """`sum_n softmax_n(scores_n) heads_n`, and what that was made of.

    Args:
        weights: see `LatentWeights`.
        points: `x` `(B, N, C)`, and `mask` `(B, N)` where some are padding.
    """
    heads, slices, _ = weights.scores.kernel.shape
    greatest = greatest_over_points(_scores, Chunking(heads, slices), weights, {}, points)
    latents = {"score": greatest - _BELOW}
    (sums, totals), held = sum_over_points(
        _sums, whole_shard(heads, slices), weights, latents, points
    )
    return sums / totals[..., None], held


def _scores(
    weights: LatentWeights, latents: dict[str, Array], chunk: dict[str, Array], places: Places
) -> Array:
    """Scores without their bias, which no softmax over points sees."""
    heads = heads_of(weights, chunk)
    scores = product("bnhd,hsd->bhsn", heads, weights.scores.kernel.astype(heads.dtype))
    mask = chunk.get("mask")
    return softmax.mask_scores(scores, None if mask is None else mask[:, None, None])


def _sums(
    weights: LatentWeights, latents: dict[str, Array], chunk: dict[str, Array], places: Places
) -> tuple[Array, Array]:
    heads = heads_of(weights, chunk)
    batch, points, count, width = heads.shape
    dtype, channels = heads.dtype, _padded(width)
    is_padding, is_more = (jnp.arange(channels) == width + i for i in range(_EXTRA))

    mask = chunk.get("mask")
    padding = jnp.zeros((batch, points), dtype)
    if mask is not None:
        padding = jnp.where(mask, padding, jnp.asarray(_PADDING_SCORE, dtype))
    more = jnp.broadcast_to(is_more.astype(dtype), (batch, 1, count, channels))
    key = _pad(heads, channels) + padding[:, :, None, None] * is_padding.astype(dtype)
    key = jnp.concatenate([key, more], axis=1)
    value = jnp.concatenate([_pad(heads, channels), more], axis=1)
    score = jax.lax.stop_gradient(latents["score"]).astype(dtype).swapaxes(1, 2)[..., None]
    query = _pad(weights.scores.kernel.astype(dtype).swapaxes(0, 1), channels)
    query = query + is_padding.astype(dtype) + score * is_more.astype(dtype)

    result = _attend(query, key, value, width).swapaxes(1, 2)
    share = result[..., width + 1]
    return result[..., :width] / share[..., None], 1 / share - 1


def heads_of(weights: LatentWeights, chunk: dict[str, jax.Array]) -> Float[Array, "B n H D"]:
    """Heads of the points, of zeros where they are padding, laid out as the kernel reads them."""
    x = visible(chunk["x"], chunk.get("mask"), weights.normalized)
    heads = contract("bnc,hcd->bnhd", x, weights.point.kernel)
    return (heads + weights.point.bias.astype(heads.dtype)).astype(x.dtype)


def spread(
    heads: Float[Array, "B n H D"], scores: HeadScores, values: Float[Array, "B H S D"]
) -> Float[Array, "B n H D"]:
    """`sum_s softmax_s(scores_s) values_s` for every point, in the type of the heads.

    Args:
        heads: of the points.
        scores: kernel `([B,] H, S, D)` and bias `([B,] H, S)` of their scores.
        values: of the latents.
    """
    batch, _, _, width = heads.shape
    dtype, channels = heads.dtype, _padded(width)
    kernel, bias = scores
    # In two parts a narrow type holds the bias to twice its digits.
    coarse = bias.astype(dtype)
    fine = (bias - coarse.astype(bias.dtype)).astype(dtype)
    key = jnp.concatenate([kernel.astype(dtype), coarse[..., None], fine[..., None]], axis=-1)
    key = jnp.broadcast_to(key, (batch, *key.shape[-3:])).swapaxes(1, 2)
    ones = jnp.ones((*heads.shape[:-1], _EXTRA), dtype)
    query = jnp.concatenate([heads, ones], axis=-1)
    value = values.astype(dtype).swapaxes(1, 2)
    query, key, value = (_pad(array, channels) for array in (query, key, value))
    return _attend(query, key, value, width)[..., :width].astype(dtype)


def map_out(
    output: HeadLinear, heads: Float[Array, "B n H D"], mask: Bool[Array, "B n"] | None
) -> Float[Array, "B n C"]:
    """The output that the heads sum to; zero where points are padding."""
    y = contract("bnhd,hdc->bnc", heads, output.kernel)
    return hide((y + output.bias[0].astype(y.dtype)).astype(heads.dtype), mask)


def _attend(query: Array, key: Array, value: Array, width: int) -> Array:
    """The kernel's result, in float32 or wider; channel `width` of every query is one.

    cuDNN has no gradient where there is an odd number of queries or keys. One more query changes
    nothing, nor does a key that scores as padding does.
    """
    queries, keys = query.shape[1], key.shape[1]
    query, key, value = (
        jnp.pad(array, ((0, 0), (0, array.shape[1] % 2), (0, 0), (0, 0)))
        for array in (query, key, value)
    )
    key = key.at[:, keys:, :, width].set(_PADDING_SCORE)
    result = mesh_lib.by_heads(_kernel)(query, key, value)
    return result[:, :queries].astype(accumulation_dtype(result.dtype))


def _kernel(query: Array, key: Array, value: Array) -> Array:
    return jax.nn.dot_product_attention(
        query, key, value, scale=1.0, implementation=_IMPLEMENTATION
    )


def _padded(width: int) -> int:
    """Channels of a head in the kernel."""
    return -(-(width + _EXTRA) // _CHANNELS) * _CHANNELS


def _pad(array: Array, channels: int) -> Array:
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, channels - array.shape[-1])])
