"""What GeoTransolver is called with: checked, and how it is laid out."""

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from flare_jax.inputs import PointLayout, check_mask, check_points, check_real, is_visible
from geotransolver_jax.neighborhoods import Neighborhoods
from parallel import mesh as mesh_lib
from parallel.annotations import AnyArray, Integer
from parallel.mesh import DATA, POINTS
from parallel.neighbors import Neighbors
from parallel.points import pad_axis

if TYPE_CHECKING:
    from geotransolver_jax.geotransolver import GeoTransolver

# One array a stream, or the array of the only one.
_Streams = AnyArray | Sequence[AnyArray | None]


class Inputs(NamedTuple):
    """The arrays of a call, as given; tuples hold one entry a stream.

    Attributes:
        embeddings: values at the points.
        positions: coordinates of the points, or `None`.
        point_masks: True where a point is real, or `None`.
        global_embedding: tokens of global quantities, or `None`.
        geometry: points of the geometry, or `None`.
        geometry_mask: True where one of these is real, or `None`.
        neighborhoods: neighbours that were found before, or `None`.
    """

    embeddings: tuple[Float[AnyArray, "B *_N _C"], ...]
    positions: tuple[Float[AnyArray, "B _N 3"], ...] | None
    point_masks: tuple[Bool[AnyArray, "B *_N"] | None, ...]
    global_embedding: Float[AnyArray, "B G C_g"] | None
    geometry: Float[AnyArray, "B *M C_geo"] | None
    geometry_mask: Bool[AnyArray, "B *M"] | None
    neighborhoods: tuple[Neighborhoods, ...] | None


class Layouts(NamedTuple):
    """How the points of a call are laid out; hashable.

    Attributes:
        streams: of each stream.
        geometry: of the geometry.
        globals: of the global tokens.
    """

    streams: tuple[PointLayout, ...]
    geometry: PointLayout | None
    globals: PointLayout | None


def widths(name: str, value: Integer | Sequence[Integer]) -> tuple[int, ...]:
    """One width or several, as a tuple.

    Raises:
        ValueError: something else.
    """
    given: Any = [value] if isinstance(value, Integral) else value
    valid = isinstance(given, Sequence) and not isinstance(given, str | bytes) and len(given)
    if not valid or not all(isinstance(width, Integral) and int(width) >= 1 for width in given):
        raise ValueError(f"{name}: expected a positive integer, or one a stream; got {value!r}")
    return tuple(int(width) for width in given)


def check_inputs(
    model: "GeoTransolver",
    local_embedding: _Streams,
    local_positions: _Streams | None,
    global_embedding: AnyArray | None,
    geometry: AnyArray | None,
    point_mask: _Streams | None,
    geometry_mask: AnyArray | None,
    neighborhoods: Neighborhoods | Sequence[Neighborhoods] | None,
) -> tuple[Inputs, Layouts]:
    """Checks the arguments of a call of a `GeoTransolver`.

    Raises:
        ValueError: an argument is missing, not taken, or of a wrong shape; a sample has no real
            point; or a coordinate is not finite.
    """
    count, grid = len(model.functional_dims), model.structured_shape
    embeddings = _streams("local_embedding", local_embedding, count)
    masks = (None,) * count if point_mask is None else _streams("point_mask", point_mask, count)
    layouts = []
    for i, (x, width, mask) in enumerate(
        zip(embeddings, model.functional_dims, masks, strict=True)
    ):
        name = _name("local_embedding", i, local_embedding)
        layout = check_points(name, x, width, grid, padded=mask is not None)
        if x.shape[0] != embeddings[0].shape[0]:
            raise ValueError(
                f"{name}: expected {embeddings[0].shape[0]} samples, as in stream 0; "
                f"got shape {tuple(x.shape)}"
            )
        check_mask(_name("point_mask", i, point_mask), mask, x.shape[0], layout)
        layouts.append(layout)
    batch = embeddings[0].shape[0]

    of_geometry = of_globals = None
    if (geometry is None) != (global_embedding is None) and None not in (
        model.geometry_dim,
        model.global_dim,
    ):
        missing = "geometry" if geometry is None else "global_embedding"
        raise ValueError(
            f"{missing}: expected an array, since the blocks of this model read geometry and "
            "global embedding together; got None"
        )
    if geometry is not None:
        width = taken_width("geometry", model.geometry_dim, "geometry_dim")
        padded = geometry_mask is not None
        of_geometry = check_points("geometry", geometry, width, grid, padded=padded)
        _check_batch("geometry", geometry, batch)
        check_mask("geometry_mask", geometry_mask, batch, of_geometry)
    elif geometry_mask is not None:
        raise ValueError("geometry_mask: expected None without a geometry; got one")
    if global_embedding is not None:
        width = taken_width("global_embedding", model.global_dim, "global_dim")
        of_globals = check_points("global_embedding", global_embedding, width, None, padded=False)
        _check_batch("global_embedding", global_embedding, batch)

    positions, found = None, None
    if model.include_local_features:
        positions = _positions(local_positions, local_embedding, layouts, masks, batch)
        if geometry is None or of_geometry is None:
            raise ValueError(
                "geometry: expected its points, since include_local_features=True; got None"
            )
        check_finite("geometry", geometry, geometry_mask)
        if neighborhoods is not None:
            found = _neighborhoods(model, neighborhoods, layouts, of_geometry, batch)
    elif neighborhoods is not None:
        raise ValueError(
            "neighborhoods: expected None, since include_local_features=False; got some"
        )
    inputs = Inputs(embeddings, positions, masks, global_embedding, geometry, geometry_mask, found)
    return inputs, Layouts(tuple(layouts), of_geometry, of_globals)


def check_finite(name: str, x: jax.Array | np.ndarray, mask: AnyArray | None) -> None:
    """Refuses coordinates of real points that are not finite; under `jax.jit` nothing is seen."""
    if mesh_lib.is_traced() or not all(is_visible(array) for array in (x, mask)):
        return
    finite = jnp.isfinite(x).all(-1)
    if mask is not None:
        finite = finite | ~jnp.reshape(mask, finite.shape)
    if not finite.all():
        sample, point = np.argwhere(~np.asarray(finite))[0]
        raise ValueError(
            f"{name}: expected finite coordinates; got {np.asarray(x[sample, point]).tolist()} at "
            f"point {point} of sample {sample}"
        )


def pad_neighborhoods(
    found: Neighborhoods, points: PointLayout, geometry: PointLayout
) -> Neighborhoods:
    """Neighbours for the padded points, where padding has none."""

    def pad(neighbors: Neighbors, layout: PointLayout) -> Neighbors:
        extra = layout.rows - layout.points
        # An empty slot is -1, and padding is of zeros.
        arrays = (
            pad_axis(neighbors.indices + 1, 1, extra) - 1,
            pad_axis(neighbors.distances, 1, extra),
        )
        return Neighbors(*(mesh_lib.constrain(x, DATA, POINTS, None) for x in arrays))

    return Neighborhoods(pad(found.of_points, points), pad(found.of_geometry, geometry))


def _streams(name: str, value: object, count: int) -> tuple:
    values = (value,) if hasattr(value, "ndim") else value
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(
            f"{name}: expected an array, or a sequence of {count}; got {type(value).__name__}"
        )
    for i, array in enumerate(values):
        if array is not None and not hasattr(array, "ndim"):
            raise ValueError(
                f"{name}[{i}]: expected an array of this stream; got {type(array).__name__}"
            )
    if len(values) != count:
        raise ValueError(
            f"{name}: expected {count} streams, as in functional_dim; got {len(values)}"
        )
    return tuple(values)


def _name(name: str, i: int, value: object) -> str:
    return name if hasattr(value, "ndim") else f"{name}[{i}]"


def taken_width(name: str, width: int | None, option: str) -> int:
    """The width of an argument that a model may have been made without.

    Raises:
        ValueError: it was.
    """
    if width is None:
        raise ValueError(f"{name}: expected None, since {option}=None; got an array")
    return width


def _check_batch(name: str, x: AnyArray, batch: int) -> None:
    if x.shape[0] != batch:
        raise ValueError(
            f"{name}: expected {batch} samples, as in local_embedding; got shape {tuple(x.shape)}"
        )


def _positions(
    local_positions: _Streams | None,
    local_embedding: _Streams,
    layouts: Sequence[PointLayout],
    masks: Sequence[AnyArray | None],
    batch: int,
) -> tuple:
    count = len(layouts)
    if local_positions is None:
        raise ValueError(
            "local_positions: expected coordinates of the points, since "
            "include_local_features=True; got None"
        )
    positions = _streams("local_positions", local_positions, count)
    for i, (x, layout, mask) in enumerate(zip(positions, layouts, masks, strict=True)):
        name = _name("local_positions", i, local_positions)
        expected = (batch, layout.points, 3)
        if check_real(name, x, f"shape {expected}") != expected:
            raise ValueError(f"{name}: expected shape {expected}; got {tuple(x.shape)}")
        check_finite(name, x, mask)
    return positions


def _neighborhoods(
    model: "GeoTransolver",
    neighborhoods: Neighborhoods | Sequence[Neighborhoods],
    layouts: Sequence[PointLayout],
    of_geometry: PointLayout,
    batch: int,
) -> tuple:
    found: tuple[Neighborhoods, ...] = (
        (neighborhoods,) if isinstance(neighborhoods, Neighborhoods) else tuple(neighborhoods)
    )
    if len(found) != len(layouts):
        raise ValueError(
            f"neighborhoods: expected {len(layouts)} streams, as in functional_dim; "
            f"got {len(found)}"
        )
    for i, (stream, layout) in enumerate(zip(found, layouts, strict=True)):
        least = max(scale.count for scale in model.context.local[i].scales)
        for name, neighbors, points in (
            ("of_points", stream.of_points, layout.points),
            ("of_geometry", stream.of_geometry, of_geometry.points),
        ):
            for part, array in zip(Neighbors._fields, neighbors, strict=True):
                shape = tuple(array.shape)
                if len(shape) != 3 or shape[:2] != (batch, points) or shape[2] < least:
                    raise ValueError(
                        f"neighborhoods[{i}].{name}.{part}: expected shape ({batch}, {points}, K) "
                        f"with K of at least {least}; got {shape}"
                    )
    return found
