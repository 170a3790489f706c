"""The FLARE attention layer."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from flare_jax import fused
from flare_jax import heads as heads_lib
from flare_jax.heads import LatentWeights
from flare_jax.linear import Linear, LinearOptions
from flare_jax.mixer import (
    flare_mixer,
    gather_part,
    give_back,
    score_weights,
    values_of,
)
from flare_jax.norm import LayerNorm
from parallel.mesh import HEADS
from parallel.parameters import parameter
from parallel.random import points_dropout
from parallel.streaming import SoftmaxPart, merged_softmax


class FLAREAttention(nnx.Module):
    """Attention of points through a few learned latent queries (FLARE, arXiv 2508.12594).

    Cost and memory are linear in the number of points. The points may be split over the mesh axis
    `points`, the heads over `heads`; the latent queries are replicated over the points.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        latents: int,
        *,
        width: int | None = None,
        dropout: float = 0.0,
        scale: float = 1.0,
        chunk_size: int | None = None,
        attention_backend: str = "auto",
        initial: str = "normal",
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ):
        """Makes the weights.

        Args:
            dim: width of the points.
            heads: number of attention heads.
            latents: number of latent queries of each head.
            width: width of a head, by default `dim / heads`.
            dropout: dropout rate of the output.
            scale: factor of the scores.
            chunk_size: points worked on at once, see `flare_mixer`.
            attention_backend: what computes the softmaxes, see `flare_jax.fused.check_backend`.
            initial: how the linear weights are drawn, see `Linear`.
            rngs: random streams; `params` is used.
            dtype: type to compute in.
            param_dtype: type of the weights.

        Raises:
            ValueError: `heads` does not divide `dim`, and no `width` is given; or the backend does
                not take the type or the width.
        """
        width = heads_lib.head_width(dim, heads) if width is None else width
        fused.check_backend(attention_backend, dtype, width)
        types: LinearOptions = dict(
            rngs=rngs, initial=initial, dtype=dtype, param_dtype=param_dtype
        )
        queries = jax.random.normal(rngs.params(), (heads, latents, width), param_dtype)
        self.latent_queries = parameter(queries, HEADS, None, None)
        self.project_in = Linear(dim, heads * width, out_axis=HEADS, **types)
        self.project_key = Linear(width, width, **types)
        self.project_value = Linear(width, width, **types)
        self.project_out = Linear(heads * width, dim, in_axis=HEADS, **types)
        self.heads = heads
        self.dropout = dropout
        self.scale = scale
        self.chunk_size = chunk_size
        self.attention_backend = attention_backend
        self.dtype = dtype

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
            key: randomness of the dropout; without it there is none.
            norm: normalizes the points in front.

        Returns:
            The mixed points.
        """
        y = flare_mixer(
            x.astype(self.dtype),
            self.latent_weights(norm),
            heads_lib.within(self.project_value, self.heads),
            heads_lib.out_of(self.project_out, self.heads),
            point_mask,
            chunk_size=self.chunk_size,
            fused=fused.uses_kernel(self.attention_backend),
        )
        return points_dropout(y, self.dropout, key)

    def gather(
        self,
        x: Float[Array, "B N C"],
        point_mask: Bool[Array, "B N"] | None,
        norm: LayerNorm | None = None,
    ) -> SoftmaxPart:
        """What a part of the points gives to the latents; see `flare_jax.phases`."""
        return gather_part(x.astype(self.dtype), self.latent_weights(norm), point_mask)

    @staticmethod
    def merge(parts: Sequence[SoftmaxPart]) -> Float[np.ndarray, "B H S D"]:
        """What all parts give, on the host."""
        return merged_softmax(parts)

    def latents(
        self,
        gathered: Float[Array, "B H S D"],
        context: Float[Array, "B H S_c D_c"] | None = None,
    ) -> Float[Array, "B H S D"]:
        """The latents, from what all points gave."""
        return values_of(gathered, heads_lib.within(self.project_value, self.heads))

    def give_back(
        self,
        x: Float[Array, "B N C"],
        latents: Float[Array, "B H S D"],
        point_mask: Bool[Array, "B N"] | None,
        norm: LayerNorm | None = None,
        context: Float[Array, "B H S_c D_c"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B N C"]:
        """What points get of the latents."""
        output = heads_lib.out_of(self.project_out, self.heads)
        y = give_back(x.astype(self.dtype), self.latent_weights(norm), latents, output, point_mask)
        return points_dropout(y, self.dropout, dropout_key)

    def latent_weights(self, norm: LayerNorm | None) -> LatentWeights:
        """The weights by which points and latents see each other."""
        key = heads_lib.within(self.project_key, self.heads)
        return LatentWeights(
            heads_lib.into(self.project_in, self.heads, norm),
            score_weights(self.latent_queries[...], key, self.scale),
            normalized=norm is not None,
        )
