"""The two-layer perceptron of the transformer blocks and of the input."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from flare_jax import heads as heads_lib
from flare_jax.activations import Activation, activate
from flare_jax.heads import HeadLinear
from flare_jax.linear import Linear, LinearOptions
from flare_jax.norm import LayerNorm
from parallel import mesh as mesh_lib
from parallel.contraction import contract
from parallel.mesh import HEADS
from parallel.streaming import Chunking, Places, map_points


class MLPWeights(NamedTuple):
    """Weights of a perceptron, its hidden width in G groups.

    Attributes:
        linear_in: `(G, C_in, F)`.
        linear_out: `(G, F, C_out)`.
        activation: learned number of the activation `(1,)`, or `None`.
    """

    linear_in: HeadLinear
    linear_out: HeadLinear
    activation: Float[Array, " 1"] | None


class MLP(nnx.Module):
    """Linear, activation, linear; its hidden width is split over the mesh axis `heads`.

    The hidden width exists for a chunk of points at a time, forward and backward.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int,
        *,
        act: str,
        initial: str = "normal",
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> None:
        """Makes the weights; arguments as `Linear` and `Activation` take them."""
        types: LinearOptions = dict(
            rngs=rngs, initial=initial, dtype=dtype, param_dtype=param_dtype
        )
        self.linear_in = Linear(in_features, hidden_features, out_axis=HEADS, **types)
        self.activation = Activation(act, param_dtype=param_dtype)
        self.linear_out = Linear(hidden_features, out_features, in_axis=HEADS, **types)
        self.hidden_features = hidden_features
        self.dtype = dtype

    def __call__(self, x: Float[Array, "B N C_in"]) -> Float[Array, "B N C_out"]:
        """Applies the perceptron to every point."""
        return self._map(x, None)

    def residual(self, x: Float[Array, "B N C"], norm: LayerNorm) -> Float[Array, "B N C"]:
        """`x` and, added to it, the perceptron of `x` normalized."""
        return self._map(x, norm)

    def _map(self, x: Array, norm: LayerNorm | None) -> Array:
        groups = mesh_lib.axis_size(HEADS)
        if self.hidden_features % groups:
            groups = 1
        weights = MLPWeights(
            heads_lib.into(self.linear_in, groups, norm),
            heads_lib.out_of(self.linear_out, groups),
            self.activation.learned,
        )
        chunking = Chunking(groups, self.hidden_features // groups)
        apply = partial(_perceptron, self.activation.name, norm is not None)
        return map_points(apply, chunking, weights, {}, x.astype(self.dtype))


def _perceptron(
    activation: str,
    residual: bool,
    weights: MLPWeights,
    latents: dict[str, Array],
    x: Array,
    places: Places,
) -> Array:
    """The perceptron on a chunk of points; if `residual`, of these standardized and added."""
    seen = heads_lib.visible(x, None, normalized=residual)
    hidden = contract("bnc,gcf->bngf", seen, weights.linear_in.kernel)
    hidden = (hidden + weights.linear_in.bias.astype(hidden.dtype)).astype(x.dtype)
    hidden = activate(activation, hidden, weights.activation)
    y = contract("bngf,gfc->bnc", hidden, weights.linear_out.kernel)
    y = (y + weights.linear_out.bias[0].astype(y.dtype)).astype(x.dtype)
    return x + y if residual else y
