"""Variables of MATLAB files: arrays of numbers alone, whose size is known before they are read."""

import math
import struct
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.io
from jaxtyping import Shaped
from scipy.io.matlab import matfile_version

from experiments.formats.hdf5_files import require_chunks, require_own_values
from experiments.formats.limits import inflates_within, machine_memory

_BYTES = {"single": 4, "double": 8, "logical": 1} | {
    f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)
}
_COMPLEX = 2
# MAT-File Format, level 5: the header, and the type of an element that zlib has packed.
_HEADER, _PACKED = 128, 15


def read_variable(path: Path, name: str) -> Shaped[np.ndarray, "..."]:
    """A variable of a MATLAB file, v4, v5 or v7.3, whole.

    Raises:
        ValueError: the file cannot be read, has no such variable, or one that is no array of
            numbers, or takes more memory than there is.
    """
    try:
        names, values = (_read_hdf5 if h5py.is_hdf5(path) else _read_own)(path, name)
    except Exception as error:  # damaged bytes reach many decoders, each with errors of its own
        raise ValueError(
            f"{path}: expected a readable MATLAB v5 or v7.3 file, got {error!r}"
        ) from error
    if values is None:
        raise ValueError(f"{path}: expected a variable {name!r}, got {names}")
    return np.asarray(values)


def _read_hdf5(path: Path, name: str) -> tuple[list[str], Any]:
    with h5py.File(path, "r") as file:
        names = sorted(file)
        if name not in names:
            return names, None
        if not isinstance(file.get(name, getlink=True), h5py.HardLink):
            raise ValueError(f"variable {name!r} in another file")
        dataset = file[name]
        if not isinstance(dataset, h5py.Dataset) or dataset.dtype.kind not in "fiubcVS":
            raise ValueError(f"variable {name!r} that is no array of numbers")
        require_own_values(name, dataset)
        _require_room(name, dataset.size * dataset.dtype.itemsize)
        require_chunks(name, dataset)
        # v7.3 keeps MATLAB's column-major bytes, so HDF5 sees the axes reversed.
        return names, dataset[()].T


def _read_own(path: Path, name: str) -> tuple[list[str], Any]:
    """A variable of the formats that are MATLAB's own."""
    variables = scipy.io.whosmat(path)
    for place, (other, shape, kind) in enumerate(variables):
        if other != name:
            continue
        if kind not in _BYTES:
            raise ValueError(f"variable {name!r} of kind {kind}")
        needed = math.prod(shape) * _BYTES[kind] * _COMPLEX
        _require_room(name, needed)
        if matfile_version(path)[0] == 1 and not _unpacks_within(path, place, needed):
            raise ValueError(f"variable {name!r} that unpacks to more than its {shape} values")
    values = scipy.io.loadmat(path, variable_names=[name]).get(name)
    return sorted(variable[0] for variable in variables), values


def _require_room(name: str, needed: int) -> None:
    if needed > machine_memory():
        raise ValueError(f"variable {name!r} of {needed} bytes")


def _unpacks_within(path: Path, place: int, most: int) -> bool:
    """Whether no more bytes come out of a variable, by its place in a file of v5."""
    with path.open("rb") as file:
        file.seek(_HEADER - 2)
        order = "<" if file.read(2) == b"IM" else ">"
        for _ in range(place):
            _, length = struct.unpack(f"{order}2I", file.read(8))
            file.seek(length, 1)
        kind, length = struct.unpack(f"{order}2I", file.read(8))
        return kind != _PACKED or inflates_within(file.read(length), most)
