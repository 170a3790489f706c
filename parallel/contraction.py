"""Products of points and weights that reduce in float32 whatever they compute in."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from parallel import mesh as mesh_lib
from parallel.softmax import accumulation_dtype


def product(equation: str, left: Float[Array, "..."], right: Float[Array, "..."]) -> jax.Array:
    """`einsum(equation, left, right)` of narrow operands, accumulated in float32 or wider."""
    dtype = accumulation_dtype(left.dtype, right.dtype)
    if mesh_lib.platform() == "cpu":
        # A CPU multiplies in float32 anyway, and XLA's lacks some narrow products (JAX 0.10.2).
        left, right = left.astype(dtype), right.astype(dtype)
    return jnp.einsum(equation, left, right, preferred_element_type=dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def contract(equation: str, x: Float[Array, "..."], kernel: Float[Array, "..."]) -> jax.Array:
    """`einsum(equation, x, kernel)` in the type of `x`, accumulated in float32 or wider.

    So are its gradients: that of the kernel is summed over the points before it is narrowed to the
    type of the kernel, which JAX's own rule would do the other way round.

    Args:
        equation: as `"bnc,hcd->bnhd"`; each index of an operand is one of the other or the result.
        x: points; multiplied in their type.
        kernel: weights, of any floating type.

    Returns:
        The product in float32 or wider.
    """
    return product(equation, x, kernel.astype(x.dtype))


def _contract_forward(equation, x, kernel):
    return contract(equation, x, kernel), (x, kernel)


def _contract_backward(equation, residuals, d_y):
    x, kernel = residuals
    operands, y = equation.split("->")
    of_x, of_kernel = operands.split(",")
    d_y = d_y.astype(x.dtype)
    d_x = product(f"{y},{of_kernel}->{of_x}", d_y, kernel.astype(x.dtype))
    d_kernel = product(f"{of_x},{y}->{of_kernel}", x, d_y)
    return d_x.astype(x.dtype), d_kernel.astype(kernel.dtype)


contract.defvjp(_contract_forward, _contract_backward)
