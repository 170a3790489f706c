"""The samples of a folder of simulation files, and what of each goes into a store."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cli import one_line
from experiments.meshes import files

# Numbers of a sample may stand beside its files.
PARAMETERS = "parameters.json"


@dataclass(frozen=True)
class Source:
    """Files of one sample.

    Attributes:
        name: of the sample.
        meshes: surfaces and volumes with fields.
        geometry: STL files.
        parameters: file of its numbers, or `None`.
    """

    name: str
    meshes: tuple[Path, ...]
    geometry: tuple[Path, ...] = ()
    parameters: Path | None = None

    def signature(self) -> list[list[Any]]:
        """What tells whether a file has changed: its name, size and time of change."""
        paths = [*self.meshes, *self.geometry]
        paths += [] if self.parameters is None else [self.parameters]
        return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]


def find_samples(folder: Path) -> list[Source]:
    """The samples of a folder: one a subfolder that holds mesh files, or one a file name.

    Files of one name and different endings, as `7.vtp` and `7.stl`, belong together.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds no mesh files.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: expected a folder of simulation files; there is none")
    groups: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            # Blocks of a .vtm lie in a folder beside it, which is none of a sample's own.
            if not path.with_suffix(".vtm").is_file():
                groups.setdefault(path.name, []).extend(sorted(path.iterdir()))
        else:
            groups.setdefault(path.stem, []).append(path)
    sources = [_source(name, paths) for name, paths in groups.items()]
    sources = [source for source in sources if source.meshes or source.geometry]
    if not sources:
        raise ValueError(
            f"{folder}: expected files ending in one of {', '.join(files.MESH_ENDINGS)}; got none"
        )
    return sources


def _source(name: str, paths: Sequence[Path]) -> Source:
    known = [path for path in paths if path.suffix.lower() in files.MESH_ENDINGS]
    parameters = [path for path in paths if path.name in (PARAMETERS, f"{name}.json")]
    return Source(
        name,
        tuple(path for path in known if path.suffix.lower() != ".stl"),
        tuple(path for path in known if path.suffix.lower() == ".stl"),
        parameters[0] if parameters else None,
    )


@dataclass
class Contents:
    """What a sample held.

    Attributes:
        arrays: by the names of the store.
        attributes: names of the fields' columns, and the numbers of the sample.
    """

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)


def read_sample(
    source: Source,
    surface_fields: Sequence[str] | None = None,
    volume_fields: Sequence[str] | None = None,
) -> Contents:
    """Reads the files of a sample.

    Several surfaces, the patches of a body say, become one; so do several volumes.

    Args:
        source: the files.
        surface_fields: names of the fields of surfaces, in order; by default all.
        volume_fields: likewise of volumes.

    Raises:
        ValueError: a file cannot be read, lacks a field, has a value that is not finite, or has
            other fields than one of its kind; see `experiments.meshes.files`.
    """
    contents = Contents()
    surfaces, volumes = [], []
    for path in source.meshes:
        mesh = files.read_mesh(path)
        if files.is_volume(mesh):
            volumes.append((path, files.sample_volume(path, mesh, volume_fields)))
        else:
            surfaces.append((path, files.sample_surface(path, mesh, surface_fields)))
    if surfaces:
        _put(contents, "surface", surfaces)
        contents.arrays["surface_normals"] = np.concatenate([s.normals for _, s in surfaces])
        contents.arrays["surface_areas"] = np.concatenate([s.sizes for _, s in surfaces])
    if volumes:
        _put(contents, "volume", volumes)
        contents.arrays["volume_sizes"] = np.concatenate([v.sizes for _, v in volumes])
    if source.geometry:
        _put_geometry(contents, [files.read_geometry(path) for path in source.geometry])
    contents.attributes |= _numbers(source.parameters)
    return contents


def _put(contents: Contents, kind: str, sampled: list[tuple[Path, files.Sampled]]) -> None:
    first_path, first = sampled[0]
    for path, other in sampled[1:]:
        if other.names != first.names:
            raise ValueError(
                f"{path}: expected the fields of {first_path.name}, {', '.join(first.names)}; "
                f"got {', '.join(other.names) or 'none'}"
            )
    contents.arrays[f"{kind}_mesh_centers"] = np.concatenate([s.positions for _, s in sampled])
    contents.arrays[f"{kind}_fields"] = np.concatenate([s.fields for _, s in sampled])
    contents.attributes[f"{kind}_field_names"] = list(first.names)


def _put_geometry(contents: Contents, parts: list[files.Geometry]) -> None:
    first = np.cumsum([0, *(len(part.coordinates) for part in parts)])
    faces = [part.faces + start for part, start in zip(parts, first, strict=False)]
    contents.arrays |= {
        "stl_coordinates": np.concatenate([part.coordinates for part in parts]),
        "stl_faces": np.concatenate(faces).astype(np.int64).reshape(-1),
        "stl_centers": np.concatenate([part.centers for part in parts]),
        "stl_areas": np.concatenate([part.areas for part in parts]),
    }


def _numbers(path: Path | None) -> dict[str, float]:
    if path is None:
        return {}
    try:
        numbers = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{path}: expected a JSON file of numbers; got {one_line(error)}"
        ) from error
    if not isinstance(numbers, dict):
        raise ValueError(f"{path}: expected names and numbers; got {type(numbers).__name__}")
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise ValueError(f"{path}: {name!r}: expected a finite number; got {value!r}")
    return {name: float(value) for name, value in numbers.items()}
