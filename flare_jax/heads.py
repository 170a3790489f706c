"""Linear maps of points into, within and out of attention heads, on a chunk of points.

Weights come with a leading axis of heads, as `parallel.streaming` wants them, and are multiplied in
the type of the points; sums are in float32 or wider.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from flare_jax.linear import Linear
from parallel.contraction import contract


class HeadLinear(NamedTuple):
    """Weights of a linear map of each head.

    Attributes:
        kernel: `(H, I, O)`.
        bias: `(H, O)`, or `(1, O)` for an output that the heads sum to.
    """

    kernel: Float[Array, "H I O"]
    bias: Float[Array, "#H O"]


def head_width(dim: int, heads: int) -> int:
    """Width of a head.

    Raises:
        ValueError: `heads` does not divide `dim`.
    """
    if heads < 1 or dim % heads:
        raise ValueError(f"heads: expected a divisor of dim={dim}; got {heads}")
    return dim // heads


def into(linear: Linear, heads: int) -> HeadLinear:
    """A layer whose outputs are those of the heads one after another."""
    kernel = linear.kernel[...]
    split = kernel.reshape(kernel.shape[0], heads, -1).swapaxes(0, 1)
    return HeadLinear(split, linear.bias[...].reshape(heads, -1))


def out_of(linear: Linear, heads: int) -> HeadLinear:
    """A layer whose inputs are those of the heads one after another."""
    kernel = linear.kernel[...]
    return HeadLinear(kernel.reshape(heads, -1, kernel.shape[-1]), linear.bias[...][None])


def within(linear: Linear, heads: int) -> HeadLinear:
    """A layer that every head applies."""
    kernel, bias = linear.kernel[...], linear.bias[...]
    return HeadLinear(
        jnp.broadcast_to(kernel, (heads, *kernel.shape)),
        jnp.broadcast_to(bias, (heads, *bias.shape)),
    )


def map_into(
    weights: HeadLinear, x: Float[Array, "B n C"], mask: Bool[Array, "B n"] | None
) -> Float[Array, "B n H D"]:
    """Heads of the points; of zeros where they are padding, whatever these hold."""
    if mask is not None:
        x = jnp.where(mask[..., None], x, 0)
    return _biased(contract("bnc,hcd->bnhd", x, weights.kernel), weights.bias, x.dtype)


def map_within(weights: HeadLinear, x: Float[Array, "B n H D"]) -> Float[Array, "B n H E"]:
    """A linear map of each head."""
    return _biased(contract("bnhd,hde->bnhe", x, weights.kernel), weights.bias, x.dtype)


def map_out(
    weights: HeadLinear, x: Float[Array, "B n H D"], mask: Bool[Array, "B n"] | None
) -> Float[Array, "B n C"]:
    """The output that the heads sum to; zero where points are padding."""
    y = _biased(contract("bnhd,hdc->bnc", x, weights.kernel), weights.bias[0], x.dtype)
    return y if mask is None else jnp.where(mask[..., None], y, 0)


def _biased(product: jax.Array, bias: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    return (product + bias.astype(product.dtype)).astype(dtype)
