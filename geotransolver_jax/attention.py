"""Physics attention: attention among learned slices of the points."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from flare_jax import heads as heads_lib
from flare_jax.linear import LayerOptions, Linear, LinearOptions
from flare_jax.norm import LayerNorm
from geotransolver_jax.projection import SliceProjection
from geotransolver_jax.slices import (
    SlicePart,
    gather_part,
    give_back,
    merged_tokens,
    points_to_slices,
    slice_chunking,
    slices_to_points,
)
from parallel.contraction import product
from parallel.mesh import HEADS
from parallel.random import points_dropout


class PhysicsAttention(SliceProjection):
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
        width: int | None = None,
        dropout: float = 0.0,
        plus: bool = False,
        structured_shape: tuple[int, ...] | None = None,
        initial: str = "normal",
        initial_slices: str = "normal",
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> None:
        """Makes the weights.

        Args:
            dim: width of the points.
            heads: number of attention heads.
            slices: number of slices of each head.
            width: width of a head, by default `dim / heads`.
            dropout: dropout rate of the output.
            plus: whether it is the layer of Transolver++.
            structured_shape: shape of a grid, whose points are projected by convolutions.
            initial: how the linear weights are drawn, see `Linear`.
            initial_slices: likewise those from heads to slices.
            rngs: random streams; `params` is used.
            dtype: type to compute in.
            param_dtype: type of the weights.

        Raises:
            ValueError: `heads` does not divide `dim`, and no `width` is given.
        """
        width = heads_lib.head_width(dim, heads) if width is None else width
        types: LayerOptions = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        super().__init__(
            dim,
            heads,
            width,
            slices,
            plus=plus,
            structured_shape=structured_shape,
            initial=initial,
            initial_slices=initial_slices,
            **types,
        )
        linear: LinearOptions = {"initial": initial, **types}
        self.project_qkv = Linear(width, 3 * width, use_bias=False, **linear)
        self.project_out = Linear(heads * width, dim, in_axis=HEADS, **linear)
        self.dropout = dropout

    def __call__(
        self,
        x: Float[Array, "B N C"],
        point_mask: Bool[Array, "B N"] | None = None,
        key: Key[Array, ""] | None = None,
        norm: LayerNorm | None = None,
    ) -> Float[Array, "B N C"]:
        """Mixes the points of each sample.

        Args:
            x: points; on a mesh N divides by the `points` axis.
            point_mask: True where a point is real.
            key: randomness of noise and dropout; without it there is none.
            norm: normalizes the points in front.

        Returns:
            The mixed points.
        """
        noise_key, dropout_key = (None, None) if key is None else jax.random.split(key)
        y = self.through_slices(x, point_mask, noise_key, norm, self.attend)
        return points_dropout(y, self.dropout, dropout_key)

    def through_slices(
        self,
        x: Float[Array, "B N C"],
        point_mask: Bool[Array, "B N"] | None,
        noise_key: Key[Array, ""] | None,
        norm: LayerNorm | None,
        attend: Callable[[Float[Array, "B H S D"]], Float[Array, "B H S D"]],
    ) -> Float[Array, "B N C"]:
        """Points to slice tokens, `attend` on these, and back."""
        weights = self.slice_weights(noise_key, norm)
        tokens, held = points_to_slices(self.points(x, point_mask, norm), weights)
        tokens = attend(tokens.astype(self.dtype))
        output = heads_lib.out_of(self.project_out, self.heads)
        return slices_to_points(held, tokens, slice_chunking(weights), output)

    def gather(
        self,
        x: Float[Array, "B N C"],
        point_mask: Bool[Array, "B N"] | None,
        norm: LayerNorm | None = None,
    ) -> SlicePart:
        """What a part of the points of a cloud gives to the slices; see `flare_jax.phases`."""
        return gather_part(self.points(x, point_mask), self.slice_weights(None, norm))

    @staticmethod
    def merge(parts: Sequence[SlicePart]) -> Float[np.ndarray, "B H S D"]:
        """What all parts give, on the host."""
        return merged_tokens(parts)

    def latents(
        self,
        gathered: Float[Array, "B H S D"],
        context: Float[Array, "B H S_c D_c"] | None = None,
    ) -> Float[Array, "B H S D"]:
        """What attention makes of the slice tokens."""
        return self.attend(gathered.astype(self.dtype))

    def give_back(
        self,
        x: Float[Array, "B N C"],
        latents: Float[Array, "B H S D"],
        point_mask: Bool[Array, "B N"] | None,
        norm: LayerNorm | None = None,
        context: Float[Array, "B H S_c D_c"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B N C"]:
        """What points get of the slices."""
        y = self._from_slices(x, latents, point_mask, norm)
        return points_dropout(y, self.dropout, dropout_key)

    def _from_slices(
        self, x: Array, latents: Array, point_mask: Array | None, norm: LayerNorm | None
    ) -> Array:
        weights = self.slice_weights(None, norm)
        output = heads_lib.out_of(self.project_out, self.heads)
        return give_back(self.points(x, point_mask), weights, latents.astype(self.dtype), output)

    def attend(self, tokens: Float[Array, "B H S D"]) -> Float[Array, "B H S D"]:
        """Self-attention among the slices of each head; the same on every shard of the points."""
        return attend_latents(*jnp.split(self.project_qkv(tokens), 3, axis=-1))


def attend_latents(
    query: Float[Array, "B H S D"], key: Float[Array, "B H T D"], value: Float[Array, "B H T D"]
) -> Float[Array, "B H S D"]:
    """Softmax attention among latents, the same on every shard of the points."""
    scores = product("bhsd,bhtd->bhst", query, key) * query.shape[-1] ** -0.5
    shares = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return product("bhst,bhtd->bhsd", shares, value).astype(value.dtype)
