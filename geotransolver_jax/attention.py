"""Physics attention: attention among learned slices of the points."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from flare_jax import heads as heads_lib
from flare_jax.linear import Linear
from geotransolver_jax.slices import (
    AdaptiveTemperature,
    Points,
    SliceWeights,
    points_to_slices,
    slices_to_points,
)
from parallel import attention
from parallel import mesh as mesh_lib
from parallel.convolution import grid_convolution
from parallel.mesh import DATA, HEADS, POINTS
from parallel.parameters import parameter
from parallel.random import points_dropout

_INITIAL_TEMPERATURE = 0.5
_KERNEL_SIZE = 3


class GridProjection(nnx.Module):
    """Convolution over a structured grid whose points come flat."""

    def __init__(
        self,
        dim: int,
        row: tuple[int, ...],
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ):
        """Makes the weights, uniform within one over the square root of the inputs of an output.

        Args:
            dim: width of input and output; the output is split over the mesh axis `heads`.
            row: axes of the grid after its first.
            rngs: random streams; `params` is used.
            dtype: type to compute in.
            param_dtype: type of the weights.
        """
        size = (_KERNEL_SIZE,) * (len(row) + 1)
        bound = (dim * math.prod(size)) ** -0.5
        draw = lambda *shape: jax.random.uniform(  # noqa: E731
            rngs.params(), shape, param_dtype, -bound, bound
        )
        self.kernel = parameter(draw(*size, dim, dim), *[None] * len(size), None, HEADS)
        self.bias = parameter(draw(dim), HEADS)
        self.row = row
        self.dtype = dtype

    def __call__(
        self, x: Float[Array, "B N C"], point_mask: Bool[Array, "B N"] | None = None
    ) -> Float[Array, "B N C"]:
        """Convolves the grid; padding rows count as what is beyond its border."""
        if point_mask is not None:
            x = jnp.where(point_mask[..., None], x, 0)
        grid = x.astype(self.dtype).reshape(x.shape[0], -1, *self.row, x.shape[-1])
        y = grid_convolution(grid, self.kernel[...]) + self.bias[...].astype(self.dtype)
        return y.reshape(*x.shape[:2], -1)


class PhysicsAttention(nnx.Module):
    """Attention among slices of the points (Transolver, arXiv 2402.02366, section 3.2).

    With `plus` as in Transolver++ (arXiv 2502.02414): one projection instead of two, a temperature
    for each point, and Gumbel noise in training.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        slices: int,
        *,
        dropout: float = 0.0,
        plus: bool = False,
        structured_shape: tuple[int, ...] | None = None,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ):
        """Makes the weights.

        Args:
            dim: width of the points; a multiple of `heads`.
            heads: number of attention heads.
            slices: number of slices of each head.
            dropout: dropout rate of the output.
            plus: whether it is the layer of Transolver++.
            structured_shape: shape of a grid, whose points are projected by convolutions.
            rngs: random streams; `params` is used.
            dtype: type to compute in.
            param_dtype: type of the weights.
        """
        width = dim // heads
        types = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)

        def projection() -> nnx.Module:
            if structured_shape is None:
                return Linear(dim, dim, out_axis=HEADS, **types)
            return GridProjection(dim, structured_shape[1:], **types)

        self.project_point = projection()
        if not plus:
            self.project_value = projection()
        self.project_slice = Linear(width, slices, **types)
        self.temperature = parameter(jnp.full((heads,), _INITIAL_TEMPERATURE, param_dtype), HEADS)
        if plus:
            self.temperature_in = Linear(width, slices, **types)
            self.temperature_out = Linear(slices, 1, **types)
        self.project_qkv = Linear(width, 3 * width, use_bias=False, **types)
        self.project_out = Linear(dim, dim, in_axis=HEADS, **types)
        self.heads = heads
        self.dropout = dropout
        self.plus = plus
        self.structured = structured_shape is not None
        self.dtype = dtype

    def __call__(
        self,
        x: Float[Array, "B N C"],
        point_mask: Bool[Array, "B N"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B N C"]:
        """Mixes the points of each sample.

        Args:
            x: points; on a mesh N divides by the `points` axis.
            point_mask: True where a point is real.
            key: randomness of noise and dropout; without it there is none.

        Returns:
            The mixed points.
        """
        noise_key, dropout_key = (None, None) if key is None else jax.random.split(key)
        weights = self.slice_weights(noise_key)
        tokens, points = points_to_slices(self.project(x, point_mask), weights)
        tokens = self.attend(tokens.astype(self.dtype))
        y = slices_to_points(
            points, tokens, weights, heads_lib.out_of(self.project_out, self.heads)
        )
        return points_dropout(y, self.dropout, dropout_key)

    def project(self, x: Float[Array, "B N C"], point_mask: Bool[Array, "B N"] | None) -> Points:
        """The points as slices read them: those of a grid after its convolutions."""
        x = x.astype(self.dtype)
        if not self.structured:
            return Points(x, mask=point_mask)
        point = mesh_lib.constrain(self.project_point(x, point_mask), DATA, POINTS, HEADS)
        if self.plus:
            return Points(point, mask=point_mask)
        value = mesh_lib.constrain(self.project_value(x, point_mask), DATA, POINTS, HEADS)
        return Points(point, value, point_mask)

    def slice_weights(self, noise_key: Key[Array, ""] | None) -> SliceWeights:
        """The weights by which points belong to slices."""
        adaptive = noise = None
        if self.plus:
            adaptive = AdaptiveTemperature(
                heads_lib.within(self.temperature_in, self.heads),
                heads_lib.within(self.temperature_out, self.heads),
            )
            noise = None if noise_key is None else jax.random.key_data(noise_key)[None]
        inside = not self.structured
        return SliceWeights(
            heads_lib.into(self.project_point, self.heads) if inside else None,
            heads_lib.into(self.project_value, self.heads) if inside and not self.plus else None,
            heads_lib.within(self.project_slice, self.heads),
            self.temperature[...],
            adaptive,
            noise,
        )

    def attend(self, tokens: Float[Array, "B H S D"]) -> Float[Array, "B H S D"]:
        """Self-attention among the slices of each head; the same on every shard of the points."""
        query, key, value = jnp.split(self.project_qkv(tokens).swapaxes(1, 2), 3, axis=-1)
        return attention(query, key, value, queries_sharded=False, keys_sharded=False).swapaxes(
            1, 2
        )
