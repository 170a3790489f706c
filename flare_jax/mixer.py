"""The mathematics of FLARE attention: gather points into latents, give the latents back to points.

With keys `k_n`, values `v_n` of the points and learned latent queries `q_m` (arXiv 2508.12594,
section 3):

    encode   z_m = sum_n P_nm v_n,   P = softmax over the points  n of scale * k_n . q_m
    decode   y_n = sum_m W_nm z_m,   W = softmax over the latents m of the same scores

Keys and values are linear in the projected points `x_n`; they and the scores exist for a chunk of
points at a time, forward and backward. Shards of the points merge their encode softmax by
log-sum-exp (a maximum and one packed sum). The gradient needs one more sum, of `dz`, and one of the
weight gradients.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from parallel import chunks, softmax
from parallel import mesh as mesh_lib
from parallel.mesh import POINTS

_CLOUD = P(None, POINTS)


class MixerWeights(NamedTuple):
    """Weights of the FLARE mixer.

    Attributes:
        latent_queries: `(H, S, D)`.
        key_kernel: `(D, D)`, shared by the heads, as are the following.
        key_bias: `(D,)`.
        value_kernel: `(D, D)`.
        value_bias: `(D,)`.
    """

    latent_queries: Float[Array, "H S D"]
    key_kernel: Float[Array, "D D"]
    key_bias: Float[Array, " D"]
    value_kernel: Float[Array, "D D"]
    value_bias: Float[Array, " D"]


@dataclass(frozen=True)
class _Static:
    scale: float
    chunk_size: int | None

    def chunk_length(self, x, latents: int) -> int:
        batch, points, heads, _ = x.shape
        if self.chunk_size is not None:
            return min(self.chunk_size, points)
        return chunks.chunk_length(points, batch, heads, latents)


def flare_mixer(
    x: Float[Array, "B N H D"],
    weights: MixerWeights,
    point_mask: Bool[Array, "B N"] | None = None,
    *,
    scale: float = 1.0,
    chunk_size: int | None = None,
) -> Float[Array, "B N H D"]:
    """FLARE attention between the projections of a layer.

    Args:
        x: projected points; on a mesh with a `points` axis N must divide by it.
        weights: see `MixerWeights`; computed with in the type of `x`.
        point_mask: True where a point is real. Other rows change nothing and come out zero.
        scale: factor of the scores. The reference uses 1; the paper `D ** -0.5` for D above 8.
        chunk_size: points of a shard that are worked on at once, by default as many as keep the
            scores within a budget that depends on the platform.

    Returns:
        The mixed points, laid out as `x`.
    """
    return _mix(_Static(float(scale), chunk_size), x, weights, point_mask)


@partial(jax.jit, static_argnums=0)
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(static: _Static, x, weights: MixerWeights, point_mask):
    return _mix_forward(static, x, weights, point_mask)[0]


def _mix_forward(static: _Static, x, weights, point_mask):
    run = mesh_lib.island(
        partial(_forward, static), in_specs=(_CLOUD, P(), _CLOUD), out_specs=(_CLOUD, P(), P())
    )
    y, latents, lse = run(x, _cast(weights, x.dtype), chunks.tie(point_mask, x))
    return y, (x, weights, point_mask, latents, lse)


def _mix_backward(static: _Static, residuals, d_y):
    run = mesh_lib.island(
        partial(_backward, static),
        in_specs=(_CLOUD, P(), _CLOUD, P(), P(), _CLOUD),
        out_specs=(_CLOUD, P()),
    )
    x, weights, *others = residuals
    d_x, d_weights = run(x, _cast(weights, x.dtype), *others, d_y)
    # The sums of the weight gradients are never narrowed to the type that is computed in.
    d_weights = jax.tree.map(lambda d, weight: d.astype(weight.dtype), d_weights, weights)
    return d_x, d_weights, None


_mix.__wrapped__.defvjp(_mix_forward, _mix_backward)


def _cast(weights: MixerWeights, dtype) -> MixerWeights:
    return jax.tree.map(lambda weight: weight.astype(dtype), weights)


def _chunk(x, point_mask, start, size):
    """A chunk of points, zero where they are padding, and its mask."""
    mask = chunks.take(point_mask, start, size, 1)
    x = chunks.take(x, start, size, 1)
    if mask is not None:
        x = jnp.where(mask[..., None, None], x, 0)
    return x, mask


def _keys(x, weights: MixerWeights):
    return jnp.einsum("bnhd,de->bnhe", x, weights.key_kernel) + weights.key_bias


def _values(x, weights: MixerWeights):
    return jnp.einsum("bnhd,de->bnhe", x, weights.value_kernel) + weights.value_bias


def _scores(static: _Static, keys, weights: MixerWeights, dtype):
    """Scores (B, H, S, N) of a chunk of points, not masked."""
    return static.scale * jnp.einsum(
        "hsd,bnhd->bhsn", weights.latent_queries, keys, preferred_element_type=dtype
    )


def _encode_mask(mask):
    return None if mask is None else mask[:, None, None, :]


def _forward(static: _Static, x, weights: MixerWeights, point_mask, *, axis):
    """One shard: its mixed points, and the merged latents and their log-sum-exp."""
    dtype = softmax.accumulation_dtype(x.dtype)
    batch, points, heads, width = x.shape
    latents = weights.latent_queries.shape[1]
    length = static.chunk_length(x, latents)

    def encode(start, size, sums):
        x_chunk, mask = _chunk(x, point_mask, start, size)
        scores = _scores(static, _keys(x_chunk, weights), weights, dtype)
        scores = softmax.mask_scores(scores, _encode_mask(mask))
        return softmax.accumulate(sums, scores, _values(x_chunk, weights))

    sums = chunks.for_chunks(
        points, length, encode, softmax.start(batch, heads, latents, width, dtype)
    )
    z, lse = softmax.finish(softmax.merge(sums, axis))
    z = z.astype(x.dtype)

    def decode(start, size, y):
        x_chunk, mask = _chunk(x, point_mask, start, size)
        scores = _scores(static, _keys(x_chunk, weights), weights, dtype)
        assignment = jax.nn.softmax(scores, axis=2).astype(x.dtype)
        y_chunk = jnp.einsum("bhsn,bhsd->bnhd", assignment, z, preferred_element_type=dtype)
        if mask is not None:
            y_chunk = jnp.where(mask[..., None, None], y_chunk, 0)
        return chunks.put(y, y_chunk, start, 1)

    return chunks.for_chunks(points, length, decode, jnp.zeros_like(x)), z, lse


def _backward(static: _Static, x, weights: MixerWeights, point_mask, z, lse, d_y, *, axis):
    """One shard: the gradient of its points, and the summed gradients of the weights."""
    dtype = lse.dtype
    batch, points, heads, width = x.shape
    latents = weights.latent_queries.shape[1]
    length = static.chunk_length(x, latents)
    product = partial(jnp.einsum, preferred_element_type=dtype)

    def gather_latents(start, size, d_z):
        x_chunk, _ = _chunk(x, point_mask, start, size)
        d_y_chunk, _ = _chunk(d_y, point_mask, start, size)
        scores = _scores(static, _keys(x_chunk, weights), weights, dtype)
        assignment = jax.nn.softmax(scores, axis=2).astype(x.dtype)
        return d_z + product("bhsn,bnhd->bhsd", assignment, d_y_chunk)

    d_z = chunks.for_chunks(points, length, gather_latents, jnp.zeros(z.shape, dtype))
    if axis is not None:
        d_z = jax.lax.psum(d_z, axis)
    delta = jnp.einsum("bhsd,bhsd->bhs", d_z, z.astype(dtype))
    d_z = d_z.astype(x.dtype)

    def scatter(start, size, carry):
        d_x, d_weights = carry
        x_chunk, mask = _chunk(x, point_mask, start, size)
        d_y_chunk, _ = _chunk(d_y, point_mask, start, size)
        keys, values = _keys(x_chunk, weights), _values(x_chunk, weights)
        scores = _scores(static, keys, weights, dtype)

        assignment = jax.nn.softmax(scores, axis=2)
        d_assignment = product("bhsd,bnhd->bhsn", z, d_y_chunk)
        mean = (assignment * d_assignment).sum(2, keepdims=True)
        d_scores = assignment * (d_assignment - mean)

        gathering = softmax.weights(softmax.mask_scores(scores, _encode_mask(mask)), lse)
        d_gathering = product("bhsd,bnhd->bhsn", d_z, values)
        d_scores += gathering * (d_gathering - delta[..., None])
        d_scores = (static.scale * d_scores).astype(x.dtype)

        d_values = product("bhsn,bhsd->bnhd", gathering.astype(x.dtype), d_z).astype(x.dtype)
        d_keys = product("hsd,bhsn->bnhd", weights.latent_queries, d_scores).astype(x.dtype)
        # Sums over samples and heads come after the loop: inside it they would be a reduction over
        # the other mesh axes for every chunk.
        d_weights = d_weights + jnp.concatenate(
            [
                product("bhsn,bnhd->bhsd", d_scores, keys),
                product("bnhd,bnhe->bhde", x_chunk, d_keys),
                d_keys.astype(dtype).sum(1)[:, :, None],
                product("bnhd,bnhe->bhde", x_chunk, d_values),
                d_values.astype(dtype).sum(1)[:, :, None],
            ],
            axis=2,
        )
        d_x_chunk = product("bnhe,de->bnhd", d_keys, weights.key_kernel)
        d_x_chunk += product("bnhe,de->bnhd", d_values, weights.value_kernel)
        if mask is not None:
            d_x_chunk = jnp.where(mask[..., None, None], d_x_chunk, 0)
        return chunks.put(d_x, d_x_chunk, start, 1), d_weights

    packed_rows = latents + 2 * (width + 1)
    carry = (jnp.zeros_like(x), jnp.zeros((batch, heads, packed_rows, width), dtype))
    d_x, packed = chunks.for_chunks(points, length, scatter, carry)
    packed = packed.sum(0)
    if axis is not None:
        packed = jax.lax.psum(packed, axis)
    return d_x, _unpack(packed, latents, width)


def _unpack(packed: Float[Array, "H R D"], latents: int, width: int) -> MixerWeights:
    """The weight gradients that the loop over chunks packed along one axis."""
    ends = [latents, latents + width, latents + width + 1, latents + 2 * width + 1]
    queries, key_kernel, key_bias, value_kernel, value_bias = jnp.split(packed, ends, axis=1)
    return MixerWeights(
        queries,
        key_kernel.sum(0),
        key_bias.sum((0, 1)),
        value_kernel.sum(0),
        value_bias.sum((0, 1)),
    )
