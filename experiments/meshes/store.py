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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from jaxtyping import Shaped

from experiments.meshes.groups import is_group
from experiments.meshes.sample_arrays import COMPLETE, StoredSample

_CHUNK_POINTS = 2**13
_CHUNKS_A_FILE = 2**7
# Without the checksum, which Zarr leaves out, a damaged chunk may come out as other numbers.
_CODEC = zarr.codecs.ZstdCodec(level=0, checksum=True)
_PARTIAL = ".partial-"


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
            if StoredSample.is_one(child)
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


def create_store(path: Path) -> None:
    """Makes an empty store, or leaves one as it is.

    Raises:
        ValueError: the folder holds something else, or cannot be made.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not is_group(path))):
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
        group.attrs.update({**attributes, COMPLETE: False})
        for array_name, values in arrays.items():
            _write_array(group, array_name, np.asarray(values))
        group.attrs[COMPLETE] = True
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
