"""One simulation file read by the library that knows its format.

A surface is a mesh of triangles or polygons, a volume one of three-dimensional cells or of points
alone. Fields lie on cells or on points; a mesh is sampled where they lie.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyvista
from jaxtyping import Float32, Shaped

from experiments.cli import one_line

MESH_ENDINGS = (".vtp", ".vtu", ".vtk", ".vts", ".vtm", ".stl")
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
        with path.open("rb"):
            pass
        # VTK says what is wrong in a log of its own, and hands out what it could read.
        with pyvista.VtkErrorCatcher(raise_errors=True):
            mesh = pyvista.read(path)
    except PermissionError as error:
        raise ValueError(f"{path}: expected a readable file; got {error.strerror}") from error
    except Exception as error:  # each reader has errors of its own
        raise ValueError(
            f"{path}: expected a readable {path.suffix} file; got {one_line(error)}"
        ) from error
    if isinstance(mesh, pyvista.MultiBlock):
        mesh = _one_mesh(path, mesh)
    if mesh.n_points == 0:
        raise ValueError(f"{path}: expected a mesh with points; got none")
    bad = int((~np.isfinite(mesh.points)).any(1).sum())
    if bad:
        raise ValueError(f"{path}: expected finite coordinates; got {bad} points that are not")
    return mesh


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
        return max(_dimension(kind) for kind in np.unique(mesh.celltypes)) in (0, 3)
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


def surface_of(mesh: pyvista.DataSet) -> pyvista.PolyData:
    """A surface as one of polygons."""
    if isinstance(mesh, pyvista.PolyData):
        return mesh
    return mesh.extract_surface(algorithm="dataset_surface")


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
        _float32(positions), columns, names, _float32(normals), _float32(sizes), on_cells
    )


def _shares_of_points(surface: pyvista.PolyData, areas: np.ndarray) -> np.ndarray:
    """To each corner of a face belongs an equal share of its area."""
    shares = np.zeros(surface.n_points)
    for faces, of_faces in _faces_of_one_length(surface, areas):
        np.add.at(shares, faces, (of_faces / faces.shape[1])[:, None])
    return shares


def _faces_of_one_length(surface: pyvista.PolyData, values: np.ndarray):
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
    on_cells, columns, names = _fields(path, mesh, fields, on_cells)
    if on_cells:
        positions = mesh.cell_centers().points
        sizes = mesh.compute_cell_sizes(length=False, area=False, volume=True).cell_data["Volume"]
    else:
        positions, sizes = mesh.points, np.zeros(mesh.n_points)
    return Sampled(_float32(positions), columns, names, None, _float32(sizes), on_cells)


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
            raise ValueError(
                f"{path}: expected a field {name!r}; has {', '.join(map(repr, there)) or 'none'}"
            )
    if wanted:
        on_cells = any(there[name] == "cells" for name in wanted)
    if on_cells and any(there[name] == "points" for name in wanted):
        mesh = mesh.point_data_to_cell_data(pass_point_data=False)
    arrays = {
        name: np.asarray((mesh.cell_data if on_cells else mesh.point_data)[name]) for name in wanted
    }
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
    return np.concatenate(columns, axis=1), tuple(names)


def _float32(values) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32)
