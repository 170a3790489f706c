"""One simulation file read by the library that knows its format.

A surface is a mesh of triangles or polygons, a volume one of three-dimensional cells or of points
alone.
"""

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyvista
from jaxtyping import Float32, Shaped
from vtkmodules.vtkCommonCore import vtkLogger

from experiments.meshes.declared import require_declared
from experiments.messages import one_line

MESH_ENDINGS = (".vtp", ".vtu", ".vtk", ".vts", ".vtm", ".stl")
_LONGEST_REASON = 200


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
    coordinates, centers, areas = (
        np.ascontiguousarray(values, np.float32)
        for values in (surface.points, corners.mean(1), areas)
    )
    return Geometry(coordinates, np.asarray(faces), centers, areas)
