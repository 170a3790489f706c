"""One simulation file read by the library that knows its format.

A surface is a mesh of triangles or polygons, a volume one of three-dimensional cells or of points
alone. Fields lie on cells or on points; a mesh is sampled where they lie.
"""

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyvista
from jax.typing import ArrayLike
from jaxtyping import Float32, Shaped
from vtkmodules.vtkCommonCore import vtkLogger

from experiments.cli import one_line
from experiments.meshes.declared import require_declared

MESH_ENDINGS = (".vtp", ".vtu", ".vtk", ".vts", ".vtm", ".stl")
_AXES = ("x", "y", "z")
_LONGEST_REASON = 200


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


@dataclass(frozen=True)
class Geometry:
    """A triangulated surface.

    Attributes:
        coordinates: of its corners.
        faces: three corners a triangle.
        centers: of the triangles.
        areas: of the triangles.
    """

    coordinates: Float32[np.ndarray, "V 3"]
    faces: Shaped[np.ndarray, "F 3"]
    centers: Float32[np.ndarray, "F 3"]
    areas: Float32[np.ndarray, " F"]


def read_mesh(path: Path) -> pyvista.DataSet:
    """Reads a mesh file; the blocks of a `.vtm` become one mesh.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: its ending is none that is known, it cannot be read, or holds no points.
    """
    path = Path(path)
    if path.suffix.lower() not in MESH_ENDINGS:
        raise ValueError(
            f"{path}: expected a file ending in one of {', '.join(MESH_ENDINGS)}; "
            f"got {path.suffix or 'none'}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a mesh file; there is none")
    try:
        require_declared(path)
        # VTK says what is wrong in a log of its own, and hands out what it could read.
        with _quiet(), pyvista.VtkErrorCatcher(raise_errors=True):
            mesh = pyvista.read(path)
    except PermissionError as error:
        raise ValueError(f"{path}: expected a readable file; got {error.strerror}") from error
    except Exception as error:  # each reader has errors of its own
        raise ValueError(
            f"{path}: expected a readable {path.suffix} file; got {_reason(error)}"
        ) from error
    if isinstance(mesh, pyvista.MultiBlock):
        mesh = _one_mesh(path, mesh)
    if mesh.n_points == 0:
        raise ValueError(f"{path}: expected a mesh with points; got none")
    bad = int((~np.isfinite(mesh.points)).any(1).sum())
    if bad:
        raise ValueError(f"{path}: expected finite coordinates; got {bad} points that are not")
    return mesh


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What VTK has to say comes as an error; it would also print it, several times over."""
    root, disabled = logging.getLogger(), logging.getLogger().disabled
    verbosity = vtkLogger.GetCurrentVerbosityCutoff()
    vtkLogger.SetStderrVerbosity(vtkLogger.VERBOSITY_OFF)
    root.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.disabled = disabled
        vtkLogger.SetStderrVerbosity(verbosity)


def _reason(error: Exception) -> str:
    """An error of a reader without addresses in memory, and not longer than a line."""
    text = re.sub(r"\(0x[0-9a-f]+\)", "", one_line(error))
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


def _one_mesh(path: Path, blocks: pyvista.MultiBlock) -> pyvista.DataSet:
    parts = [
        part for part in blocks.recursive_iterator("blocks", skip_none=True) if part.n_points > 0
    ]
    if not parts:
        raise ValueError(f"{path}: expected blocks with points; got none")
    if len({is_volume(part) for part in parts}) > 1:
        raise ValueError(f"{path}: expected blocks of surfaces or of volumes; got both")
    return parts[0] if len(parts) == 1 else pyvista.merge(parts, merge_points=False)


def is_volume(mesh: pyvista.DataSet) -> bool:
    """Whether a mesh has three-dimensional cells, or no cells but single points."""
    if isinstance(mesh, pyvista.PolyData):
        return mesh.n_cells == mesh.n_verts
    if isinstance(mesh, pyvista.UnstructuredGrid):
        kinds = np.unique(mesh.celltypes)
        return max((_dimension(kind) for kind in kinds), default=0) in (0, 3)
    return mesh.n_cells > 0 and min(mesh.dimensions) > 1


def _dimension(cell_type: int) -> int:
    return pyvista.CellType(int(cell_type)).dimension


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


def _integer_field(mesh: pyvista.DataSet, name: str) -> dict[str, str]:
    """Where a field of integers lies; such are mostly numbers of things, so taken by name alone."""
    for where, arrays in (("cells", mesh.cell_data), ("points", mesh.point_data)):
        if name in arrays and np.issubdtype(arrays[name].dtype, np.integer):
            return {name: where}
    return {}


def surface_of(mesh: pyvista.DataSet) -> pyvista.PolyData:
    """A surface as one of polygons alone: strips are cut up, points and lines left out."""
    if not isinstance(mesh, pyvista.PolyData):
        return surface_of(mesh.extract_surface(algorithm="dataset_surface"))
    if mesh.n_strips:
        return surface_of(mesh.triangulate())
    first = mesh.n_verts + mesh.n_lines
    if not first or first == mesh.n_cells:
        return mesh
    surface = pyvista.PolyData(mesh.points, mesh.faces)
    surface.point_data.update(mesh.point_data)
    for name, values in mesh.cell_data.items():
        surface.cell_data[name] = np.array(values[first:])
    return surface


def sample_surface(
    path: Path,
    mesh: pyvista.DataSet,
    fields: Sequence[str] | None,
    *,
    on_cells: bool = True,
) -> Sampled:
    """A surface where its fields lie, with normals and areas.

    Args:
        path: where it was read from, for messages.
        mesh: the surface, of triangles, polygons or both.
        fields: names of the fields in order; by default all.
        on_cells: where a mesh without fields is sampled: at its cells, or at its points.

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
    on_cells, columns, names = _fields(path, surface, fields, on_cells)
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
) -> Sampled:
    """A volume where its fields lie, with the volumes of its cells; arguments as `sample_surface`.

    Raises:
        ValueError: a field is missing or not finite.
    """
    on_cells, columns, names = _fields(path, mesh, fields, on_cells and mesh.n_cells > 0)
    if on_cells:
        positions = mesh.cell_centers().points
        sizes = mesh.compute_cell_sizes(length=False, area=False, volume=True).cell_data["Volume"]
    else:
        positions, sizes = mesh.points, np.zeros(mesh.n_points)
    return Sampled(_positions(path, positions), columns, names, None, _float32(sizes), on_cells)


def read_geometry(path: Path) -> Geometry:
    """Reads a surface, of an STL file say, as triangles.

    Raises:
        ValueError: see `read_mesh`; or there is no triangle of any area.
    """
    mesh = read_mesh(path)
    surface = surface_of(mesh).triangulate()
    if surface.n_faces == 0:
        raise ValueError(f"{path}: expected a surface with triangles; got none")
    faces = surface.regular_faces
    corners = np.asarray(surface.points, np.float64)[faces]
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    areas = 0.5 * np.linalg.norm(normals, axis=1)
    if not areas.any():
        raise ValueError(f"{path}: expected triangles of some area; got {len(faces)} without")
    return Geometry(
        _float32(surface.points), np.asarray(faces), _float32(corners.mean(1)), _float32(areas)
    )


def _fields(
    path: Path, mesh: pyvista.DataSet, fields: Sequence[str] | None, on_cells: bool
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
        on_cells = any(there[name] == "cells" for name in wanted)
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
