"""What GeoTransolver is called with: checked, and how it is laid out."""

from collections.abc import Sequence
from numbers import Integral
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from flare_jax.inputs import PointLayout, check_mask, check_points, check_real, is_visible
from geotransolver_jax.neighborhoods import Neighborhoods
from parallel import mesh as mesh_lib
from parallel.mesh import DATA, POINTS
from parallel.neighbors import Neighbors
from parallel.points import pad_axis


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

    embeddings: tuple[Float[Array, "B *N C"], ...]
    positions: tuple[Float[Array, "B N 3"], ...] | None
    point_masks: tuple[Bool[Array, "B *N"] | None, ...]
    global_embedding: Float[Array, "B G C_g"] | None
    geometry: Float[Array, "B *M C_geo"] | None
    geometry_mask: Bool[Array, "B *M"] | None
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


def widths(name: str, value: int | Sequence[int]) -> tuple[int, ...]:
    """One width or several, as a tuple.

    Raises:
        ValueError: something else.
    """
    given = [value] if isinstance(value, Integral) else value
    valid = isinstance(given, Sequence) and not isinstance(given, str | bytes) and len(given)
    if not valid or not all(isinstance(width, Integral) and width >= 1 for width in given):
        raise ValueError(f"{name}: expected a positive integer, or one a stream; got {value!r}")
    return tuple(int(width) for width in given)


def check_inputs(
    model,
    local_embedding,
    local_positions,
    global_embedding,
    geometry,
    point_mask,
    geometry_mask,
    neighborhoods,
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
    _check_source("geometry", geometry, model.geometry_dim, "geometry_dim")
    _check_source("global_embedding", global_embedding, model.global_dim, "global_dim")
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
        padded = geometry_mask is not None
        of_geometry = check_points("geometry", geometry, model.geometry_dim, grid, padded=padded)
        _check_batch("geometry", geometry, batch)
        check_mask("geometry_mask", geometry_mask, batch, of_geometry)
    elif geometry_mask is not None:
        raise ValueError("geometry_mask: expected None without a geometry; got one")
    if global_embedding is not None:
        of_globals = check_points(
            "global_embedding", global_embedding, model.global_dim, None, padded=False
        )
        _check_batch("global_embedding", global_embedding, batch)

    positions, found = None, None
    if model.include_local_features:
        positions = _positions(local_positions, local_embedding, layouts, masks, batch)
        if geometry is None:
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


def check_finite(name: str, x: jax.Array | np.ndarray, mask) -> None:
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


def pad_neighborhoods(found: Neighborhoods, points: PointLayout, geometry: PointLayout):
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


def _streams(name: str, value, count: int) -> tuple:
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


def _name(name: str, i: int, value) -> str:
    return name if hasattr(value, "ndim") else f"{name}[{i}]"


def _check_source(name: str, value, width: int | None, option: str) -> None:
    if value is not None and width is None:
        raise ValueError(f"{name}: expected None, since {option}=None; got an array")


def _check_batch(name: str, x, batch: int) -> None:
    if x.shape[0] != batch:
        raise ValueError(
            f"{name}: expected {batch} samples, as in local_embedding; got shape {tuple(x.shape)}"
        )


def _positions(local_positions, local_embedding, layouts, masks, batch: int) -> tuple:
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


def _neighborhoods(model, neighborhoods, layouts, of_geometry, batch: int) -> tuple:
    single = isinstance(neighborhoods, Neighborhoods)
    found = (neighborhoods,) if single else tuple(neighborhoods)
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
