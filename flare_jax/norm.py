"""Layer normalization, as a layer and on a chunk of points."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from parallel.contraction import sum_of_products
from parallel.parameters import parameter
from parallel.precision import accumulation_dtype

_EPSILON = 1e-5


class LayerNorm(nnx.Module):
    """Normalization over the channels; statistics in float32 or wider, in two passes.

    Where a linear map follows, scale and shift go into its weights (`Linear.weights`), and points
    are only standardized.
    """

    def __init__(
        self,
        features: int,
        *,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> None:
        """Makes the weights.

        Args:
            features: number of channels.
            dtype: type of the result.
            param_dtype: type of the weights.
        """
        self.scale = parameter(jnp.ones((features,), param_dtype), None)
        self.bias = parameter(jnp.zeros((features,), param_dtype), None)
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        """Normalizes every point."""
        wide = standardize(x.astype(accumulation_dtype(self.dtype)))
        scale, bias = (weight[...].astype(wide.dtype) for weight in (self.scale, self.bias))
        return (wide * scale + bias).astype(self.dtype)


@jax.custom_vjp
def standardize(x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
    """Points less their mean over the channels, over their standard deviation."""
    return _standardize_forward(x)[0]


def _standardize_forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
    wide = x.astype(accumulation_dtype(x.dtype))
    deviation = wide - wide.mean(-1, keepdims=True)
    rate = jax.lax.rsqrt(jnp.square(deviation).mean(-1, keepdims=True) + _EPSILON)
    y = (deviation * rate).astype(x.dtype)
    return y, (y, rate)


def _standardize_backward(residuals: tuple[Array, Array], d_y: Array) -> tuple[Array]:
    y, rate = residuals
    y, d_y = y.astype(rate.dtype), d_y.astype(rate.dtype)
    slope = sum_of_products(d_y, y, -1) / y.shape[-1]
    shared = d_y.mean(-1, keepdims=True) + y * slope
    return ((rate * (d_y - shared)).astype(residuals[0].dtype),)


standardize.defvjp(_standardize_forward, _standardize_backward)
