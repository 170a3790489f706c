"""The mathematics of FLARE attention: gather points into latents, give the latents back to points.

With keys `k_n`, values `v_n` of the points and learned latent queries `q_m` (arXiv 2508.12594,
section 3):

    encode   z_m = sum_n P_nm v_n,   P = softmax over the points  n of scale * k_n . q_m
    decode   y_n = sum_m W_nm z_m,   W = softmax over the latents m of the same scores

Everything between the input and the output of the layer, its outer projections too, exists for a
chunk of points at a time, forward and backward; `parallel.streaming` merges the shards. Forward
they exchange a maximum and one packed sum, backward a sum of `dz` beside the weight gradients.
"""

from jaxtyping import Array, Bool, Float

from flare_jax import fused as fused_lib
from flare_jax.heads import HeadLinear, HeadScores, LatentWeights, map_into, map_out, visible
from parallel import softmax
from parallel.contraction import product
from parallel.streaming import (
    Chunking,
    Held,
    Places,
    SoftmaxPart,
    map_held,
    map_points,
    softmax_over_points,
    softmax_part,
)


def score_weights(queries: Float[Array, "H S D"], key: HeadLinear, scale: float) -> HeadScores:
    """Scores of a head's points are linear in them: the keys need not be made.

    Args:
        queries: latent queries.
        key: `(H, D, D)`, from the heads to their keys.
        scale: factor of the scores.

    Returns:
        The map from the heads to `scale * keys . queries`.
    """
    kernel = scale * product("hse,hde->hsd", queries, key.kernel)
    return HeadScores(kernel, scale * product("hse,he->hs", queries, key.bias))


def flare_mixer(
    x: Float[Array, "B N C"],
    weights: LatentWeights,
    value: HeadLinear,
    output: HeadLinear,
    point_mask: Bool[Array, "B N"] | None = None,
    *,
    chunk_size: int | None = None,
    fused: bool = False,
) -> Float[Array, "B N C"]:
    """FLARE attention from the input of a layer to its output.

    Args:
        x: points; on a mesh with a `points` axis N must divide by it.
        weights: see `LatentWeights`; computed with in the type of `x`.
        value: `(H, D, D)`, from the heads to their values.
        output: `(H, D, C)`, from the heads to the output.
        point_mask: True where a point is real. Other rows change nothing and come out zero.
        chunk_size: points of a shard that are worked on at once, see `parallel.streaming.Chunking`.
        fused: go through the fused kernel of `flare_jax.fused`.

    Returns:
        The mixed points, laid out as `x`.
    """
    chunking = latent_chunking(weights, chunk_size, fused=fused)
    z, held = gather_latents(x, weights, value, point_mask, chunking, fused=fused)
    decode = _decode_fused if fused else _decode
    return map_held(decode, chunking, output, {"z": z}, held)


def latent_chunking(
    weights: LatentWeights, chunk_size: int | None = None, *, fused: bool = False
) -> Chunking:
    """How many points are worked on at once."""
    heads, latents, _ = weights.scores.kernel.shape
    if fused:
        return fused_lib.whole_shard(heads, latents)
    return Chunking(heads, latents, chunk_size)


def gather_latents(
    x: Float[Array, "B N C"],
    weights: LatentWeights,
    value: HeadLinear,
    point_mask: Bool[Array, "B N"] | None,
    chunking: Chunking,
    *,
    fused: bool = False,
) -> tuple[Float[Array, "B H S D"], Held]:
    """The encode step: the latents, and what they were made of.

    Softmax weights sum to one, so that the mean of the values is the value of the mean.
    """
    points = _points(x, point_mask)
    if fused:
        means, held = fused_lib.gather(weights, points)
    else:
        means, held = softmax_over_points(_encode, chunking, weights, {}, points)
    return values_of(means, value), held


def values_of(means: Float[Array, "B H S D"], value: HeadLinear) -> Float[Array, "B H S E"]:
    """Latents from the means of the heads: the value of the mean."""
    z = product("bhsd,hde->bhse", means, value.kernel.astype(means.dtype))
    return z + value.bias.astype(z.dtype)[:, None]


def gather_part(
    x: Float[Array, "B N C"], weights: LatentWeights, point_mask: Bool[Array, "B N"] | None
) -> SoftmaxPart:
    """The encode step on a part of the points; see `parallel.streaming.softmax_part`."""
    return softmax_part(_encode, latent_chunking(weights), weights, {}, _points(x, point_mask))


def give_back(
    x: Float[Array, "B N C"],
    weights: LatentWeights,
    z: Float[Array, "B H S D"],
    output: HeadLinear,
    point_mask: Bool[Array, "B N"] | None,
) -> Float[Array, "B N C"]:
    """The decode step on points that need not be those of the latents."""
    points = _points(x, point_mask)
    return map_points(_decode, latent_chunking(weights), (weights, output), {"z": z}, points)


def _points(x: Array, point_mask: Array | None) -> dict[str, Array]:
    return {"x": x} | ({} if point_mask is None else {"mask": point_mask})


def heads_of(weights: LatentWeights, chunk: dict[str, Array]) -> Float[Array, "B H D n"]:
    """Heads of a chunk of points; of zeros where they are padding, whatever these hold."""
    return map_into(weights.point, visible(chunk["x"], chunk.get("mask"), weights.normalized))


def spread_latents(
    weights: LatentWeights, z: Float[Array, "B H S D"], heads: Float[Array, "B H D n"]
) -> Float[Array, "B H D n"]:
    """The decode step, on the heads of a chunk of points."""
    scores = weights.scores(heads)
    return softmax.mix(heads.dtype, scores, z).astype(heads.dtype)


def _encode(
    weights: LatentWeights, latents: dict[str, Array], chunk: dict[str, Array], places: Places
) -> tuple[Array, Array]:
    mask = chunk.get("mask")
    heads = heads_of(weights, chunk)
    scores = weights.scores(heads)
    return softmax.mask_scores(scores, None if mask is None else mask[:, None, None]), heads


def _decode(
    weights: tuple[LatentWeights, HeadLinear],
    latents: dict[str, Array],
    chunk: dict[str, Array],
    places: Places,
) -> Array:
    own, output = weights
    y = spread_latents(own, latents["z"], heads_of(own, chunk))
    return map_out(output, y, chunk.get("mask"))


def _decode_fused(
    weights: tuple[LatentWeights, HeadLinear],
    latents: dict[str, Array],
    chunk: dict[str, Array],
    places: Places,
) -> Array:
    own, output = weights
    y = fused_lib.spread(fused_lib.heads_of(own, chunk), own.scores, latents["z"])
    return fused_lib.map_out(output, y, chunk.get("mask"))
