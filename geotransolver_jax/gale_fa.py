"""GALE_FA: FLARE attention of points that attend to a context as well (arXiv 2512.20399)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key, PyTree

from flare_jax import fused
from flare_jax import heads as heads_lib
from flare_jax.activations import gelu
from flare_jax.attention import FLAREAttention
from flare_jax.heads import HeadLinear, HeadScores
from flare_jax.linear import LayerOptions
from flare_jax.mixer import gather_latents, heads_of, latent_chunking, spread_latents
from flare_jax.norm import LayerNorm
from geotransolver_jax.concrete_dropout import ConcreteDropout, output_dropout
from geotransolver_jax.context_attention import (
    Attended,
    given_context,
    make_context_attention,
    weighted_mean,
)
from parallel import softmax
from parallel.contraction import contract, product
from parallel.streaming import Places, map_held, map_points


class GALEFA(FLAREAttention):
    """GALE_FA: FLARE attention, and attention of every point to a context (arXiv 2512.20399)."""

    def __init__(
        self,
        dim: int,
        heads: int,
        latents: int,
        *,
        context_dim: int = 0,
        state_mixing_mode: str = "weighted",
        dropout: float = 0.0,
        concrete_dropout: bool = False,
        attention_backend: str = "auto",
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> None:
        """Makes the weights.

        Args:
            dim: width of the points; a head has the width `dim // heads`.
            heads: number of attention heads.
            latents: number of latent queries of each head.
            context_dim: width of the context's latents; 0 for no context.
            state_mixing_mode: see `ContextAttention`.
            dropout: dropout rate of the output.
            concrete_dropout: learn that rate.
            attention_backend: what computes the softmaxes, see `flare_jax.fused.check_backend`.
            rngs: random streams; `params` is used.
            dtype: type to compute in.
            param_dtype: type of the weights.
        """
        types: LayerOptions = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        super().__init__(
            dim,
            heads,
            latents,
            width=dim // heads,
            dropout=dropout,
            attention_backend=attention_backend,
            initial="uniform",
            **types,
        )
        self.cross = make_context_attention(dim // heads, context_dim, state_mixing_mode, **types)
        self.concrete = (
            ConcreteDropout(dropout, param_dtype=param_dtype) if concrete_dropout else None
        )

    def __call__(
        self,
        x: Float[Array, "B N C"],
        point_mask: Bool[Array, "B N"] | None = None,
        key: Key[Array, ""] | None = None,
        norm: LayerNorm | None = None,
        context: Float[Array, "B H S_c D_c"] | None = None,
    ) -> Float[Array, "B N C"]:
        """Mixes the points of each sample, and the context in; arguments as of `GALE`."""
        if context is None:
            y = super().__call__(x, point_mask, norm=norm)
            return output_dropout(self.concrete, self.dropout, y, key)
        weights = self.latent_weights(norm)
        value = heads_lib.within(self.project_value, self.heads)
        kernel = fused.uses_kernel(self.attention_backend)
        chunking = latent_chunking(weights, fused=kernel)
        x = x.astype(self.dtype)
        z, held = gather_latents(x, weights, value, point_mask, chunking, fused=kernel)
        outer, seen = self._context_of_points(context)
        spread = _spread_fused if kernel else _spread
        y = map_held(spread, chunking, outer, {"z": z, "context": seen}, held)
        return output_dropout(self.concrete, self.dropout, y, key)

    def give_back(
        self,
        x: Float[Array, "B N C"],
        latents: Float[Array, "B H S D"],
        point_mask: Bool[Array, "B N"] | None,
        norm: LayerNorm | None = None,
        context: Float[Array, "B H S_c D_c"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B N C"]:
        """What points get of the latents and, on their own, of the context."""
        if context is None:
            y = super().give_back(x, latents, point_mask, norm)
            return output_dropout(self.concrete, self.dropout, y, dropout_key)
        own = self.latent_weights(norm)
        outer, seen = self._context_of_points(context)
        points = {"x": x.astype(self.dtype)}
        if point_mask is not None:
            points["mask"] = point_mask
        states = {"z": latents, "context": seen}
        y = map_points(_spread, latent_chunking(own), (own, outer), states, points)
        return output_dropout(self.concrete, self.dropout, y, dropout_key)

    def _context_of_points(
        self, context: Array
    ) -> tuple[tuple[HeadLinear, HeadLinear | Array], "SeenByPoints"]:
        """Weights by which a point mixes and leaves its heads, and the context as it sees it."""
        cross = given_context(self.cross)
        query, mixing = cross.by_heads(self.heads)
        seen = seen_by_points(cross.attended(context), query, self.scale)
        return (heads_lib.out_of(self.project_out, self.heads), mixing), seen


class SeenByPoints(NamedTuple):
    """A context as points see it.

    Attributes:
        scores: `(B, H, S_c, D)`, from the heads of a point to its scores.
        bias: `(B, H, S_c)`, added to them.
        values: `(B, H, S_c, D)`.
        middle: `(B, H, D, 1)`, added to what is made of the values.
    """

    scores: Float[Array, "B H S_c D"]
    bias: Float[Array, "B H S_c"]
    values: Float[Array, "B H S_c D"]
    middle: Float[Array, "B H D 1"]


def seen_by_points(context: Attended, query: HeadLinear, scale: float) -> SeenByPoints:
    """The context of points whose queries need not be made: scores are linear in the heads."""
    scores = scale * product("bhse,hde->bhsd", context.key, query.kernel)
    bias = scale * product("bhse,he->bhs", context.key, query.bias)
    return SeenByPoints(scores, bias, context.value, context.middle.swapaxes(2, 3))


def _spread(weights: PyTree, latents: PyTree, chunk: dict[str, Array], places: Places) -> Array:
    """A chunk of points from the latents and from the context."""
    weights, (output, mixing) = weights
    heads = heads_of(weights, chunk)
    own = spread_latents(weights, latents["z"], heads)

    context = latents["context"]
    scores = contract("bhdn,bhsd->bhsn", heads, context.scores) + context.bias[..., None]
    cross = softmax.mix(heads.dtype, scores, context.values)
    cross = (cross + context.middle).astype(heads.dtype)

    if isinstance(mixing, HeadLinear):
        both = jnp.concatenate([own, cross], axis=2)
        mixed = gelu(heads_lib.map_within(mixing, both))
    else:
        mixed = weighted_mean(mixing[:, None, None], own, cross)
    return heads_lib.map_out(output, mixed, chunk.get("mask"))


def _spread_fused(
    weights: PyTree, latents: PyTree, chunk: dict[str, Array], places: Places
) -> Array:
    """The same through the fused kernel, where points stand before heads."""
    weights, (output, mixing) = weights
    heads = fused.heads_of(weights, chunk)
    own = fused.spread(heads, weights.scores, latents["z"])

    context = latents["context"]
    scores = HeadScores(context.scores, context.bias)
    cross = fused.spread(heads, scores, context.values)
    cross = (cross + context.middle.transpose(0, 3, 1, 2)).astype(heads.dtype)

    if isinstance(mixing, HeadLinear):
        both = jnp.concatenate([own, cross], axis=-1)
        mixed = contract("bnhd,hde->bnhe", both, mixing.kernel)
        mixed = gelu((mixed + mixing.bias.astype(mixed.dtype)).astype(heads.dtype))
    else:
        mixed = weighted_mean(mixing[:, None], own, cross)
    return fused.map_out(output, mixed, chunk.get("mask"))
