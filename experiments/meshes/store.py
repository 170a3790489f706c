"""Samples of simulations in a Zarr store: one group a sample, arrays along its points.

The names are those that users of PhysicsNeMo have in their stores: `surface_mesh_centers`,
`surface_normals`, `surface_areas`, `surface_fields`, `volume_mesh_centers`, `volume_fields`,
`stl_coordinates`, `stl_centers`, `stl_faces`, `stl_areas`, and `air_density` and `stream_velocity`
as arrays or attributes. A folder of such groups reads as a store, too, in Zarr's formats 2 and 3.

A sample is written under another name and renamed, so that it is there whole or not at all. Arrays
are cut into small chunks inside large files: a reader fetches what it asks for and little more.
"""

import glob
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any, Protocol

import numpy as np
import zarr
from jaxtyping import Float64, Shaped

from experiments.cli import one_line
from experiments.meshes.groups import open_group, require_memory

_CHUNK_POINTS = 2**13
_CHUNKS_A_FILE = 2**7
# Without the checksum, which Zarr leaves out, a damaged chunk may come out as other numbers.
_CODEC = zarr.codecs.ZstdCodec(level=0, checksum=True)
# Made of a volume and an STL.
DISTANCES = ("volume_signed_distance", "volume_direction")
_PARTIAL = ".partial-"
_COMPLETE = "complete"


class Arrays(Protocol):
    """The arrays and numbers of one sample, in a store or in memory."""

    @property
    def path(self) -> Path:
        """Where they come from, for messages."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays, in order."""

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Names of the fields' columns, and numbers."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an array."""

    def dtype(self, name: str) -> np.dtype:
        """Type of an array."""

    def read(self, name: str, rows: slice = slice(None)) -> Shaped[np.ndarray, "n *C"]:
        """Rows of an array."""

    def read_rows(self, name: str, rows: Shaped[np.ndarray, " n"]) -> Shaped[np.ndarray, "n *C"]:
        """Rows of an array by their numbers."""

    def numbers(self, name: str) -> Float64[np.ndarray, " k"]:
        """Numbers of the whole sample."""

    def number(self, name: str) -> float:
        """A number of the whole sample."""


class StoredSample:
    """One sample of a store; arrays are read when asked for.

    Attributes:
        name: of the sample.
        path: of its group.
    """

    def __init__(self, path: Path):
        """Opens a group.

        Raises:
            ValueError: it is no readable group, see `groups.open_group`, is still being written, or
                is empty.
        """
        self.path, self.name = Path(path), Path(path).name.removesuffix(".zarr")
        try:
            attributes, self._arrays = open_group(Path(path))
        except Exception as error:  # damaged metadata reaches many decoders
            raise ValueError(f"{path}: expected a Zarr group; got {one_line(error)}") from error
        if attributes.get(_COMPLETE) is False:
            raise ValueError(f"{path}: expected a whole sample; got one still being written")
        if not self._arrays:
            raise ValueError(f"{path}: expected a group with arrays; got an empty one")
        self.attributes: dict[str, Any] = attributes

    @staticmethod
    def is_one(path: Path) -> bool:
        """Whether a folder of a store is a sample, whole or not."""
        return not path.name.startswith(".") and path.is_dir() and _is_group(path)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple(sorted(self._arrays))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an array.

        Raises:
            ValueError: the sample has no such array.
        """
        return self._array(name).shape

    def dtype(self, name: str) -> np.dtype:
        """Type of an array.

        Raises:
            ValueError: the sample has no such array.
        """
        return self._array(name).dtype

    def read(self, name: str, rows: slice = slice(None)) -> Shaped[np.ndarray, "n *C"]:
        """Rows of an array.

        Raises:
            ValueError: the sample has no such array, or it cannot be read.
        """
        return self._decoded(name, rows, lambda array: array[rows])

    def read_rows(self, name: str, rows: Shaped[np.ndarray, " n"]) -> Shaped[np.ndarray, "n *C"]:
        """Rows of an array by their numbers, in any order; of chunks only those that hold some.

        Raises:
            ValueError: see `read`.
        """
        order = np.argsort(rows, kind="stable")
        selection = (np.asarray(rows)[order],)
        values = self._decoded(
            name, selection[0], lambda array: array.get_orthogonal_selection(selection)
        )
        result = np.empty_like(values)
        result[order] = values
        return result

    def numbers(self, name: str) -> Float64[np.ndarray, " k"]:
        """Numbers of the whole sample, a small array or an attribute.

        Raises:
            ValueError: there are none of this name, or they are no finite numbers.
        """
        if name in self._arrays:
            values = self._decoded(name, slice(None), lambda array: array[...])
        elif name in self.attributes:
            values = self.attributes[name]
        else:
            raise ValueError(
                f"{self.path}: expected {name!r} as an array or an attribute; has arrays "
                f"{', '.join(self.names)} and attributes {', '.join(self.attributes) or 'none'}"
            )
        return _finite(self, name, values)

    def number(self, name: str) -> float:
        """The one number of this name.

        Raises:
            ValueError: see `numbers`; or there are several.
        """
        return one_number(self, name)

    def _decoded(
        self, name: str, rows: slice | np.ndarray, read: Callable[[zarr.Array], Any]
    ) -> np.ndarray:
        array = self._array(name)
        try:
            require_memory(array, rows)
            return np.asarray(read(array))
        except Exception as error:  # damaged chunks reach many decoders
            raise ValueError(
                f"{self.path}: array {name!r}: expected readable values; got {one_line(error)}"
            ) from error

    def _array(self, name: str) -> zarr.Array:
        if name not in self._arrays:
            raise ValueError(
                f"{self.path}: expected an array {name!r}{_source(name)}; has "
                f"{', '.join(self.names)}"
            )
        return self._arrays[name]


class HeldSample:
    """Arrays in memory, read like those of a store.

    Attributes:
        path: where they come from, for messages.
        attributes: names of the fields' columns, and numbers.
    """

    def __init__(self, path: Path, arrays: Mapping[str, np.ndarray], attributes: Mapping[str, Any]):
        """Keeps them as they are."""
        self.path, self.attributes, self._held = path, attributes, dict(arrays)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple(sorted(self._held))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an array.

        Raises:
            ValueError: there is no such array.
        """
        return self._array(name).shape

    def dtype(self, name: str) -> np.dtype:
        """Type of an array.

        Raises:
            ValueError: there is no such array.
        """
        return self._array(name).dtype

    def read(self, name: str, rows: slice = slice(None)) -> Shaped[np.ndarray, "n *C"]:
        """Rows of an array."""
        return self._array(name)[rows]

    def read_rows(self, name: str, rows: Shaped[np.ndarray, " n"]) -> Shaped[np.ndarray, "n *C"]:
        """Rows of an array by their numbers."""
        return self._array(name)[rows]

    def numbers(self, name: str) -> Float64[np.ndarray, " k"]:
        """Numbers of the whole sample, a small array or an attribute.

        Raises:
            ValueError: there are none of this name, or they are no finite numbers.
        """
        if name not in self._held and name not in self.attributes:
            raise ValueError(
                f"{self.path}: expected a number {name!r}; has "
                f"{', '.join((*self.names, *self.attributes)) or 'none'}"
            )
        source = self._held if name in self._held else self.attributes
        return _finite(self, name, source[name])

    def number(self, name: str) -> float:
        """The one number of this name."""
        return one_number(self, name)

    def _array(self, name: str) -> np.ndarray:
        if name not in self._held:
            raise ValueError(
                f"{self.path}: expected an array {name!r}{_source(name)}; has "
                f"{', '.join(self.names) or 'none'}"
            )
        return self._held[name]


def _source(name: str) -> str:
    """Where arrays come from that no field of a file is."""
    if name.startswith("stl_"):
        return " (of an STL file)"
    return " (of an STL file beside the volume)" if name in DISTANCES else ""


def one_number(arrays: Arrays, name: str) -> float:
    """The one number of this name.

    Raises:
        ValueError: there are several, or none.
    """
    values = arrays.numbers(name)
    if values.size != 1:
        raise ValueError(
            f"{arrays.path}: {name!r}: expected one finite number; got {values.size} of them"
        )
    return float(values[0])


def _finite(arrays: Arrays, name: str, given: Any) -> Float64[np.ndarray, " k"]:
    try:
        values = np.ravel(given)
    except ValueError:  # lists of different length
        values = np.empty(0)
    if not values.size or values.dtype.kind not in "fiu" or not np.isfinite(values).all():
        text = repr(given.tolist() if isinstance(given, np.ndarray) else given)
        raise ValueError(
            f"{arrays.path}: {name!r}: expected finite numbers; got {shorten(text, 60)}"
        )
    return values.astype(np.float64)


class Store:
    """A folder of samples.

    Attributes:
        path: of the folder.
    """

    def __init__(self, path: Path):
        """Lists the samples.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: it holds no samples.
        """
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"{path}: expected a store; there is no such folder")
        self._paths = {
            child.name.removesuffix(".zarr"): child
            for child in sorted(self.path.iterdir())
            if child.is_dir() and _is_group(child) and not child.name.startswith(".")
        }
        if not self._paths:
            raise ValueError(f"{path}: expected a store with one group a sample; got none")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the samples in order."""
        return tuple(self._paths)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._paths)

    def __iter__(self) -> Iterator[StoredSample]:
        """The samples in order."""
        return map(self.sample, self._paths)

    def sample(self, name: str) -> StoredSample:
        """A sample.

        Raises:
            ValueError: there is none of this name; see also `StoredSample`.
        """
        if name not in self._paths:
            raise ValueError(
                f"{self.path}: expected a sample {name!r}; has {len(self)}, from "
                f"{self.names[0]} to {self.names[-1]}"
            )
        return StoredSample(self._paths[name])


def _is_group(path: Path) -> bool:
    return any((path / name).is_file() for name in ("zarr.json", ".zgroup"))


def create_store(path: Path) -> None:
    """Makes an empty store, or leaves one as it is.

    Raises:
        ValueError: the folder holds something else, or cannot be made.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not _is_group(path))):
        raise ValueError(f"{path}: expected a store or an empty folder; got something else")
    try:
        zarr.open_group(path, mode="a")
    except OSError as error:
        raise ValueError(
            f"{path}: expected a folder that can be made; got {error.strerror}"
        ) from error


def write_sample(
    store: Path,
    name: str,
    arrays: Mapping[str, Shaped[np.ndarray, "..."]],
    attributes: Mapping[str, Any],
) -> None:
    """Writes a sample, which appears under its name only when whole; one of that name goes.

    Args:
        store: an existing store.
        name: of the sample.
        arrays: by their names; the first axis is cut into chunks.
        attributes: what JSON can hold.

    Raises:
        OSError: the disk is full, say; the store is as it was.
    """
    remove_partial(store, name)
    partial = Path(store) / f"{_PARTIAL}{name}-{uuid.uuid4().hex}"
    try:
        group = zarr.open_group(partial, mode="w-")
        group.attrs.update({**attributes, _COMPLETE: False})
        for array_name, values in arrays.items():
            _write_array(group, array_name, np.asarray(values))
        group.attrs[_COMPLETE] = True
        final = Path(store) / name
        if final.exists():
            final.rename(Path(store) / f"{_PARTIAL}{name}-{uuid.uuid4().hex}")
        partial.rename(final)
    finally:
        remove_partial(store, name)


def remove_partial(store: Path, name: str) -> None:
    """Removes what an interrupted writer of a sample has left."""
    for left in Path(store).glob(f"{_PARTIAL}{glob.escape(name)}-" + "[0-9a-f]" * 32):
        shutil.rmtree(left, ignore_errors=True)


def _write_array(group: zarr.Group, name: str, values: np.ndarray) -> None:
    # VTK's integers are of another C type of the same size, which Zarr does not know.
    if values.dtype.kind in "iu":
        values = values.astype(values.dtype.str)
    # A reader takes a lost file for one of nothing but fills, which zeros would hide.
    fill = np.nan if values.dtype.kind == "f" else 0
    if values.ndim == 0 or len(values) <= _CHUNK_POINTS:
        group.create_array(name, data=values, fill_value=fill, compressors=_CODEC)
        return
    rest = values.shape[1:]
    files = min(_CHUNKS_A_FILE, -(-len(values) // _CHUNK_POINTS))
    array = group.create_array(
        name,
        shape=values.shape,
        dtype=values.dtype,
        chunks=(_CHUNK_POINTS, *rest),
        shards=(files * _CHUNK_POINTS, *rest),
        fill_value=fill,
        compressors=_CODEC,
    )
    array[:] = values
