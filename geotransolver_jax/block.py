"""The transformer block of GeoTransolver: several clouds, one context."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from flare_jax.linear import LayerTypes
from flare_jax.mlp import MLP
from flare_jax.norm import LayerNorm
from geotransolver_jax.concrete_dropout import ConcreteDropout
from geotransolver_jax.gale import GALE
from geotransolver_jax.gale_fa import GALEFA
from parallel import mesh as mesh_lib
from parallel.mesh import DATA, POINTS


class GALEBlock(nnx.Module):
    """Attention with context and perceptron, each behind a normalization and beside a residual.

    Every stream goes through the same weights; streams meet in the context alone.
    """

    def __init__(
        self,
        attention: GALE | GALEFA,
        dim: int,
        *,
        mlp_ratio: int,
        act: str,
        dropout: float = 0.0,
        concrete_dropout: bool = False,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> None:
        """Makes the weights.

        Args:
            attention: the attention layer.
            dim: width of the points.
            mlp_ratio: hidden width of the perceptron, in units of `dim`.
            act: activation of the perceptron.
            dropout: initial rate of the concrete dropouts.
            concrete_dropout: whether there are some, after both residuals.
            rngs: random streams; `params` is used.
            dtype: type to compute in.
            param_dtype: type of the weights.
        """
        types: LayerTypes = dict(dtype=dtype, param_dtype=param_dtype)
        self.norm_attention = LayerNorm(dim, **types)
        self.attention = attention
        self.norm_mlp = LayerNorm(dim, **types)
        self.mlp = MLP(dim, dim * mlp_ratio, dim, act=act, initial="uniform", rngs=rngs, **types)
        drop = lambda: ConcreteDropout(dropout, param_dtype=param_dtype)  # noqa: E731
        self.attention_dropout = drop() if concrete_dropout else None
        self.mlp_dropout = drop() if concrete_dropout else None

    def __call__(
        self,
        streams: tuple[Float[Array, "B _N C"], ...],
        point_masks: tuple[Bool[Array, "B _N"] | None, ...],
        context: Float[Array, "B H S_c D_c"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B _N C"], ...]:
        """Applies the block to every stream, each with random numbers of its own."""
        keys = [None] * len(streams) if key is None else jax.random.split(key, len(streams))
        return tuple(
            self._apply(x, mask, context, key)
            for x, mask, key in zip(streams, point_masks, keys, strict=True)
        )

    def gather(self, x: Float[Array, "B N C"], point_mask: Bool[Array, "B N"] | None) -> Any:
        """What a part of the points of a stream gives to the latents; see `flare_jax.phases`."""
        return self.attention.gather(x, point_mask, self.norm_attention)

    def advance(
        self,
        x: Float[Array, "B N C"],
        latents: Float[Array, "B H S D"],
        point_mask: Bool[Array, "B N"] | None,
        context: Float[Array, "B H S_c D_c"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B N C"]:
        """The block, on points of a stream whose latents are known."""

        def attend(key: Key[Array, ""] | None) -> Array:
            norm = self.norm_attention
            return self.attention.give_back(x, latents, point_mask, norm, context, key)

        return self._around(x, attend, key)

    def _apply(
        self, x: Array, point_mask: Array | None, context: Array | None, key: Key[Array, ""] | None
    ) -> Array:
        def attend(key: Key[Array, ""] | None) -> Array:
            return self.attention(x, point_mask, key, self.norm_attention, context)

        return self._around(x, attend, key)

    def _around(
        self, x: Array, attend: Callable[[Array | None], Array], key: Key[Array, ""] | None
    ) -> Array:
        """Residuals, dropouts and the perceptron around an attention."""
        keys = [None] * 3 if key is None else jax.random.split(key, 3)
        x = x + attend(keys[0])
        if self.attention_dropout is not None:
            x = self.attention_dropout(x, keys[1])
        x = self.mlp.residual(x, self.norm_mlp)
        if self.mlp_dropout is not None:
            x = self.mlp_dropout(x, keys[2])
        return mesh_lib.constrain(x, DATA, POINTS, None)
