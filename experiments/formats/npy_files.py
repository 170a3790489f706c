"""Arrays in NumPy's files, `.npy` and `.npz`: sizes are known before any array is read.

A header says what follows it, and NumPy believes it. Here it is compared with the file first, so
that a damaged or hostile file takes no memory. Objects are never unpickled.
"""

import io
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from jaxtyping import Shaped

from experiments.formats.limits import require_room

_ENDING = ".npy"
_LONGEST_HEADER = 2**16


class Entry(NamedTuple):
    """An array that a file says it holds; only `read` takes memory for its values."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...] | None
    read: Callable[[], Any]

    @property
    def num_values(self) -> int:
        """How many it has; an empty data set of HDF5, which has no shape, has none."""
        return 0 if self.shape is None else math.prod(self.shape)


def npz_entries(archive: zipfile.ZipFile) -> list[Entry]:
    """What an archive says it holds.

    Raises:
        ValueError: a header is damaged.
    """
    members = [info for info in archive.infolist() if info.filename.endswith(_ENDING)]
    return [_member(archive, info) for info in members]


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Entry:
    return npy_entry(
        info.filename.removesuffix(_ENDING), lambda: archive.open(info), info.file_size
    )


def npy_entry(name: str, open_file: Callable[[], IO[bytes]], size: int) -> Entry:
    """What one array says it holds.

    Args:
        name: of the array.
        open_file: opens its bytes.
        size: number of these.

    Raises:
        ValueError: its header is damaged.
    """
    # NumPy would read a header of any length, up to 4 GB, before it refuses a long one.
    with open_file() as file:
        header = io.BytesIO(file.read(_LONGEST_HEADER))
    version = np.lib.format.read_magic(header)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(header)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(header)
    available, declared = size - header.tell(), math.prod(shape) * dtype.itemsize

    def read() -> np.ndarray:
        # NumPy takes memory for the shape in the header, whether or not the values follow.
        if available < declared:
            raise ValueError(f"{available} of the {declared} bytes of array {name!r}")
        with open_file() as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    return Entry(name, dtype, shape, read)


def read_npz(path: Path) -> dict[str, Shaped[np.ndarray, "..."]]:
    """All arrays of an archive, as they are.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds objects, or more than there is memory; other errors of damaged
            archives come as they are.
    """
    with zipfile.ZipFile(path) as archive:
        entries = npz_entries(archive)
        sizes = [entry.num_values * entry.dtype.itemsize for entry in entries]
        require_room(path, "arrays", sum(sizes))
        return {entry.name: entry.read() for entry in entries}
