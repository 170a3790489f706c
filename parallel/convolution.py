"""Convolution on a structured grid whose rows are split over the points axis.

A shard needs, beside its own rows, `kernel // 2` rows of its neighbours on either side. Only these
travel, from shard to shard (`ppermute`); where shards are thinner than that, over several shards.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from parallel import mesh as mesh_lib
from parallel.annotations import AnyArray
from parallel.mesh import POINTS
from parallel.precision import accumulation_dtype

_ROWS = P(None, POINTS)


def grid_convolution(
    x: Float[AnyArray, "B R *grid C_in"], kernel: Float[AnyArray, "*K C_in C_out"]
) -> Float[Array, "B R *grid C_out"]:
    """Convolves a grid with an odd kernel, zero beyond its borders ("same" padding, stride 1).

    Cross-correlation, as in deep learning. Reduced in float32 or wider.

    Args:
        x: the grid; its first grid axis, the rows, is split over the mesh axis `points`, which must
            divide it. Padding rows must be zero: they stand for what is beyond the border.
        kernel: kernel of as many spatial axes as the grid.

    Returns:
        The convolved grid, laid out as `x`, in its type.

    Raises:
        ValueError: an even kernel, or one with another number of axes.
    """
    axes = x.ndim - 2
    if kernel.ndim != axes + 2 or any(size % 2 == 0 for size in kernel.shape[:axes]):
        raise ValueError(
            f"grid_convolution: expected an odd kernel of {axes} axes for a grid {x.shape[1:-1]}; "
            f"got {kernel.shape[:-2]}"
        )
    return _convolve(x, kernel)


@jax.jit
def _convolve(x: Array, kernel: Array) -> Array:
    run = mesh_lib.island(_convolve_rows, in_specs=(_ROWS, P()), out_specs=_ROWS)
    return run(x, kernel)


def _convolve_rows(x: Array, kernel: Array, *, axis: str | None) -> Array:
    """The rows of one shard."""
    halo = kernel.shape[0] // 2
    sides = [(size // 2, size // 2) for size in kernel.shape[:-2]]
    if axis is not None:
        x = _with_halo(x, halo, axis)
        sides[0] = (0, 0)
    grid = "".join("HWD"[i] for i in range(x.ndim - 2))
    y = jax.lax.conv_general_dilated(
        x,
        kernel.astype(x.dtype),
        window_strides=(1,) * (x.ndim - 2),
        padding=sides,
        dimension_numbers=(f"N{grid}C", f"{grid}IO", f"N{grid}C"),
        preferred_element_type=accumulation_dtype(x.dtype),
    )
    return y.astype(x.dtype)


def _with_halo(x: Array, halo: int, axis: str) -> Array:
    """Own rows with `halo` rows of the shards before and after; zeros beyond the first and last."""
    shards, rows = jax.lax.axis_size(axis), x.shape[1]
    before: list[Array] = []
    after: list[Array] = []
    missing, distance = halo, 1
    while missing > 0:
        count = min(missing, rows)
        # A shard that nobody sends to receives zeros, which is what lies beyond the border.
        down = [(i, i + distance) for i in range(shards - distance)]
        up = [(i + distance, i) for i in range(shards - distance)]
        before.insert(0, jax.lax.ppermute(x[:, rows - count :], axis, down))
        after.append(jax.lax.ppermute(x[:, :count], axis, up))
        missing, distance = missing - count, distance + 1
    return jnp.concatenate([*before, x, *after], axis=1)
