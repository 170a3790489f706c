"""A linear layer that reduces in float32 whatever it computes in."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from parallel.contraction import contract
from parallel.parameters import parameter

# The reference draws linear weights from a normal distribution of this deviation, truncated at 100
# deviations: the truncation never acts.
_KERNEL_DEVIATION = 0.02


class Linear(nnx.Module):
    """`y = x @ kernel + bias` over the last axis.

    Unlike `nnx.Linear` in a narrow `dtype`, products are accumulated, and the gradients of kernel
    and bias summed over the points and their shards, in float32.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rngs: nnx.Rngs,
        in_axis: str | None = None,
        out_axis: str | None = None,
        use_bias: bool = True,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ):
        """Makes the weights: kernel normal with deviation 0.02, bias zero.

        Args:
            in_features: width of the input.
            out_features: width of the output.
            rngs: random streams; `params` is used.
            in_axis: mesh axis over which the rows of the kernel are split.
            out_axis: mesh axis over which its columns, and the bias, are split.
            use_bias: whether there is a bias.
            dtype: type to compute in.
            param_dtype: type of the weights.
        """
        kernel = jax.random.normal(rngs.params(), (in_features, out_features), param_dtype)
        self.kernel = parameter(_KERNEL_DEVIATION * kernel, in_axis, out_axis)
        if use_bias:
            self.bias = parameter(jnp.zeros(out_features, param_dtype), out_axis)
        self.use_bias = use_bias
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*B C_in"]) -> Float[Array, "*B C_out"]:
        """Applies the layer in its `dtype`."""
        bias = self.bias[...] if self.use_bias else None
        return linear(x.astype(self.dtype), self.kernel[...], bias)


def linear(
    x: Float[Array, "*B C_in"],
    kernel: Float[Array, "C_in C_out"],
    bias: Float[Array, " C_out"] | None = None,
) -> Float[Array, "*B C_out"]:
    """`x @ kernel + bias` in the type of `x`, reduced in float32 or wider."""
    y = contract("...i,io->...o", x, kernel)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.astype(x.dtype)
