"""Points in compact groups of equal size, so that a box around a group says what is far from it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from parallel.annotations import AnyArray

# Of a place on the curve of `curve_groups`.
_CURVE_BITS = 30


def compact_groups(
    points: Float[AnyArray, "N D"], valid: Bool[AnyArray, " N"], longest: int
) -> Int[Array, "G S"]:
    """Positions of the points of each group, `N` or above where a group has a free place.

    Groups are the leaves of a k-d tree: halves, quarters and so on, each cut at the median of its
    longest side. They adapt to clusters and are never uneven.

    Args:
        points: coordinates.
        valid: points that count; the others come last in each half and extend no side.
        longest: points that a group holds at most.

    Returns:
        The groups, a power of two of them.
    """
    total, _ = points.shape
    levels = max(0, (-(-total // longest) - 1).bit_length())
    length = -(-total // 2**levels) * 2**levels
    points = jnp.where(valid[:, None], points, jnp.inf)
    points = jnp.pad(points, ((0, length - total), (0, 0)), constant_values=jnp.inf)
    order = jnp.arange(length, dtype=jnp.int32)[None]
    for _ in range(levels):
        members = points[order]
        lower, upper = bounds(members, jnp.isfinite(members[..., 0]))
        side = jnp.argmax(upper - lower, axis=-1)
        along = jnp.take_along_axis(members, side[:, None, None], axis=-1)[..., 0]
        _, order = jax.lax.sort((along, order), num_keys=1)
        order = order.reshape(2 * len(order), -1)
    return order


def curve_groups(
    points: Float[AnyArray, "N D"], valid: Bool[AnyArray, " N"], longest: int, multiple: int
) -> Int[Array, "G S"]:
    """Groups as `compact_groups` makes them, for a number of points that may be symbolic.

    How often halves are halved would depend on it. Here a group is a run along a Z-order curve
    through the points' ranks along each axis, which adapt to clusters, too.

    Args:
        points: coordinates.
        valid: points that count; the others come last.
        longest: points that a group holds.
        multiple: of which the number of groups is one.

    Returns:
        The groups; free places, of `N`, are the last.
    """
    total, width = points.shape
    bits = _CURVE_BITS // width
    coordinates = jnp.where(valid[:, None], points, jnp.inf)
    ranks = jnp.argsort(jnp.argsort(coordinates, axis=0), axis=0).astype(jnp.float32)
    cells = (ranks * (2**bits / jnp.float32(total))).astype(jnp.uint32)
    cells = jnp.minimum(cells, 2**bits - 1)
    code = jnp.zeros(total, jnp.uint32)
    for bit in range(bits):
        for axis in range(width):
            code |= (cells[:, axis] >> bit & 1) << (bit * width + axis)
    order = jnp.argsort(jnp.where(valid, code, 2**_CURVE_BITS))
    groups = (total + longest * multiple - 1) // (longest * multiple) * multiple
    free = groups * longest - total
    return jnp.pad(order, (0, free), constant_values=total).reshape(groups, longest)


def finite(points: Float[Array, "*N D"]) -> Bool[Array, "*N"]:
    """Whether a point has a place: no coordinate is infinite or not a number."""
    return jnp.isfinite(points).all(-1)


def bounds(
    points: Float[AnyArray, "*G S D"], valid: Bool[AnyArray, "*G S"]
) -> tuple[Float[Array, "*G D"], Float[Array, "*G D"]]:
    """Lower and upper corner of the box around the valid points of each group.

    The box of a group without any is inside out, and infinitely far from every other.
    """
    valid = valid[..., None]
    lower = jnp.where(valid, points, jnp.inf).min(-2)
    return lower, jnp.where(valid, points, -jnp.inf).max(-2)


def square_distances(differences: Sequence[Float[Array, "*N"]]) -> Float[Array, "*N"]:
    """Sum of squares of the differences along each axis, each operation rounded by itself.

    Else the compiler fuses a product and a sum into one rounding, in one program and not in
    another, and which of two neighbours is nearer would depend on the mesh. The maximum, which
    changes nothing, stands between the two.
    """
    total, *others = (jnp.maximum(difference**2, 0) for difference in differences)
    for square in others:
        total = total + square
    return total


def box_square_distances(
    boxes: tuple[Float[Array, "*#N D"], Float[Array, "*#N D"]],
    others: tuple[Float[Array, "*#N D"], Float[Array, "*#N D"]],
) -> Float[Array, "*_N"]:
    """Square distance of boxes, given by their corners: no two of their points are nearer.

    That holds in floating point as well, since every operation is monotonic and is the one that
    `square_distances` of points makes.
    """
    (lower, upper), (other_lower, other_upper) = boxes, others
    gap = jnp.maximum(lower - other_upper, other_lower - upper)
    gap = jnp.maximum(gap, 0)
    return square_distances([gap[..., axis] for axis in range(gap.shape[-1])])
