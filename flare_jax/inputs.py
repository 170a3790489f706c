"""What a model is called with: checked, flattened, padded to the mesh, given back as it came."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from parallel import mesh as mesh_lib
from parallel.annotations import AnyArray, Size
from parallel.mesh import DATA, POINTS
from parallel.points import pad_axis, padded_size


@dataclass(frozen=True)
class PointLayout:
    """How the points of one call are laid out; hashable, so that it can be static under `jit`.

    Attributes:
        given: shape of the points as given, `(N,)` or the axes of a grid.
        points: number of points as given.
        row: points that must stay together, a row of the grid or 1.
    """

    given: tuple[int, ...]
    points: int
    row: int

    @property
    def rows(self) -> int:
        """Rows to compute on: those given, padded to divide over the mesh axis `points`."""
        return padded_size(self.points // self.row)

    def flatten(self, x: Float[AnyArray, "B *N C"]) -> Float[Array, "B N_padded C"]:
        """Points along one axis, padded with zeros so that the mesh divides them."""
        x = jnp.asarray(x).reshape(x.shape[0], self.points, x.shape[-1])
        padded = pad_axis(x, 1, self.rows * self.row - self.points)
        return mesh_lib.constrain(padded, DATA, POINTS, None)

    def flatten_mask(
        self, mask: Bool[AnyArray, "B *N"] | None, batch: Size
    ) -> Bool[Array, "B N_padded"] | None:
        """The mask of the flattened points; `None` where every one is real."""
        extra = self.rows * self.row - self.points
        if mask is None and not extra:
            return None
        if mask is None:
            mask = jnp.ones((batch, self.points), bool)
        padded = pad_axis(jnp.asarray(mask).reshape(batch, self.points), 1, extra)
        return mesh_lib.constrain(padded, DATA, POINTS)

    def unflatten(self, y: Float[Array, "B N_padded C"]) -> Float[Array, "B *N C"]:
        """Points in the layout that was given, without the padding of `flatten`."""
        if y.shape[1] != self.points:
            y = y[:, : self.points]
        return y.reshape(y.shape[0], *self.given, y.shape[-1])


def check_points(
    name: str,
    x: AnyArray,
    width: int,
    structured_shape: tuple[int, ...] | None,
    *,
    padded: bool,
) -> PointLayout:
    """Checks an array of points and finds its layout.

    Args:
        name: name of the argument, for errors.
        x: the points, `(B, N, width)`, or `(B, *grid, width)` for a grid.
        width: expected number of channels.
        structured_shape: shape of the grid, if it is one.
        padded: whether there is a mask; without one a grid may not have more rows than its shape.

    Returns:
        The layout of the points.

    Raises:
        ValueError: no array of real numbers, a wrong rank, width or grid, or a batch that the mesh
            does not divide.
    """
    expected = f"shape (B, N, {width})"
    if structured_shape is not None:
        expected += f" with N = {math.prod(structured_shape)}, or (B, "
        expected += f"{', '.join(map(str, structured_shape))}, {width})"
    shape = check_real(name, x, expected)
    wrong = ValueError(f"{name}: expected {expected}; got {shape}")

    spatial = structured_shape is not None and len(shape) == len(structured_shape) + 2
    if not spatial and len(shape) != 3:
        raise wrong
    given, points = shape[1:-1], math.prod(shape[1:-1])
    if shape[-1] != width or not shape[0] or not points:
        raise wrong
    row = 1
    if structured_shape is not None:
        row, real = math.prod(structured_shape[1:]), math.prod(structured_shape)
        if (spatial and given[1:] != structured_shape[1:]) or points % row or points < real:
            raise wrong
        if points > real and not padded:
            raise ValueError(
                f"{name}: expected a point_mask, since {points // row} rows are more than the "
                f"{structured_shape[0]} of the grid; got shape {shape} without one"
            )

    groups = mesh_lib.axis_size(DATA)
    if shape[0] % groups:
        raise ValueError(
            f"{name}: a batch of {shape[0]} samples does not divide over the mesh axis 'data' of "
            f"{groups}; use a multiple of {groups} samples or a smaller axis"
        )
    return PointLayout(given=given, points=points, row=row)


def check_real(name: str, x: object, expected: str) -> tuple[Size, ...]:
    """The shape of what must be an array of real numbers.

    Raises:
        ValueError: it is not; says what was `expected`.
    """
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(f"{name}: expected an array of {expected}; got {type(x).__name__}")
    if not any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        raise ValueError(f"{name}: expected real numbers of {expected}; got type {x.dtype}")
    return tuple(x.shape)


def check_mask(name: str, mask: AnyArray | None, batch: Size, layout: PointLayout) -> None:
    """Checks the mask of points of a layout.

    Raises:
        ValueError: a wrong shape or type, or a sample without a real point. Under `jax.jit` the
            values cannot be looked at; such a sample then comes out zero.
    """
    if mask is None:
        return
    expected = f"bool {(batch, *layout.given)}"
    if not isinstance(mask, jax.Array | np.ndarray):
        raise ValueError(f"{name}: expected an array of {expected}; got {type(mask).__name__}")
    if mask.shape not in ((batch, layout.points), (batch, *layout.given)) or mask.dtype != bool:
        raise ValueError(f"{name}: expected {expected}; got {mask.dtype} {tuple(mask.shape)}")
    if not is_visible(mask):
        return
    empty = np.flatnonzero(~np.asarray(mask).reshape(batch, layout.points).any(1))
    if empty.size:
        raise ValueError(
            f"{name}: expected at least one real point in every sample; got none in sample "
            f"{empty[0]}"
        )


def is_visible(array: AnyArray | None) -> bool:
    """Whether this process can look at the values of an array: not under `jax.jit`, say."""
    traced = isinstance(array, jax.core.Tracer)
    return not traced and getattr(array, "is_fully_addressable", True)
