"""Projections of points into heads and slices, which physics attention and the context share."""

import math
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from flare_jax import heads as heads_lib
from flare_jax.heads import HeadScores
from flare_jax.linear import LayerOptions, Linear, uniform
from flare_jax.norm import LayerNorm
from geotransolver_jax.slices import AdaptiveTemperature, Points, SliceWeights
from parallel import mesh as mesh_lib
from parallel.annotations import AnyArray
from parallel.convolution import grid_convolution
from parallel.mesh import DATA, HEADS, POINTS
from parallel.parameters import parameter
from parallel.precision import accumulation_dtype

_INITIAL_TEMPERATURE = 0.5
_KERNEL_SIZE = 3


class GridProjection(nnx.Module):
    """Convolution over a structured grid whose points come flat."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        row: tuple[int, ...],
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ):
        """Makes the weights, uniform within one over the square root of the inputs of an output.

        Args:
            in_features: width of the input.
            out_features: width of the output, which is split over the mesh axis `heads`.
            row: axes of the grid after its first.
            rngs: random streams; `params` is used.
            dtype: type to compute in.
            param_dtype: type of the weights.
        """
        size = (_KERNEL_SIZE,) * (len(row) + 1)
        bound = (in_features * math.prod(size)) ** -0.5
        kernel = uniform(rngs.params(), (*size, in_features, out_features), bound, param_dtype)
        self.kernel = parameter(kernel, *[None] * len(size), None, HEADS)
        self.bias = parameter(uniform(rngs.params(), (out_features,), bound, param_dtype), HEADS)
        self.row = row
        self.dtype = dtype

    def __call__(
        self, x: Float[AnyArray, "B N C_in"], point_mask: Bool[AnyArray, "B N"] | None = None
    ) -> Float[Array, "B N C_out"]:
        """Convolves the grid; padding rows count as what is beyond its border."""
        if point_mask is not None:
            x = jnp.where(point_mask[..., None], x, 0)
        grid = x.astype(self.dtype).reshape(x.shape[0], -1, *self.row, x.shape[-1])
        # The sum widens, so that the gradient of the bias is gathered over the points in float32.
        dtype = accumulation_dtype(self.dtype)
        y = grid_convolution(grid, self.kernel[...]).astype(dtype) + self.bias[...].astype(dtype)
        y = y.astype(self.dtype)
        return mesh_lib.constrain(y.reshape(*x.shape[:2], -1), DATA, POINTS, HEADS)


_Projection = TypeVar("_Projection", Linear, GridProjection)


class SliceProjection(nnx.Module):
    """The weights by which points belong to slices (arXiv 2402.02366, section 3.2)."""

    def __init__(
        self,
        dim: int,
        heads: int,
        width: int,
        slices: int,
        *,
        plus: bool = False,
        structured_shape: tuple[int, ...] | None = None,
        initial: str = "normal",
        initial_slices: str = "normal",
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ):
        """Makes the weights.

        Args:
            dim: width of the points.
            heads: number of heads.
            width: width of a head.
            slices: number of slices of each head.
            plus: as in Transolver++ (arXiv 2502.02414): one projection instead of two, a
                temperature for each point, and Gumbel noise in training.
            structured_shape: shape of a grid, whose points are projected by convolutions.
            initial: how the linear weights are drawn, see `Linear`.
            initial_slices: likewise those from heads to slices.
            rngs: random streams; `params` is used.
            dtype: type to compute in.
            param_dtype: type of the weights.
        """
        types: LayerOptions = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)

        def projection() -> Linear | GridProjection:
            if structured_shape is None:
                return Linear(dim, heads * width, out_axis=HEADS, initial=initial, **types)
            return GridProjection(dim, heads * width, structured_shape[1:], **types)

        self.project_point = projection()
        if not plus:
            self.project_value = projection()
        self.project_slice = Linear(width, slices, initial=initial_slices, **types)
        self.temperature = parameter(jnp.full((heads,), _INITIAL_TEMPERATURE, param_dtype), HEADS)
        if plus:
            self.temperature_in = Linear(width, slices, initial=initial, **types)
            self.temperature_out = Linear(slices, 1, initial=initial, **types)
        self.heads = heads
        self.plus = plus
        self.structured = structured_shape is not None
        self.dtype = dtype

    def points(
        self,
        x: Float[Array, "B N C"],
        point_mask: Bool[Array, "B N"] | None,
        norm: LayerNorm | None = None,
    ) -> Points:
        """The points as slices read them: those of a grid normalized and after its convolutions."""
        x = x.astype(self.dtype)
        if not self.structured:
            return Points(x, mask=point_mask)
        if norm is not None:
            x = norm(x)
        point, value = self._projections(GridProjection)
        projected = None if value is None else value(x, point_mask)
        return Points(point(x, point_mask), projected, point_mask)

    def _projections(self, kind: type[_Projection]) -> tuple[_Projection, _Projection | None]:
        """What projects points, of clouds or of grids, to what decides and what is averaged."""
        point, value = self.project_point, None if self.plus else self.project_value
        assert isinstance(point, kind)
        assert value is None or isinstance(value, kind)
        return point, value

    def slice_weights(
        self, noise_key: Key[Array, ""] | None, norm: LayerNorm | None = None
    ) -> SliceWeights:
        """The weights as `geotransolver_jax.slices` reads them.

        Args:
            noise_key: randomness of the Gumbel noise of `plus`; without it there is none.
            norm: normalizes the points in front; those of a grid are already, see `points`.
        """
        adaptive = noise = None
        if self.plus:
            adaptive = AdaptiveTemperature(
                HeadScores.of(heads_lib.within(self.temperature_in, self.heads)),
                HeadScores.of(heads_lib.within(self.temperature_out, self.heads)),
            )
            noise = None if noise_key is None else jax.random.key_data(noise_key)[None]
        of_point = of_value = None
        if self.structured:
            norm = None
        else:
            point, value = self._projections(Linear)
            of_point = heads_lib.into(point, self.heads, norm)
            of_value = None if value is None else heads_lib.into(value, self.heads, norm)
        return SliceWeights(
            of_point,
            of_value,
            HeadScores.of(heads_lib.within(self.project_slice, self.heads)),
            self.temperature[...],
            adaptive,
            noise,
            normalized=norm is not None,
        )
