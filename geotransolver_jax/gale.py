"""GALE: attention of points among themselves and to a context (GeoTransolver, arXiv 2512.20399).

Both layers mix what a point makes of the other points with what it makes of the context: latents of
the geometry and of global quantities, which every shard of the points has. GALE does so for the
slices of physics attention, GALE_FA for the points themselves beside FLARE attention.
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key, PyTree

from flare_jax import fused
from flare_jax import heads as heads_lib
from flare_jax.activations import gelu
from flare_jax.attention import FLAREAttention
from flare_jax.heads import HeadLinear, HeadScores
from flare_jax.linear import LayerOptions, Linear, LinearOptions
from flare_jax.mixer import gather_latents, heads_of, latent_chunking, spread_latents
from flare_jax.norm import LayerNorm
from geotransolver_jax.attention import PhysicsAttention, attend_latents
from geotransolver_jax.concrete_dropout import ConcreteDropout
from parallel import softmax
from parallel.contraction import contract, product
from parallel.parameters import parameter
from parallel.precision import accumulation_dtype
from parallel.random import points_dropout
from parallel.streaming import Places, map_held, map_points

STATE_MIXING_MODES = ("weighted", "concat_project")


class Attended(NamedTuple):
    """Keys and values of the context, taken from their middle.

    Latents of one cloud are often alike. A softmax does not see what all keys share, and what all
    values share it hands on; taken apart, neither costs the rest its last digits, in the gradient
    above all.

    Attributes:
        key: keys, less their mean over the latents.
        value: values, less theirs.
        middle: the mean of the values.
    """

    key: Float[Array, "B H S_c D"]
    value: Float[Array, "B H S_c D"]
    middle: Float[Array, "B H 1 D"]


class ContextAttention(nnx.Module):
    """Cross-attention to the context, and its mixture with self-attention."""

    def __init__(
        self,
        width: int,
        context_dim: int,
        state_mixing_mode: str,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> None:
        """Makes the weights.

        Args:
            width: width of a head.
            context_dim: width of the context's latents.
            state_mixing_mode: `weighted`, a learned weighted mean of both; or `concat_project`, a
                linear layer with GELU on both side by side.
            rngs: random streams; `params` is used.
            dtype: type to compute in.
            param_dtype: type of the weights.

        Raises:
            ValueError: `state_mixing_mode` is unknown.
        """
        if state_mixing_mode not in STATE_MIXING_MODES:
            raise ValueError(
                f"state_mixing_mode: expected one of {', '.join(STATE_MIXING_MODES)}; "
                f"got {state_mixing_mode!r}"
            )
        types: LinearOptions = dict(
            rngs=rngs, initial="uniform", dtype=dtype, param_dtype=param_dtype
        )
        self.query = Linear(width, width, **types)
        self.key = Linear(context_dim, width, **types)
        self.value = Linear(context_dim, width, **types)
        self.weighted = state_mixing_mode == "weighted"
        self.mixing: nnx.Param[Array] | Linear = (
            parameter(jnp.zeros((), param_dtype))
            if self.weighted
            else Linear(2 * width, width, **types)
        )

    def attended(self, context: Float[Array, "B H S_c D_c"]) -> Attended:
        """What of the context is attended to."""
        dtype = accumulation_dtype(self.key.dtype)
        key, value = (layer(context).astype(dtype) for layer in (self.key, self.value))
        middle = value.mean(2, keepdims=True)
        parts = key - key.mean(2, keepdims=True), value - middle, middle
        return Attended(*(part.astype(self.key.dtype) for part in parts))

    def attend(
        self,
        own: Float[Array, "B H S D"],
        tokens: Float[Array, "B H S D"],
        context: Float[Array, "B H S_c D_c"],
    ) -> Float[Array, "B H S D"]:
        """Latents that attend to the context, mixed with their `own` self-attention."""
        key, value, middle = self.attended(context)
        cross = attend_latents(self.query(tokens), key, value) + middle
        if not isinstance(self.mixing, Linear):
            return weighted_mean(self.mixing[...], own, cross)
        both = jnp.concatenate([own, cross], axis=-1)
        return gelu(self.mixing(both))

    def by_heads(self, heads: int) -> tuple[HeadLinear, HeadLinear | jax.Array]:
        """The weights that a chunk of points needs: of the query, and of the mixture."""
        query = heads_lib.within(self.query, heads)
        if isinstance(self.mixing, Linear):
            return query, heads_lib.within(self.mixing, heads)
        return query, jnp.broadcast_to(self.mixing[...], (heads,))


def _context_attention(
    width: int, context_dim: int, state_mixing_mode: str, **types: Unpack[LayerOptions]
) -> ContextAttention | None:
    """The cross-attention of a layer; none where there is no context."""
    if not context_dim:
        return None
    return ContextAttention(width, context_dim, state_mixing_mode, **types)


def cross_attention(layer: "GALE | GALEFA") -> ContextAttention:
    """The cross-attention of a layer that is given a context.

    Raises:
        ValueError: there is none.
    """
    if layer.cross is None:
        raise ValueError("context: expected None, since context_dim=0; got latents")
    return layer.cross


def weighted_mean(mixing: Array, own: Array, cross: Array) -> Array:
    """`own` by the sigmoid of `mixing`, and `cross` by the rest."""
    share = jax.nn.sigmoid(mixing.astype(accumulation_dtype(own.dtype)))
    return (share * own + (1 - share) * cross).astype(own.dtype)


class GALE(PhysicsAttention):
    """Physics attention whose slices also attend to a context (arXiv 2512.20399)."""

    def __init__(
        self,
        dim: int,
        heads: int,
        slices: int,
        *,
        context_dim: int = 0,
        state_mixing_mode: str = "weighted",
        dropout: float = 0.0,
        concrete_dropout: bool = False,
        plus: bool = False,
        structured_shape: tuple[int, ...] | None = None,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> None:
        """Makes the weights.

        Args:
            dim: width of the points. A head has the width `dim // heads`; as in the reference, the
                heads together may be narrower than the points.
            heads: number of attention heads.
            slices: number of slices of each head.
            context_dim: width of the context's latents; 0 for no context.
            state_mixing_mode: see `ContextAttention`.
            dropout: dropout rate of the output.
            concrete_dropout: learn that rate, on clouds; as in the reference not on grids.
            plus: whether points have a temperature of their own, see `PhysicsAttention`.
            structured_shape: shape of a grid, whose points are projected by convolutions.
            rngs: random streams; `params` is used.
            dtype: type to compute in.
            param_dtype: type of the weights.
        """
        types: LayerOptions = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        super().__init__(
            dim,
            heads,
            slices,
            width=dim // heads,
            dropout=dropout,
            plus=plus,
            structured_shape=structured_shape,
            initial="uniform",
            initial_slices="orthogonal",
            **types,
        )
        self.cross = _context_attention(dim // heads, context_dim, state_mixing_mode, **types)
        concrete = concrete_dropout and structured_shape is None
        self.concrete = ConcreteDropout(dropout, param_dtype=param_dtype) if concrete else None

    def __call__(
        self,
        x: Float[Array, "B N C"],
        point_mask: Bool[Array, "B N"] | None = None,
        key: Key[Array, ""] | None = None,
        norm: LayerNorm | None = None,
        context: Float[Array, "B H S_c D_c"] | None = None,
    ) -> Float[Array, "B N C"]:
        """Mixes the points of each sample, and the context in.

        Args:
            x: points; on a mesh N divides by the `points` axis.
            point_mask: True where a point is real.
            key: randomness of noise and dropout; without it there is none.
            norm: normalizes the points in front.
            context: latents of the context; without it points attend to each other only.

        Returns:
            The mixed points.
        """
        noise_key, dropout_key = (None, None) if key is None else jax.random.split(key)

        def attend(tokens: Array) -> Array:
            own = self.attend(tokens)
            return own if context is None else cross_attention(self).attend(own, tokens, context)

        y = self.through_slices(x, point_mask, noise_key, norm, attend)
        return output_dropout(self, y, dropout_key)

    def latents(
        self,
        gathered: Float[Array, "B H S D"],
        context: Float[Array, "B H S_c D_c"] | None = None,
    ) -> Float[Array, "B H S D"]:
        """What attention among the slices and to the context makes of their tokens."""
        tokens = gathered.astype(self.dtype)
        own = self.attend(tokens)
        return own if context is None else cross_attention(self).attend(own, tokens, context)

    def give_back(
        self,
        x: Float[Array, "B N C"],
        latents: Float[Array, "B H S D"],
        point_mask: Bool[Array, "B N"] | None,
        norm: LayerNorm | None = None,
        context: Float[Array, "B H S_c D_c"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B N C"]:
        """What points get of the slices, which have seen the context."""
        return output_dropout(self, self._from_slices(x, latents, point_mask, norm), dropout_key)


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
        self.cross = _context_attention(dim // heads, context_dim, state_mixing_mode, **types)
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
            return output_dropout(self, super().__call__(x, point_mask, norm=norm), key)
        weights = self.latent_weights(norm)
        value = heads_lib.within(self.project_value, self.heads)
        kernel = fused.uses_kernel(self.attention_backend)
        chunking = latent_chunking(weights, fused=kernel)
        x = x.astype(self.dtype)
        z, held = gather_latents(x, weights, value, point_mask, chunking, fused=kernel)
        query, mixing = cross_attention(self).by_heads(self.heads)
        seen = seen_by_points(cross_attention(self).attended(context), query, self.scale)
        outer = (heads_lib.out_of(self.project_out, self.heads), mixing)
        spread = _spread_fused if kernel else _spread
        y = map_held(spread, chunking, outer, {"z": z, "context": seen}, held)
        return output_dropout(self, y, key)

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
            return output_dropout(self, y, dropout_key)
        own = self.latent_weights(norm)
        query, mixing = cross_attention(self).by_heads(self.heads)
        seen = seen_by_points(cross_attention(self).attended(context), query, self.scale)
        weights = (own, (heads_lib.out_of(self.project_out, self.heads), mixing))
        points = {"x": x.astype(self.dtype)}
        if point_mask is not None:
            points["mask"] = point_mask
        states = {"z": latents, "context": seen}
        y = map_points(_spread, latent_chunking(own), weights, states, points)
        return output_dropout(self, y, dropout_key)


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


def output_dropout(
    layer: GALE | GALEFA, y: Float[Array, "B N C"], key: Key[Array, ""] | None
) -> Float[Array, "B N C"]:
    """Dropout of a layer's output, of a learned rate where it has one."""
    if layer.concrete is not None:
        return layer.concrete(y, key)
    return points_dropout(y, layer.dropout, key)
