"""The samples of a folder of simulation files, and what of each goes into a store."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyvista

from experiments.formats.limits import read_json
from experiments.meshes import files, sampling
from experiments.meshes.arrays import ARRAY_ENDINGS, read_arrays
from experiments.meshes.features import signed_distance

# Numbers of a sample may stand beside its files.
PARAMETERS = "parameters.json"
ENDINGS = (*files.MESH_ENDINGS, *ARRAY_ENDINGS)
# Attributes of a store that are no numbers of a sample.
RESERVED = ("source", "options", "summary", "complete", "shuffled")
# Arrays of these kinds have one row a point, and go through one order.
_KINDS = ("surface", "volume", "stl")
_NOT_OF_POINTS = ("stl_coordinates",)


@dataclass(frozen=True)
class Source:
    """Files of one sample.

    Attributes:
        name: of the sample.
        meshes: surfaces and volumes with fields.
        geometry: STL files.
        parameters: file of its numbers, or `None`.
        arrays: files of arrays that have the names of a store.
    """

    name: str
    meshes: tuple[Path, ...] = ()
    geometry: tuple[Path, ...] = ()
    parameters: Path | None = None
    arrays: tuple[Path, ...] = ()

    @classmethod
    def of(cls, name: str, paths: Sequence[Path]) -> "Source":
        """The files among some paths, by their endings."""
        ending = {path: path.suffix.lower() for path in paths}
        parameters = [path for path in paths if path.name in (PARAMETERS, f"{name}.json")]
        return cls(
            name,
            tuple(
                path
                for path in paths
                if ending[path] in files.MESH_ENDINGS and ending[path] != ".stl"
            ),
            tuple(path for path in paths if ending[path] == ".stl"),
            parameters[0] if parameters else None,
            tuple(path for path in paths if ending[path] in ARRAY_ENDINGS),
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read."""
        return not (self.meshes or self.geometry or self.arrays)

    def signature(self) -> list[list[Any]]:
        """What tells whether a file has changed: its name, size and time of change."""
        paths = [*self.meshes, *self.geometry, *self.arrays]
        paths += [] if self.parameters is None else [self.parameters]
        for path in self.meshes:
            if path.suffix.lower() == ".vtm":
                blocks = path.with_suffix("").rglob("*")
                paths += sorted(block for block in blocks if block.is_file())
        return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]


def find_samples(folder: Path) -> list[Source]:
    """The samples of a folder: one a subfolder that holds files of samples, or one a file name.

    Files of one name and different endings, as `7.vtp` and `7.stl`, belong together.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds no such files, or is a file itself.
    """
    folder = Path(folder)
    if folder.is_file():
        raise ValueError(f"{folder}: expected a folder of simulation files; got a file")
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
    sources = [Source.of(name, paths) for name, paths in groups.items()]
    sources = [source for source in sources if not source.is_empty]
    if not sources:
        raise ValueError(
            f"{folder}: expected files ending in one of {', '.join(ENDINGS)}; got none"
        )
    return sources


@dataclass(frozen=True)
class Part:
    """One mesh of a sample.

    Attributes:
        path: of its file.
        mesh: as it was sampled: a surface is one of polygons.
        sampled: where its fields lie.
    """

    path: Path
    mesh: pyvista.DataSet
    sampled: sampling.Sampled


@dataclass(frozen=True)
class Known:
    """What is known of the meshes of a kind; one of them may lack fields.

    Attributes:
        columns: of their fields.
        on_cells: whether their fields lie on cells. A mesh that lacks some is sampled there as
            well, one that has all of them where they lie.
    """

    columns: tuple[str, ...]
    on_cells: bool


@dataclass
class Contents:
    """What a sample held.

    Attributes:
        arrays: by the names of the store.
        attributes: names of the fields' columns, where they lie, and the numbers of the sample.
        parts: meshes of each kind, `surface` and `volume`, in the order of their rows.
    """

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, list[Part]] = field(default_factory=dict)

    def shuffle(self, seed: int) -> None:
        """Puts the points of each kind into a random order.

        Any run of rows then is a random subset, which can be read without the rest.
        """
        generator = np.random.default_rng(seed)
        shuffled = []
        for kind in _KINDS:
            names = [
                array
                for array in self.arrays
                if array.startswith(f"{kind}_") and array not in _NOT_OF_POINTS
            ]
            # Three corners a triangle stand one after another.
            rows = {len(self.arrays[name]) / (3 if name == "stl_faces" else 1) for name in names}
            if len(rows) != 1:
                continue
            order = generator.permutation(int(rows.pop()))
            for name in names:
                values = self.arrays[name]
                split = values.reshape(len(order), -1) if name == "stl_faces" else values
                self.arrays[name] = split[order].reshape(values.shape)
            shuffled.append(kind)
        self.attributes["shuffled"] = shuffled


def read_sample(
    source: Source,
    surface_fields: Sequence[str] | None = None,
    volume_fields: Sequence[str] | None = None,
    *,
    known: Mapping[str, Known] = MappingProxyType({}),
    distances: bool = True,
) -> Contents:
    """Reads the files of a sample.

    Several surfaces, the patches of a body say, become one; so do several volumes.

    Args:
        source: the files.
        surface_fields: names of the fields of surfaces, in order; by default all.
        volume_fields: likewise of volumes.
        known: by kind, `surface` or `volume`: take what of this a mesh has instead.
        distances: compute signed distances of a volume's points from the STL, where there is one.

    Raises:
        ValueError: a file cannot be read, lacks a field, has a value that is not finite, or has
            other fields than one of its kind; see `files` and `sampling`.
    """
    contents = Contents()
    for path in source.meshes:
        mesh = files.read_mesh(path)
        kind = "volume" if files.is_volume(mesh) else "surface"
        mesh = mesh if kind == "volume" else files.surface_of(mesh)
        sample = sampling.sample_volume if kind == "volume" else sampling.sample_surface
        if kind in known:
            there, complete = sampling.fields_of(mesh, known[kind].columns)
            sampled = sample(path, mesh, there, on_cells=known[kind].on_cells, stay=not complete)
        else:
            sampled = sample(path, mesh, volume_fields if kind == "volume" else surface_fields)
        contents.parts.setdefault(kind, []).append(Part(path, mesh, sampled))
    for kind, parts in contents.parts.items():
        _put(contents, kind, parts)
    if source.geometry:
        _put_geometry(contents, [files.read_geometry(path) for path in source.geometry])
    if distances and "volume" in contents.parts and source.geometry:
        distance, direction = signed_distance(
            contents.arrays["stl_coordinates"],
            contents.arrays["stl_faces"].reshape(-1, 3),
            contents.arrays["volume_mesh_centers"],
        )
        contents.arrays |= {"volume_signed_distance": distance, "volume_direction": direction}
    for path in source.arrays:
        _put_arrays(contents, path)
    if source.arrays:
        _require_rows(source.name, contents)
    contents.attributes |= _numbers(source.parameters)
    return contents


def _put(contents: Contents, kind: str, parts: list[Part]) -> None:
    sampled = [part.sampled for part in parts]
    for part in parts[1:]:
        if part.sampled.names != sampled[0].names:
            expected, got = (", ".join(s.names) or "none" for s in (sampled[0], part.sampled))
            raise ValueError(
                f"{part.path}: expected the fields of {parts[0].path.name}, {expected}; got {got}"
            )
    contents.arrays[f"{kind}_mesh_centers"] = np.concatenate([s.positions for s in sampled])
    contents.arrays[f"{kind}_fields"] = np.concatenate([s.fields for s in sampled])
    contents.attributes[f"{kind}_field_names"] = list(sampled[0].names)
    contents.attributes[f"{kind}_on_cells"] = all(s.on_cells for s in sampled)
    sizes = np.concatenate([s.sizes for s in sampled])
    if kind == "surface":
        contents.arrays["surface_normals"] = np.concatenate([s.normals for s in sampled])
        contents.arrays["surface_areas"] = sizes
    else:
        contents.arrays["volume_sizes"] = sizes


def _put_geometry(contents: Contents, parts: list[files.Geometry]) -> None:
    first = np.cumsum([0, *(len(part.coordinates) for part in parts)])
    faces = [part.faces + start for part, start in zip(parts, first, strict=False)]
    contents.arrays |= {
        "stl_coordinates": np.concatenate([part.coordinates for part in parts]),
        "stl_faces": np.concatenate(faces).astype(np.int64).reshape(-1),
        "stl_centers": np.concatenate([part.centers for part in parts]),
        "stl_areas": np.concatenate([part.areas for part in parts]),
    }


def _put_arrays(contents: Contents, path: Path) -> None:
    arrays, numbers, names = read_arrays(path)
    for name in arrays:
        if name in contents.arrays:
            raise ValueError(f"{path}: array {name!r}: expected one of this name; got another")
    contents.arrays |= arrays
    contents.attributes |= numbers | names


def _require_rows(name: str, contents: Contents) -> None:
    """Refuses arrays of the points of one kind that differ in length."""
    for kind in ("surface", "volume"):
        arrays = [array for array in contents.arrays if array.startswith(f"{kind}_")]
        for array in arrays[1:]:
            rows, expected = (len(contents.arrays[other]) for other in (array, arrays[0]))
            if rows != expected:
                raise ValueError(
                    f"{name}: array {array!r}: expected {expected} rows, as in {arrays[0]!r}; "
                    f"got {rows}"
                )


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all numbers of a float
        return False


def _numbers(path: Path | None) -> dict[str, float]:
    if path is None:
        return {}
    numbers = read_json(path, "a JSON file of numbers")
    if not isinstance(numbers, dict):
        raise ValueError(f"{path}: expected names and numbers; got {type(numbers).__name__}")
    for name, value in numbers.items():
        if name in RESERVED or name.endswith("_field_names"):
            raise ValueError(f"{path}: {name!r}: expected another name; the store uses this one")
        if not _is_finite(value):
            shown = repr(value) if len(repr(value)) < 100 else f"{repr(value)[:100]}..."
            raise ValueError(f"{path}: {name!r}: expected a finite number; got {shown}")
    return {name: float(value) for name, value in numbers.items()}
