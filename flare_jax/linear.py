"""A linear layer that reduces in float32 whatever it computes in."""

from typing import TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from flare_jax.norm import LayerNorm, standardize
from parallel.contraction import contract, product
from parallel.parameters import parameter

# The reference draws the linear weights of FLARE and Transolver from a normal distribution of this
# deviation, truncated at 100 deviations: the truncation never acts.
_KERNEL_DEVIATION = 0.02
INITIAL = ("normal", "uniform", "orthogonal")


class LayerTypes(TypedDict):
    """Arguments that every layer takes: the type to compute in, and that of its weights."""

    dtype: jax.typing.DTypeLike
    param_dtype: jax.typing.DTypeLike


class LayerOptions(LayerTypes):
    """Arguments that every layer of random weights takes."""

    rngs: nnx.Rngs


class LinearOptions(LayerOptions):
    """Arguments that linear layers share, whatever their width; see `Linear`."""

    initial: str


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
        initial: str = "normal",
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ):
        """Makes the weights.

        Args:
            in_features: width of the input.
            out_features: width of the output.
            rngs: random streams; `params` is used.
            in_axis: mesh axis over which the rows of the kernel are split.
            out_axis: mesh axis over which its columns, and the bias, are split.
            use_bias: whether there is a bias.
            initial: how weights are drawn. `normal`: kernel of deviation 0.02, bias zero.
                `uniform`: both within one over the square root of `in_features`, as PyTorch does.
                `orthogonal`: such a bias, and a kernel of orthonormal rows or columns.
            dtype: type to compute in.
            param_dtype: type of the weights.
        """
        if initial not in INITIAL:
            raise ValueError(f"initial: expected one of {', '.join(INITIAL)}; got {initial!r}")
        shape, bound = (in_features, out_features), in_features**-0.5
        key, bias = rngs.params(), jnp.zeros(out_features, param_dtype)
        if initial == "normal":
            kernel = _KERNEL_DEVIATION * jax.random.normal(key, shape, param_dtype)
        elif initial == "uniform":
            kernel = uniform(key, shape, bound, param_dtype)
        else:
            kernel = jax.nn.initializers.orthogonal()(key, shape, param_dtype)
        if initial != "normal":
            bias = uniform(rngs.params(), bias.shape, bound, param_dtype)
        self.kernel = parameter(kernel, in_axis, out_axis)
        if use_bias:
            self.bias = parameter(bias, out_axis)
        self.use_bias = use_bias
        self.dtype = dtype

    def __call__(
        self, x: Float[Array, "*B C_in"], norm: LayerNorm | None = None
    ) -> Float[Array, "*B C_out"]:
        """Applies the layer in its `dtype`, to normalized points if there is a `norm`."""
        x = x.astype(self.dtype)
        return linear(x if norm is None else standardize(x), *self.weights(norm))

    def weights(
        self, norm: LayerNorm | None = None
    ) -> tuple[Float[Array, "C_in C_out"], Float[Array, " C_out"] | None]:
        """Kernel and bias; with the scale and shift of a normalization in front in them."""
        kernel, bias = self.kernel[...], self.bias[...] if self.use_bias else None
        if norm is None:
            return kernel, bias
        shift = product("c,cd->d", norm.bias[...], kernel)
        bias = shift.astype(kernel.dtype) if bias is None else (bias + shift).astype(bias.dtype)
        return norm.scale[...][:, None] * kernel, bias


def uniform(
    key: Key[Array, ""], shape: tuple[int, ...], bound: float, dtype: jax.typing.DTypeLike
) -> Float[Array, "..."]:
    """Numbers within a bound, in which PyTorch draws linear and convolutional weights."""
    return jax.random.uniform(key, shape, dtype, -bound, bound)


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
