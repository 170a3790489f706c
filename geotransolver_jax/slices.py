"""The mathematics of physics attention: points to slices and back (arXiv 2402.02366, section 3.2).

Each point belongs to each of S slices by a weight, a softmax over the slices of a projection of the
point. Slice tokens are weighted means of the points; what attention makes of them goes back to the
points by the same weights. Projections and weights exist for a chunk of points at a time, forward
and backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt32

from flare_jax.activations import gelu
from flare_jax.heads import HeadLinear, HeadScores, hide, map_into, map_out, visible
from parallel import softmax
from parallel.contraction import contract, product
from parallel.streaming import (
    Chunking,
    Held,
    Places,
    map_held,
    map_points,
    pull_back_sums,
    sum_over_points,
)

# Added to the sum of a slice's weights, as the reference does: an empty slice becomes zero.
_EMPTY_SLICE = 1e-2
_TEMPERATURE_RANGE = (0.5, 5.0)
_ADAPTIVE_TEMPERATURE_LEAST = 0.01
_GUMBEL_EPSILON = 1e-8


class AdaptiveTemperature(NamedTuple):
    """Perceptron that adds to the temperature of a point (Transolver++, arXiv 2502.02414).

    Attributes:
        hidden: from the heads of a point to S numbers.
        output: from these to one.
    """

    hidden: HeadScores
    output: HeadScores


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SliceWeights:
    """Weights by which points belong to slices.

    Attributes:
        point: `(H, C, D)`, from a point to what decides on its slices; `None` where points come
            projected.
        value: likewise to what is averaged; `None` also where that is the same, and on the way
            back to the points.
        slices: from the heads of a point to its scores.
        temperature: `(H,)`.
        adaptive: `None` for Transolver and GALE.
        noise_key: data of the key of the Gumbel noise, `(1, ...)`; only with `adaptive`, and
            `None` where there is no noise.
        normalized: whether points are standardized in front.
    """

    point: HeadLinear | None
    value: HeadLinear | None
    slices: HeadScores
    temperature: Float[Array, " H"]
    adaptive: AdaptiveTemperature | None = None
    noise_key: UInt32[Array, "1 K"] | None = None
    normalized: bool = field(default=False, metadata={"static": True})


class Points(NamedTuple):
    """Points `(B, N, ...)` as physics attention reads them.

    Attributes:
        x: the points, or, where they come projected, what decides on their slices.
        value: what is averaged, where points come projected and it is not `x`.
        mask: True where a point is real.
        number: of each point, by which it draws its noise; by default its row.
    """

    x: Float[Array, "B N C"]
    value: Float[Array, "B N C"] | None = None
    mask: Bool[Array, "B N"] | None = None
    number: Int[Array, "B N"] | None = None


def points_to_slices(points: Points, weights: SliceWeights) -> tuple[Float[Array, "B H S D"], Held]:
    """Slice tokens: means of the points' values by their slice weights; one packed all-reduce.

    Args:
        points: the points; on a mesh N divides by the `points` axis.
        weights: see `SliceWeights`.

    Returns:
        `sum_n w_n values_n / (sum_n w_n + 0.01)`, replicated over the points, in float32 or wider;
        and what they were made of.
    """
    return _tokens(weights, points)


@jax.custom_vjp
def _tokens(weights: SliceWeights, points: Points) -> tuple[Array, Held]:
    return _tokens_forward(weights, points)[0]


def _tokens_forward(weights: SliceWeights, points: Points) -> tuple[tuple[Array, Held], PyTree]:
    (sums, totals), held = sum_over_points(_pool, slice_chunking(weights), weights, {}, points)
    totals = (totals + _EMPTY_SLICE)[..., None]
    tokens = sums / totals
    # The points of the sum: were those given kept as well, each block would keep them twice.
    return (tokens, held), (weights, held.points, tokens, totals)


def _tokens_backward(residuals: PyTree, gradients: tuple[Array, Held]) -> tuple[PyTree, PyTree]:
    """The gradient of `sum_n w_n (values_n - tokens) / totals` at fixed tokens and totals.

    It is that of the tokens. Where values are alike, the gradients of sums and totals all but
    cancel and leave their rounding; values are therefore taken from the tokens' middle.
    """
    weights, points, tokens, totals = residuals
    d_tokens, d_held = gradients

    centre = tokens.mean(2, keepdims=True)
    latents = {"centre": centre, "tokens": tokens - centre}

    d_sums = d_tokens / totals
    d_weights, _, d_points = pull_back_sums(
        _pool_deviations, slice_chunking(weights), weights, latents, points, d_sums, d_held
    )
    return d_weights, d_points


_tokens.defvjp(_tokens_forward, _tokens_backward)


class SlicePart(NamedTuple):
    """What a part of the points gives to the slices.

    Attributes:
        sums: of values by weights.
        totals: of weights.
    """

    sums: Float[Array, "B H S D"]
    totals: Float[Array, "B H S"]


def gather_part(points: Points, weights: SliceWeights) -> SlicePart:
    """Sums over points of which others are elsewhere; see `flare_jax.phases`."""
    sums, _ = sum_over_points(_pool, slice_chunking(weights), weights, {}, points)
    return SlicePart(*sums)


def merged_tokens(parts: Sequence[SlicePart]) -> Float[np.ndarray, "B H S D"]:
    """Slice tokens of the points of all parts, on the host in float64."""
    sums, totals = (
        reduce(np.add, (np.asarray(part[i], np.float64) for part in parts)) for i in range(2)
    )
    return sums / (totals + _EMPTY_SLICE)[..., None]


def give_back(
    points: Points, weights: SliceWeights, tokens: Float[Array, "B H S D"], output: HeadLinear
) -> Float[Array, "B N C"]:
    """`slices_to_points` for points that need not be those of the tokens."""
    chunking = slice_chunking(weights)
    return map_points(_unpool, chunking, (weights, output), {"tokens": tokens}, points)


def slices_to_points(
    held: Held, tokens: Float[Array, "B H S D"], chunking: Chunking, output: HeadLinear
) -> Float[Array, "B N C"]:
    """Gives each point the sum of the slice tokens by its weights, mapped out of the heads.

    Nothing is exchanged forward, and one all-reduce of the tokens' gradient backward, beside that
    of the output's weights.

    Args:
        held: of `points_to_slices`.
        tokens: what attention made of its slice tokens.
        chunking: see `slice_chunking`.
        output: from the heads to the output.
    """
    return map_held(_unpool, chunking, output, {"tokens": tokens}, held)


def slice_chunking(weights: SliceWeights) -> Chunking:
    """How many points are worked on at once."""
    heads, slices, _ = weights.slices.kernel.shape
    return Chunking(heads, slices)


def _pool(
    weights: SliceWeights, latents: dict[str, Array], chunk: Points, places: Places
) -> tuple[Array, Array]:
    shares, value = _shares_and_values(weights, chunk, places)
    return product("bhsn,bhdn->bhsd", shares.astype(value.dtype), value), shares.sum(-1)


def _pool_deviations(
    weights: SliceWeights, latents: dict[str, Array], chunk: Points, places: Places
) -> Array:
    shares, value = _shares_and_values(weights, chunk, places)
    value = value.astype(shares.dtype) - latents["centre"].swapaxes(2, 3)
    sums = contract("bhsn,bhdn->bhsd", shares, value)
    return sums - shares.sum(-1)[..., None] * latents["tokens"]


def _shares_and_values(weights: SliceWeights, chunk: Points, places: Places) -> tuple[Array, Array]:
    """By how much each point of a chunk belongs to each slice, nothing if padding; its values."""
    places = _places_of(chunk, places)
    points = _visible(weights, chunk)
    x = _heads(weights, weights.point, points, chunk.mask)
    shares = softmax.shares(_slice_scores(weights, x, places))
    value = x
    if weights.value is not None:
        value = map_into(weights.value, points)
    elif chunk.value is not None:
        value = _heads(weights, None, chunk.value, chunk.mask)
    if chunk.mask is not None:
        shares = jnp.where(chunk.mask[:, None, None], shares, 0)
    return shares, value


def _unpool(
    weights: tuple[SliceWeights, HeadLinear],
    latents: dict[str, Array],
    chunk: Points,
    places: Places,
) -> Array:
    own, output = weights
    places = _places_of(chunk, places)
    x = _heads(own, own.point, _visible(own, chunk), chunk.mask)
    y = softmax.mix(x.dtype, _slice_scores(own, x, places), latents["tokens"])
    return map_out(output, y.astype(x.dtype), chunk.mask)


def _places_of(chunk: Points, places: Places) -> Places:
    return places if chunk.number is None else places._replace(points=chunk.number)


def _visible(weights: SliceWeights, chunk: Points) -> Float[Array, "B n C"]:
    return visible(chunk.x, chunk.mask, weights.normalized)


def _heads(
    weights: SliceWeights, projection: HeadLinear | None, x: Array, mask: Array | None
) -> Array:
    """Heads (B, H, D, n) of a chunk, projected here or before."""
    if projection is not None:
        return map_into(projection, x)
    x = hide(x, mask)
    split = x.reshape(*x.shape[:2], weights.temperature.shape[0], -1)
    return jnp.moveaxis(split, 1, 3)


def _slice_scores(weights: SliceWeights, x: Array, places: Places) -> Float[Array, "B H S n"]:
    """Scores of each point of a chunk for each slice, over the temperature."""
    scores = weights.slices(x)
    temperature = weights.temperature.astype(scores.dtype)[:, None, None]
    if weights.adaptive is None:
        return scores / jnp.clip(temperature, *_TEMPERATURE_RANGE)

    hidden = gelu(weights.adaptive.hidden(x))
    temperature = temperature + gelu(weights.adaptive.output(hidden))
    if weights.noise_key is not None:
        scores += _gumbel_noise(weights.noise_key, scores.shape, places, scores.dtype)
    return scores / jnp.maximum(temperature, _ADAPTIVE_TEMPERATURE_LEAST)


def _gumbel_noise(
    key_data: Array, shape: tuple[int, ...], places: Places, dtype: jax.typing.DTypeLike
) -> Array:
    """Noise that belongs to a point of a sample by its place, whatever chunk or shard it is in."""
    _, heads, slices, _ = shape
    key = jax.random.wrap_key_data(key_data[0])

    def draw(sample: Array, point: Array) -> Array:
        own = jax.random.fold_in(jax.random.fold_in(key, sample), point)
        return jax.random.uniform(own, (heads, slices), dtype)

    of_points = jax.vmap(draw, in_axes=(None, 0), out_axes=-1)
    # Numbers of points are those of all samples, or each has its own.
    own = 0 if places.points.ndim == 2 else None
    uniform = jax.vmap(of_points, in_axes=(0, own))(places.samples, places.points)
    return -jnp.log(-jnp.log(uniform + _GUMBEL_EPSILON) + _GUMBEL_EPSILON)
