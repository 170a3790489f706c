"""Cross-attention of GALE layers to their context, and its mixture with what points make of points.

The context: latents of the geometry and of global quantities, which every shard of the points has
(GeoTransolver, arXiv 2512.20399).
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from flare_jax import heads as heads_lib
from flare_jax.activations import gelu
from flare_jax.heads import HeadLinear
from flare_jax.linear import LayerOptions, Linear, LinearOptions
from geotransolver_jax.attention import attend_latents
from parallel.parameters import parameter
from parallel.precision import accumulation_dtype

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


def make_context_attention(
    width: int, context_dim: int, state_mixing_mode: str, **types: Unpack[LayerOptions]
) -> ContextAttention | None:
    """The cross-attention of a layer; none where there is no context."""
    if not context_dim:
        return None
    return ContextAttention(width, context_dim, state_mixing_mode, **types)


def given_context(cross: ContextAttention | None) -> ContextAttention:
    """The cross-attention of a layer that is given a context.

    Raises:
        ValueError: there is none.
    """
    if cross is None:
        raise ValueError("context: expected None, since context_dim=0; got latents")
    return cross


def weighted_mean(mixing: Array, own: Array, cross: Array) -> Array:
    """`own` by the sigmoid of `mixing`, and `cross` by the rest."""
    share = jax.nn.sigmoid(mixing.astype(accumulation_dtype(own.dtype)))
    return (share * own + (1 - share) * cross).astype(own.dtype)
