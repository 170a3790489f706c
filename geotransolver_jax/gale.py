"""GALE: physics attention whose slices attend to a context as well (arXiv 2512.20399)."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from flare_jax.linear import LayerOptions
from flare_jax.norm import LayerNorm
from geotransolver_jax.attention import PhysicsAttention
from geotransolver_jax.concrete_dropout import ConcreteDropout, output_dropout
from geotransolver_jax.context_attention import given_context, make_context_attention


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
        self.cross = make_context_attention(dim // heads, context_dim, state_mixing_mode, **types)
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
        attend = partial(self._attend, context=context)
        y = self.through_slices(x, point_mask, noise_key, norm, attend)
        return output_dropout(self.concrete, self.dropout, y, dropout_key)

    def latents(
        self,
        gathered: Float[Array, "B H S D"],
        context: Float[Array, "B H S_c D_c"] | None = None,
    ) -> Float[Array, "B H S D"]:
        """What attention among the slices and to the context makes of their tokens."""
        return self._attend(gathered.astype(self.dtype), context)

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
        y = self._from_slices(x, latents, point_mask, norm)
        return output_dropout(self.concrete, self.dropout, y, dropout_key)

    def _attend(self, tokens: Array, context: Array | None) -> Array:
        own = self.attend(tokens)
        return own if context is None else given_context(self.cross).attend(own, tokens, context)
