"""The two-layer perceptron of the transformer blocks and of the input."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from flare_jax.activations import Activation
from flare_jax.linear import Linear
from parallel.mesh import HEADS


class MLP(nnx.Module):
    """Linear, activation, linear; its hidden width is split over the mesh axis `heads`."""

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
    ):
        """Makes the weights; arguments as `Linear` and `Activation` take them."""
        types = dict(rngs=rngs, initial=initial, dtype=dtype, param_dtype=param_dtype)
        self.linear_in = Linear(in_features, hidden_features, out_axis=HEADS, **types)
        self.activation = Activation(act, param_dtype=param_dtype)
        self.linear_out = Linear(hidden_features, out_features, in_axis=HEADS, **types)

    def __call__(self, x: Float[Array, "B N C_in"]) -> Float[Array, "B N C_out"]:
        """Applies the perceptron to every point."""
        return self.linear_out(self.activation(self.linear_in(x)))
