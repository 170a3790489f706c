"""Products of points and weights that reduce in float32 whatever they compute in."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from parallel import mesh as mesh_lib
from parallel.precision import accumulation_dtype

# For what a symbolic number of points or samples is taken where orders are weighed.
_MANY = 2**10


def product(equation: str, left: Float[Array, "..."], right: Float[Array, "..."]) -> jax.Array:
    """`einsum(equation, left, right)` of narrow operands, accumulated in float32 or wider.

    A matrix product wants what it sums over last in its first operand and first in its second, and
    a CPU copies an operand that is laid out otherwise. The operands are multiplied in the order in
    which fewer numbers are copied.
    """
    dtype = accumulation_dtype(left.dtype, right.dtype)
    if mesh_lib.platform() == "cpu":
        # A CPU multiplies in float32 anyway, and XLA's lacks some narrow products (JAX 0.10.2).
        left, right = left.astype(dtype), right.astype(dtype)
    of_left, of_right, result = _spelled_out(equation, left, right)
    lengths = [_MANY if is_symbolic_dim(size) else size for size in left.shape + right.shape]
    sizes = dict(zip(of_left + of_right, lengths, strict=True))
    pairs = (of_left, left), (of_right, right)
    (first, a), (second, b) = min(
        (pairs, pairs[::-1]), key=lambda pair: _copied(pair[0][0], pair[1][0], result, sizes)
    )
    natural = _natural(first, second, result)
    y = jnp.einsum(f"{first},{second}->{natural}", a, b, preferred_element_type=dtype)
    return y.transpose([natural.index(i) for i in result])


def sum_of_products(
    x: Float[Array, "..."], y: Float[Array, "..."], axis: int
) -> Float[Array, "..."]:
    """`(x * y).sum(axis, keepdims=True)` over one of the last two axes.

    XLA's CPU backend fuses such a sum with what it is made of and used for, into loops that take
    several times as long as the matrix products around them (JAX 0.10.2). There it is a product
    with ones; elsewhere such a product would round what it sums.
    """
    products = x * y
    if mesh_lib.platform() != "cpu":
        return products.sum(axis, keepdims=True)
    if axis == -1:
        return (products @ jnp.ones(products.shape[-1:], products.dtype))[..., None]
    *batch, rows, _ = products.shape
    return jnp.ones((*batch, 1, rows), products.dtype) @ products


def _spelled_out(equation: str, left: jax.Array, right: jax.Array) -> tuple[str, str, str]:
    """Indices of both operands and the result, letters for an ellipsis."""
    operands, result = equation.split("->")
    of_left, of_right = operands.split(",")
    rest = max(
        array.ndim - len(indices) + 3 if "..." in indices else 0
        for indices, array in ((of_left, left), (of_right, right))
    )
    letters = "ABCDEFGH"[:rest]
    of_left, of_right, result = (
        indices.replace("...", letters) for indices in (of_left, of_right, result)
    )
    return of_left, of_right, result


def _natural(first: str, second: str, result: str) -> str:
    """Indices of a product in the order in which it is computed."""
    batch = [i for i in first if i in second and i in result]
    free = [i for i in first + second if i in result and i not in batch]
    return "".join(batch + free)


def _copied(first: str, second: str, result: str, sizes: dict[str, int]) -> int:
    """Numbers that a product of these operands, in this order, copies to lay them out."""
    batch = [i for i in first if i in second and i in result]
    summed = [i for i in first if i in second and i not in result]
    free_first = [i for i in first if i not in second]
    free_second = [i for i in second if i not in first]
    wanted = (
        (first, batch + free_first + summed),
        (second, batch + summed + free_second),
        (result, batch + free_first + free_second),
    )
    long = lambda indices: [i for i in indices if sizes[i] > 1]  # noqa: E731
    return sum(
        math.prod(sizes[i] for i in given) for given, order in wanted if long(given) != long(order)
    )


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


def _contract_forward(equation: str, x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return contract(equation, x, kernel), (x, kernel)


def _contract_backward(
    equation: str, residuals: tuple[Array, Array], d_y: Array
) -> tuple[Array, Array]:
    x, kernel = residuals
    operands, y = equation.split("->")
    of_x, of_kernel = operands.split(",")
    d_y = d_y.astype(x.dtype)
    d_x = product(f"{y},{of_kernel}->{of_x}", d_y, kernel.astype(x.dtype))
    d_kernel = product(f"{of_x},{y}->{of_kernel}", x, d_y)
    return d_x.astype(x.dtype), d_kernel.astype(kernel.dtype)


contract.defvjp(_contract_forward, _contract_backward)
