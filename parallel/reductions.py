"""Masked reductions over points.

Plain sums are written as the compiler partitions them well by itself (a local sum and one small
all-reduce). Where two quantities are reduced together they are packed first, so that one all-reduce
carries both. All reduce in float32 or wider.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, PyTree

from parallel import mesh as mesh_lib
from parallel.annotations import AnyArray
from parallel.contraction import product
from parallel.mesh import POINTS
from parallel.precision import accumulation_dtype


def _masked(x: AnyArray, mask: AnyArray | None) -> Array:
    """`x` in the accumulation type, zero where the mask is False (also where it is not finite)."""
    x = jnp.asarray(x, accumulation_dtype(x.dtype))
    if mask is None:
        return x
    if mask.shape != x.shape[: mask.ndim]:
        raise ValueError(f"expected a mask of shape {x.shape[:2]}, got {mask.shape}")
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, 0)


def _counts(x: AnyArray, mask: AnyArray | None) -> Array:
    """Number of real points of each sample, at least one so that it can divide: (B,)."""
    dtype = accumulation_dtype(x.dtype)
    if mask is None:
        return jnp.full(x.shape[0], x.shape[1], dtype)
    return jnp.maximum(mask.astype(dtype).sum(1), 1)


def masked_sum(
    x: Float[AnyArray, "B N *C"], mask: Bool[AnyArray, "B N"] | None = None
) -> Float[Array, "B *C"]:
    """Sum over the real points of each sample."""
    return _masked(x, mask).sum(1)


def masked_mean(
    x: Float[AnyArray, "B N *C"], mask: Bool[AnyArray, "B N"] | None = None
) -> Float[Array, "B *C"]:
    """Mean over the real points of each sample; zero for a sample that has none."""
    counts = _counts(x, mask)
    return masked_sum(x, mask) / counts.reshape(-1, *[1] * (x.ndim - 2))


def masked_mean_and_variance(
    x: Float[AnyArray, "B N *C"], mask: Bool[AnyArray, "B N"] | None = None
) -> tuple[Float[Array, "B *C"], Float[Array, "B *C"]]:
    """Mean and (biased) variance over the real points of each sample.

    Two passes: the difference of the mean of squares and the square of the mean loses every digit
    where a field's mean is far larger than its spread, as absolute pressures and coordinates are.
    """
    mean = masked_mean(x, mask)
    # Padding is zeroed before it is squared: masked after, its NaN would still reach the gradient.
    return mean, masked_mean(jnp.square(_masked(x, mask) - mean[:, None]), mask)


def slice_sums(
    weights: Float[AnyArray, "B N H S"],
    values: Float[AnyArray, "B N H D"],
    mask: Bool[AnyArray, "B N"] | None = None,
) -> tuple[Float[Array, "B H S D"], Float[Array, "B H S"]]:
    """Weighted sums of the points into slices, and of the weights, in one packed all-reduce.

    The slice reduction of physics attention (Transolver, arXiv 2402.02366, equation 2), before its
    division.

    Args:
        weights: weight of each point in each slice.
        values: values of the points.
        mask: True where a point is real.

    Returns:
        `sum_n weights * values` and `sum_n weights`, replicated over the points.
    """
    return _slice_sums_jitted(weights, values, mask)


@jax.custom_vjp
def _slice_sums(weights: Array, values: Array, mask: Array | None) -> tuple[Array, Array]:
    run = mesh_lib.island(_slice_sums_local, in_specs=(P(None, POINTS),) * 3, out_specs=(P(), P()))
    return run(weights, values, mask)


def _slice_sums_local(
    weights: Array, values: Array, mask: Array | None, *, axis: str | None
) -> tuple[Array, Array]:
    weights, values = _masked(weights, mask), _masked(values, mask)
    sums = product("bnhs,bnhd->bhsd", weights, values)
    packed = jnp.concatenate([sums, weights.sum(1)[..., None]], axis=-1)
    if axis is not None:
        packed = jax.lax.psum(packed, axis)
    return packed[..., :-1], packed[..., -1]


def _slice_sums_forward(
    weights: Array, values: Array, mask: Array | None
) -> tuple[tuple[Array, Array], PyTree]:
    return _slice_sums(weights, values, mask), (weights, values, mask)


def _slice_sums_backward(
    residuals: tuple[Array, Array, Array | None], gradients: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    """Local: the gradients of replicated sums meet each point where it lies."""
    weights, values, mask = residuals
    d_sums, d_counts = gradients
    d_weights = product("bhsd,bnhd->bnhs", d_sums, _masked(values, mask)) + d_counts[:, None]
    d_values = product("bhsd,bnhs->bnhd", d_sums, _masked(weights, mask))
    return (
        _masked(d_weights, mask).astype(weights.dtype),
        _masked(d_values, mask).astype(values.dtype),
        None,
    )


_slice_sums.defvjp(_slice_sums_forward, _slice_sums_backward)
_slice_sums_jitted = jax.jit(_slice_sums)
