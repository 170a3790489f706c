"""A mesh at the points where its fields lie: centres of cells, or its own points."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyvista
from jax.typing import ArrayLike
from jaxtyping import Float32

from experiments.meshes.files import surface_of

_AXES = ("x", "y", "z")


@dataclass(frozen=True)
class Sampled:
    """A mesh at the points where its fields lie.

    Attributes:
        positions: in the unit of the file.
        fields: one column a component.
        names: of the columns; those of a vector end in `_x`, `_y`, `_z`.
        normals: unit normals, of a surface alone.
        sizes: areas of a surface's points, volumes of those of a volume; zeros for a point cloud.
        on_cells: whether the points are the centres of cells, else those of the mesh.
    """

    positions: Float32[np.ndarray, "N 3"]
    fields: Float32[np.ndarray, "N C"]
    names: tuple[str, ...]
    normals: Float32[np.ndarray, "N 3"] | None
    sizes: Float32[np.ndarray, " N"]
    on_cells: bool


def field_names(mesh: pyvista.DataSet) -> dict[str, str]:
    """Names of the numeric fields of a mesh, and whether each lies on `cells` or `points`.

    In alphabetical order: that in a file depends on its format.
    """
    names = {}
    for where, arrays in (("points", mesh.point_data), ("cells", mesh.cell_data)):
        for name, values in arrays.items():
            if np.issubdtype(values.dtype, np.floating):
                names[name] = where
    return dict(sorted(names.items()))


def fields_of(mesh: pyvista.DataSet, columns: Sequence[str]) -> tuple[list[str], bool]:
    """The fields of a mesh that some columns are of, and whether it has all of these columns."""
    there, found, complete = field_names(mesh), [], True
    for column in columns:
        # A scalar, or a component of a vector.
        names = (column, column.rpartition("_")[0])
        own = [name for name in names if name in there or _integer_field(mesh, name)]
        found += own[:1]
        complete &= bool(own)
    return list(dict.fromkeys(found)), complete


def _integer_field(mesh: pyvista.DataSet, name: str) -> dict[str, str]:
    """Where a field of integers lies; such are mostly numbers of things, so taken by name alone."""
    for where, arrays in (("cells", mesh.cell_data), ("points", mesh.point_data)):
        if name in arrays and np.issubdtype(arrays[name].dtype, np.integer):
            return {name: where}
    return {}


def sample_surface(
    path: Path,
    mesh: pyvista.DataSet,
    fields: Sequence[str] | None,
    *,
    on_cells: bool = True,
    stay: bool = False,
) -> Sampled:
    """A surface where its fields lie, with normals and areas.

    Args:
        path: where it was read from, for messages.
        mesh: the surface, of triangles, polygons or both.
        fields: names of the fields in order; by default all.
        on_cells: where a mesh without fields is sampled: at its cells, or at its points.
        stay: sample there even if the fields that it has lie on points.

    Raises:
        ValueError: the surface has no faces, or a field is missing or not finite.
    """
    surface = surface_of(mesh)
    if surface.n_faces == 0:
        raise ValueError(f"{path}: expected a surface with faces; got none")
    surface = surface.compute_cell_sizes(length=False, area=True, volume=False)
    surface = surface.compute_normals(
        cell_normals=True,
        point_normals=True,
        split_vertices=False,
        consistent_normals=False,
        auto_orient_normals=False,
    )
    on_cells, columns, names = _fields(path, surface, fields, on_cells, stay=stay)
    areas = np.asarray(surface.cell_data["Area"])
    if on_cells:
        positions = surface.cell_centers().points
        normals, sizes = surface.cell_data["Normals"], areas
    else:
        positions, normals = surface.points, surface.point_data["Normals"]
        sizes = _shares_of_points(surface, areas)
    return Sampled(
        _positions(path, positions),
        columns,
        names,
        _float32(normals),
        _float32(sizes),
        on_cells,
    )


def _shares_of_points(surface: pyvista.PolyData, areas: np.ndarray) -> np.ndarray:
    """To each corner of a face belongs an equal share of its area."""
    shares = np.zeros(surface.n_points)
    for faces, of_faces in _faces_of_one_length(surface, areas):
        np.add.at(shares, faces, (of_faces / faces.shape[1])[:, None])
    return shares


def _faces_of_one_length(
    surface: pyvista.PolyData, values: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Corners `(F, k)` of the faces of k corners, with the values of these, for every k."""
    offsets = np.asarray(surface.GetPolys().GetOffsetsArray())
    corners = np.asarray(surface.GetPolys().GetConnectivityArray())
    lengths = np.diff(offsets)
    for length in np.unique(lengths):
        chosen = np.flatnonzero(lengths == length)
        yield corners[offsets[chosen][:, None] + np.arange(length)], values[chosen]


def sample_volume(
    path: Path,
    mesh: pyvista.DataSet,
    fields: Sequence[str] | None,
    *,
    on_cells: bool = True,
    stay: bool = False,
) -> Sampled:
    """A volume where its fields lie, with the volumes of its cells; arguments as `sample_surface`.

    Raises:
        ValueError: a field is missing or not finite.
    """
    on_cells, columns, names = _fields(path, mesh, fields, on_cells and mesh.n_cells > 0, stay=stay)
    if on_cells:
        positions = mesh.cell_centers().points
        sizes = mesh.compute_cell_sizes(length=False, area=False, volume=True).cell_data["Volume"]
    else:
        positions, sizes = mesh.points, np.zeros(mesh.n_points)
    return Sampled(_positions(path, positions), columns, names, None, _float32(sizes), on_cells)


def _fields(
    path: Path, mesh: pyvista.DataSet, fields: Sequence[str] | None, on_cells: bool, *, stay: bool
) -> tuple[bool, Float32[np.ndarray, "N C"], tuple[str, ...]]:
    """Whether a mesh is sampled at its cells, and its fields there.

    Where some of them lie on cells and some on points, those on points are averaged over the
    corners of each cell.
    """
    there = {
        name: where for name, where in field_names(mesh).items() if name not in ("Normals", "Area")
    }
    wanted = list(there) if fields is None else list(fields)
    for name in wanted:
        if name not in there:
            there |= _integer_field(mesh, name)
        if name not in there:
            raise ValueError(
                f"{path}: expected a field {name!r}; has {', '.join(map(repr, there)) or 'none'}"
            )
    if wanted:
        on_cells = (on_cells and stay) or any(there[name] == "cells" for name in wanted)
    averaged = mesh
    if on_cells and any(there[name] == "points" for name in wanted):
        averaged = mesh.point_data_to_cell_data(pass_point_data=False)
    of_points = averaged.cell_data if on_cells else mesh.point_data
    sources = {"points": of_points, "cells": mesh.cell_data}
    arrays = {name: np.asarray(sources[there[name]][name]) for name in wanted}
    columns, names = as_columns(path, arrays)
    count = mesh.n_cells if on_cells else mesh.n_points
    return on_cells, columns if names else np.zeros((count, 0), np.float32), names


def as_columns(
    where: Path, arrays: Mapping[str, np.ndarray]
) -> tuple[Float32[np.ndarray, "N C"], tuple[str, ...]]:
    """Arrays `(N,)` and `(N, k)` side by side in float32, and the names of the columns.

    Raises:
        ValueError: an array has a value that is not finite in float32, or another length.
    """
    columns, names, length = [], [], None
    for name, values in arrays.items():
        length = len(values) if length is None else length
        if len(values) != length:
            raise ValueError(
                f"{where}: field {name!r}: expected {length} values, as the others; "
                f"got {len(values)}"
            )
        with np.errstate(over="ignore"):  # found below, as infinity
            values = np.asarray(values).reshape(length, -1).astype(np.float32)
        bad = int((~np.isfinite(values)).any(1).sum())
        if bad:
            raise ValueError(
                f"{where}: field {name!r}: expected finite values; got {bad} that are not"
            )
        parts = values.shape[1]
        endings = _AXES if parts == 3 else range(parts)
        names += [name] if parts == 1 else [f"{name}_{ending}" for ending in endings]
        columns.append(values)
    if not columns:
        return np.zeros((0, 0), np.float32), ()
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{where}: field {twice!r}: expected one of this name; got several")
    return np.concatenate(columns, axis=1), tuple(names)


def _float32(values: ArrayLike) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32)


def _positions(path: Path, values: ArrayLike) -> np.ndarray:
    with np.errstate(over="ignore"):  # found here
        positions = _float32(values)
    bad = int((~np.isfinite(positions)).any(1).sum())
    if bad:
        raise ValueError(
            f"{path}: expected coordinates within float32; got {bad} points that are not"
        )
    return positions
