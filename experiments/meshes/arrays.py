"""One simulation sample read from array files: NumPy's `.npz` and `.npy`, and HDF5.

What a file holds is told by the names of its arrays; those of `experiments.meshes.store` can be
stored as they are. A file says what it holds before any of it is read, so a damaged or hostile one
is refused before it takes memory; nothing of it is ever executed.
"""

import math
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from jaxtyping import Shaped

from experiments.formats.hdf5_files import require_chunks, require_own_values
from experiments.formats.limits import MOST_TEXT, machine_memory
from experiments.formats.npy_files import Entry, npy_entry, npz_entries
from experiments.messages import one_line

ARRAY_ENDINGS = (".npz", ".npy", ".h5", ".hdf5")

_FIELD_NAMES = "_field_names"
_LARGEST_INT64 = np.iinfo(np.int64).max
_MOST_NAMES = 2**12


class ArrayFile(NamedTuple):
    """What a file held, each by name in alphabetical order.

    Attributes:
        arrays: of more than one value, or none: float32 or int64, in the units of the file.
        numbers: arrays of one value, and numbers that are attributes of an HDF5 file.
        field_names: lists of strings whose name ends in `_field_names`.
    """

    arrays: dict[str, Shaped[np.ndarray, "..."]]
    numbers: dict[str, float]
    field_names: dict[str, list[str]]


class _Opened(NamedTuple):
    entries: list[Entry]
    attributes: dict[str, Any]


def read_arrays(path: Path, max_bytes: int | None = None) -> ArrayFile:
    """Reads all arrays of a file.

    Floating arrays become float32; integers and truth values become int64. A data set of an HDF5
    file goes by its own name; where several groups have one of that name, by its path with dots
    for slashes. Strings are left out where they are attributes, unless they name fields.

    Args:
        path: a file ending in one of `ARRAY_ENDINGS`; the array of a `.npy` file goes by the name
            of the file.
        max_bytes: largest size of all arrays together, in bytes; by default the machine's memory.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: its ending is none that is known; it cannot be read, is truncated, holds no
            arrays, or more than `max_bytes`; an array holds anything but real numbers, or a value
            that is not finite in float32 or too large for int64.
    """
    path = Path(path)
    opener = _OPENERS.get(path.suffix.lower())
    if opener is None:
        raise ValueError(
            f"{path}: expected a file ending in one of {', '.join(ARRAY_ENDINGS)}; "
            f"got {path.suffix or 'none'}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected an array file; there is none")
    with ExitStack() as stack:
        # HDF5 would call a file without permission damaged.
        _attempt(path, lambda: path.open("rb").close())
        opened = _attempt(path, lambda: stack.enter_context(opener(path)))
        entries = sorted(opened.entries, key=lambda entry: entry.name)
        _require_arrays(path, entries)
        _require_memory(path, entries, machine_memory() if max_bytes is None else max_bytes)
        contents = ArrayFile({}, {}, {})
        for entry in entries:
            _put(path, contents, entry.name, _attempt(path, entry.read))
    for name, value in opened.attributes.items():
        values = np.asarray(value)
        is_number = values.dtype.kind in "fiub" and values.size == 1
        if is_number or (name.endswith(_FIELD_NAMES) and _are_strings(values)):
            _put(path, contents, name, values)
    return ArrayFile(
        arrays=dict(sorted(contents.arrays.items())),
        numbers=dict(sorted(contents.numbers.items())),
        field_names=dict(sorted(contents.field_names.items())),
    )


def _attempt(path: Path, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except PermissionError as error:
        raise ValueError(f"{path}: expected a readable file; got {error.strerror}") from error
    except Exception as error:  # damaged bytes reach many decoders, each with errors of its own
        raise ValueError(
            f"{path}: expected a readable {path.suffix} file; got {one_line(error)}"
        ) from error


# What a file says it holds ------------------------------------------------------------------------


@contextmanager
def _open_npz(path: Path) -> Iterator[_Opened]:
    with zipfile.ZipFile(path) as archive:
        entries = npz_entries(archive)
        # A name becomes a folder of a store, which it must not lead out of.
        yield _Opened([entry._replace(name=_dotted(entry.name)) for entry in entries], {})


@contextmanager
def _open_npy(path: Path) -> Iterator[_Opened]:
    yield _Opened([npy_entry(path.stem, lambda: path.open("rb"), path.stat().st_size)], {})


@contextmanager
def _open_hdf5(path: Path) -> Iterator[_Opened]:
    with h5py.File(path, "r") as file:
        datasets: dict[str, h5py.Dataset] = {}

        def keep(name: str, item: h5py.Group | h5py.Dataset) -> None:
            if isinstance(item, h5py.Dataset):
                datasets[name] = item

        file.visititems(keep)
        last_names = Counter(name.rpartition("/")[2] for name in datasets)
        entries = []
        for name, dataset in datasets.items():
            last = name.rpartition("/")[2]
            unique = last if last_names[last] == 1 else _dotted(name)
            entries.append(_dataset_entry(unique, dataset))
        yield _Opened(entries, _read_attributes(file.attrs))


def _dotted(name: str) -> str:
    return name.replace("/", ".")


def _dataset_entry(name: str, dataset: h5py.Dataset) -> Entry:
    def read() -> Any:
        require_chunks(name, dataset)
        text = h5py.check_string_dtype(dataset.dtype)
        return _read_names(dataset) if text is not None and text.length is None else dataset[()]

    require_own_values(name, dataset)
    return Entry(name, dataset.dtype, dataset.shape, read)


def _read_names(dataset: h5py.Dataset) -> np.ndarray:
    """Strings of any length, one after another: all may be the same long one."""
    if dataset.size > _MOST_NAMES:
        raise ValueError(f"{dataset.size} names; expected {_MOST_NAMES} at most")
    names, length = [], 0
    for place in np.ndindex(dataset.shape):
        names.append(dataset[place])
        length += len(names[-1])
        if length > MOST_TEXT:
            raise ValueError(f"names of more than {MOST_TEXT} bytes")
    return np.array(names, object)


def _read_attributes(attributes: h5py.AttributeManager) -> dict[str, Any]:
    """Those that may be numbers of the sample, or names of fields."""
    found = {}
    for name in sorted(attributes):
        described = attributes.get_id(name)
        count = 0 if described.shape is None else math.prod(described.shape)
        is_number = described.dtype.kind in "fiub" and count == 1
        if is_number or (name.endswith(_FIELD_NAMES) and count <= _MOST_NAMES):
            found[name] = attributes[name]
    return found


_OPENERS = {".npz": _open_npz, ".npy": _open_npy, ".h5": _open_hdf5, ".hdf5": _open_hdf5}


# What of it is refused ----------------------------------------------------------------------------


def _require_arrays(path: Path, entries: list[Entry]) -> None:
    arrays = [entry for entry in entries if not _lists_fields(entry)]
    if not arrays:
        raise ValueError(f"{path}: expected arrays of numbers; got none")
    for entry in arrays:
        if entry.shape is None or entry.dtype.kind not in "fiub":
            kind = "an empty data set" if entry.shape is None else f"{entry.dtype} {entry.shape}"
            raise ValueError(f"{path}: expected real numbers in array {entry.name!r}; got {kind}")
    for entry in entries:
        if entry.name.startswith(".") or "\\" in entry.name:
            raise ValueError(f"{path}: expected names of arrays; got {entry.name!r}")
    for name, count in Counter(entry.name for entry in entries).items():
        if count > 1:
            raise ValueError(f"{path}: expected one array {name!r}; got {count}")


def _lists_fields(entry: Entry) -> bool:
    is_text = entry.dtype.kind in "US" or h5py.check_string_dtype(entry.dtype) is not None
    return entry.name.endswith(_FIELD_NAMES) and is_text and entry.shape is not None


def _require_memory(path: Path, entries: list[Entry], max_bytes: int) -> None:
    sizes = {entry.name: _bytes_needed(entry) for entry in entries}
    total = sum(sizes.values())
    if total > max_bytes:
        largest = max(sizes, key=sizes.__getitem__)
        raise ValueError(
            f"{path}: expected arrays of at most {max_bytes} bytes; got {total}, "
            f"{sizes[largest]} of them in array {largest!r}"
        )


def _bytes_needed(entry: Entry) -> int:
    """Bytes of an array as it is in the file or as it is handed out, whichever are more."""
    handed_out = 4 if entry.dtype.kind == "f" else 8
    return entry.num_values * max(entry.dtype.itemsize, handed_out)


# What is handed out -------------------------------------------------------------------------------


def _put(path: Path, contents: ArrayFile, name: str, values: Any) -> None:
    values = np.asarray(values)
    if values.dtype.kind not in "fiub":
        contents.field_names[name] = _attempt(path, lambda: _strings(values))
    elif values.size == 1:
        # A number alone keeps its precision: it may be a time or a coefficient.
        contents.numbers[name] = float(_finite(path, name, values.astype(np.float64)).item())
    elif values.dtype.kind == "f":
        with np.errstate(over="ignore"):  # found below, as infinity
            converted = np.ascontiguousarray(values, np.float32)
        contents.arrays[name] = _finite(path, name, converted)
    else:
        if values.dtype.kind == "u" and values.size and values.max() > _LARGEST_INT64:
            raise ValueError(
                f"{path}: expected values up to {_LARGEST_INT64} in array {name!r}; "
                f"got {values.max()}"
            )
        contents.arrays[name] = np.ascontiguousarray(values, np.int64)


def _finite(path: Path, name: str, values: np.ndarray) -> np.ndarray:
    bad = int((~np.isfinite(values)).sum())
    if bad:
        raise ValueError(
            f"{path}: expected finite values in array {name!r}; got {bad} that are not"
        )
    return values


def _are_strings(values: np.ndarray) -> bool:
    return all(isinstance(value, str | bytes) for value in values.reshape(-1).tolist())


def _strings(values: np.ndarray) -> list[str]:
    return [
        value.decode() if isinstance(value, bytes) else value
        for value in values.reshape(-1).tolist()
    ]
