"""The mathematics of FLARE attention: gather points into latents, give the latents back to points.

With keys `k_n`, values `v_n` of the points and learned latent queries `q_m` (arXiv 2508.12594,
section 3):

    encode   z_m = sum_n P_nm v_n,   P = softmax over the points  n of scale * k_n . q_m
    decode   y_n = sum_m W_nm z_m,   W = softmax over the latents m of the same scores

Everything between the input and the output of the layer, its outer projections too, exists for a
chunk of points at a time, forward and backward; `parallel.streaming` merges the shards. Forward
they exchange a maximum and one packed sum, backward a sum of `dz` beside the weight gradients.
"""

from functools import partial
from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Float

from flare_jax.heads import HeadLinear, map_into, map_out, map_within
from parallel import softmax
from parallel.contraction import contract, product
from parallel.streaming import Chunking, map_points, softmax_over_points


class LatentWeights(NamedTuple):
    """Weights by which points and latents see each other.

    Attributes:
        queries: latent queries, `(H, S, D)`.
        point: `(H, C, D)`, from the input to the heads.
        key: `(H, D, D)`.
        value: `(H, D, D)`; not read by the decode step.
    """

    queries: Float[Array, "H S D"]
    point: HeadLinear
    key: HeadLinear
    value: HeadLinear | None


def flare_mixer(
    x: Float[Array, "B N C"],
    weights: LatentWeights,
    output: HeadLinear,
    point_mask: Bool[Array, "B N"] | None = None,
    *,
    scale: float = 1.0,
    chunk_size: int | None = None,
) -> Float[Array, "B N C"]:
    """FLARE attention from the input of a layer to its output.

    Args:
        x: points; on a mesh with a `points` axis N must divide by it.
        weights: see `LatentWeights`; computed with in the type of `x`.
        output: `(H, D, C)`, from the heads to the output.
        point_mask: True where a point is real. Other rows change nothing and come out zero.
        scale: factor of the scores. The reference uses 1; the paper `D ** -0.5` for D above 8.
        chunk_size: points of a shard that are worked on at once, see `parallel.streaming.Chunking`.

    Returns:
        The mixed points, laid out as `x`.
    """
    chunking = Chunking(*weights.queries.shape[:2], chunk_size)
    z, points = gather_latents(x, weights, point_mask, chunking, scale=scale)
    weights = (weights._replace(value=None), output)
    return map_points(partial(_decode, scale), chunking, weights, {"z": z}, points)


def gather_latents(
    x: Float[Array, "B N C"],
    weights: LatentWeights,
    point_mask: Bool[Array, "B N"] | None,
    chunking: Chunking,
    *,
    scale: float,
) -> tuple[Float[Array, "B H S D"], dict[str, jax.Array]]:
    """The encode step: the latents, and the points to read on from (`softmax_over_points`)."""
    points = {"x": x} | ({} if point_mask is None else {"mask": point_mask})
    return softmax_over_points(partial(_encode, scale), chunking, weights, {}, points)


def spread_latents(
    weights: LatentWeights, z: Float[Array, "B H S D"], heads: Float[Array, "B n H D"], scale: float
) -> Float[Array, "B n H D"]:
    """The decode step, on the heads of a chunk of points."""
    assignment = jax.nn.softmax(_scores(weights, heads, scale), axis=2)
    y = product("bhsn,bhsd->bnhd", assignment.astype(heads.dtype), z.astype(heads.dtype))
    return y.astype(heads.dtype)


def _encode(scale: float, weights: LatentWeights, latents, chunk, places):
    mask = chunk.get("mask")
    heads = map_into(weights.point, chunk["x"], mask)
    scores = _scores(weights, heads, scale)
    scores = softmax.mask_scores(scores, None if mask is None else mask[:, None, None])
    return scores, map_within(weights.value, heads)


def _decode(scale: float, weights, latents, chunk, places):
    weights, output = weights
    mask = chunk.get("mask")
    heads = map_into(weights.point, chunk["x"], mask)
    return map_out(output, spread_latents(weights, latents["z"], heads, scale), mask)


def _scores(weights: LatentWeights, heads, scale: float) -> Float[Array, "B H S n"]:
    keys = map_within(weights.key, heads)
    return scale * contract("bnhd,hsd->bhsn", keys, weights.queries)
