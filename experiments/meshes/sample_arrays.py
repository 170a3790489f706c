"""The arrays and numbers of one sample by their names, in a store or in memory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import zarr
from jaxtyping import Float64, Shaped

from experiments.meshes.groups import is_group, open_group, require_memory
from experiments.messages import one_line

# Made of a volume and an STL.
DISTANCES = ("volume_signed_distance", "volume_direction")
# Attribute of a sample: false while it is being written.
COMPLETE = "complete"

_Kept = TypeVar("_Kept", zarr.Array, np.ndarray)


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


class _Named(Generic[_Kept]):
    """Arrays that are looked up by name, wherever they are kept."""

    def __init__(self, path: Path, arrays: Mapping[str, _Kept], attributes: Mapping[str, Any]):
        self.path, self.attributes = path, attributes
        self._arrays: Mapping[str, _Kept] = arrays

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple(sorted(self._arrays))

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

    def _array(self, name: str) -> _Kept:
        if name not in self._arrays:
            raise ValueError(
                f"{self.path}: expected an array {name!r}{_source(name)}; has "
                f"{', '.join(self.names) or 'none'}"
            )
        return self._arrays[name]


class StoredSample(_Named[zarr.Array]):
    """One sample of a store; arrays are read when asked for.

    Attributes:
        name: of the sample.
        path: of its group.
        attributes: of its group: names of the fields' columns, and numbers.
    """

    def __init__(self, path: Path):
        """Opens a group.

        Raises:
            ValueError: it is no readable group, see `groups.open_group`, is still being written, or
                is empty.
        """
        path = Path(path)
        self.name = path.name.removesuffix(".zarr")
        try:
            attributes, arrays = open_group(path)
        except Exception as error:  # damaged metadata reaches many decoders
            raise ValueError(f"{path}: expected a Zarr group; got {one_line(error)}") from error
        if attributes.get(COMPLETE) is False:
            raise ValueError(f"{path}: expected a whole sample; got one still being written")
        if not arrays:
            raise ValueError(f"{path}: expected a group with arrays; got an empty one")
        super().__init__(path, arrays, attributes)

    @staticmethod
    def is_one(path: Path) -> bool:
        """Whether a folder of a store is a sample, whole or not."""
        return not path.name.startswith(".") and is_group(path)

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


class HeldSample(_Named[np.ndarray]):
    """Arrays in memory, read like those of a store.

    Attributes:
        path: where they come from, for messages.
        attributes: names of the fields' columns, and numbers.
    """

    def __init__(self, path: Path, arrays: Mapping[str, np.ndarray], attributes: Mapping[str, Any]):
        """Keeps them as they are."""
        super().__init__(path, dict(arrays), attributes)

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
        if name not in self._arrays and name not in self.attributes:
            raise ValueError(
                f"{self.path}: expected a number {name!r}; has "
                f"{', '.join((*self.names, *self.attributes)) or 'none'}"
            )
        source = self._arrays if name in self._arrays else self.attributes
        return _finite(self, name, source[name])

    def number(self, name: str) -> float:
        """The one number of this name."""
        return one_number(self, name)


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
