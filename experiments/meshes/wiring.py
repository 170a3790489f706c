"""Which arrays of a sample make the inputs and targets of a model, by name.

An entry is an array (`surface_normals`), or one of its columns by name or number
(`surface_fields.p`, `surface_fields.0`); a vector's name stands for its three columns. Entries side
by side make one input. Coordinates are taken in the sample's frame, and columns with a kind become
coefficients of the sample's free stream.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from jaxtyping import Float, Float32

from experiments.meshes.features import Frame, FreeStream
from experiments.meshes.rows import Rows
from experiments.meshes.store import Arrays
from experiments.schema import StoreConfig

_COORDINATES = ("_mesh_centers", "_centers", "_coordinates")
_DISTANCES = ("_signed_distance",)
_AXES = ("x", "y", "z")
_ALL = slice(None)


class Wired:
    """A sample as a configuration reads it.

    Attributes:
        arrays: of the sample.
        config: the configuration.
    """

    def __init__(self, arrays: Arrays, config: StoreConfig):
        """Binds both; nothing is read."""
        self.arrays, self.config = arrays, config

    @cached_property
    def frame(self) -> Frame:
        """Where its coordinates begin and what they are measured in.

        Raises:
            ValueError: the centroid or the reference length cannot be had.
        """
        length = self.number(self.config.frame.length)
        if not self.config.frame.centroid:
            if not length > 0:
                raise ValueError(
                    f"{self.arrays.path}: data.frame.length: expected a positive number; "
                    f"got {length}"
                )
            return Frame(np.zeros(3), length)
        for centers, areas in (
            ("stl_centers", "stl_areas"),
            ("surface_mesh_centers", "surface_areas"),
        ):
            if {centers, areas} <= set(self.arrays.names):
                return Frame.of_surface(self.arrays.read(centers), self.arrays.read(areas), length)
        raise ValueError(
            f"{self.arrays.path}: data.frame.centroid: expected a surface or an STL with its "
            f"areas; has {', '.join(self.arrays.names)}"
        )

    @cached_property
    def free_stream(self) -> FreeStream:
        """The undisturbed flow.

        Raises:
            ValueError: a number of it is missing, or density or velocity are not positive.
        """
        given = self.config.free_stream
        numbers = [self.number(value) for value in (given.density, given.velocity, given.pressure)]
        try:
            return FreeStream(*numbers)
        except ValueError as error:
            raise ValueError(f"{self.arrays.path}: {error}") from error

    def length(self, entries: Sequence[str]) -> int:
        """Rows of the arrays of some entries.

        Raises:
            ValueError: there is no such array, or they differ.
        """
        first = None
        for name, _ in map(self._resolve, entries):
            rows = self.arrays.shape(name)[0]
            if rows == 0:
                raise ValueError(f"{self.arrays.path}: array {name!r}: expected values; got none")
            if first is not None and rows != first[1]:
                raise ValueError(
                    f"{self.arrays.path}: array {name!r}: expected {first[1]} rows, as in "
                    f"{first[0]!r}; got {rows}"
                )
            first = first or (name, rows)
        return first[1]

    def columns(self, entries: Sequence[str]) -> tuple[str, ...]:
        """Names of the columns of some entries side by side."""
        return tuple(column for _, columns in map(self._resolve, entries) for _, column in columns)

    def values(
        self, entries: Sequence[str], rows: Rows, window: slice = _ALL
    ) -> Float32[np.ndarray, "n C"]:
        """The entries side by side, in a window of some rows.

        Raises:
            ValueError: an array is missing, cannot be read, or has a value that is not finite.
        """
        return self._read(entries, lambda name: rows.read(self.arrays, name, window))

    def numbers(self, names: Sequence[str]) -> Float32[np.ndarray, "1 C"]:
        """Numbers of the whole sample as one token."""
        return np.concatenate([self.arrays.numbers(name) for name in names])[None].astype(
            np.float32
        )

    def physical(
        self, fields: Float[np.ndarray, "n C"], columns: Sequence[str]
    ) -> Float[np.ndarray, "n C"]:
        """Fields in their own unit, from coefficients of the free stream where they are these."""
        kinds = [self.kind(column) for column in columns]
        parts = [
            fields[:, i] if kind is None else self.free_stream.field(fields[:, i], kind)
            for i, kind in enumerate(kinds)
        ]
        return np.stack(parts, axis=1)

    def _read(self, entries: Sequence[str], read) -> Float32[np.ndarray, "n C"]:
        known, parts = {}, []
        for name, columns in map(self._resolve, entries):
            if name not in known:
                values = read(name)
                known[name] = self._in_frame(name, values.reshape(len(values), -1))
            values = known[name][:, [i for i, _ in columns]].astype(np.float32)
            kinds = [self.kind(column) for _, column in columns]
            for i, kind in enumerate(kinds):
                if kind is not None:
                    values[:, i] = self.free_stream.coefficient(values[:, i], kind)
            parts.append(values)
        values = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        wrong = ~np.isfinite(values).all(0)
        if wrong.any():
            column = wrong.argmax()
            raise ValueError(
                f"{self.arrays.path}: {self.columns(entries)[column]!r}: expected finite values; "
                f"got {np.count_nonzero(~np.isfinite(values[:, column]))} that are not"
            )
        return values

    def _in_frame(self, name: str, values: np.ndarray) -> np.ndarray:
        if name.endswith(_COORDINATES):
            return self.frame.positions(values)
        if name.endswith(_DISTANCES):
            return values / self.frame.length
        return values

    def kind(self, column: str) -> str | None:
        """What a column is over the free stream, by its name or that of its vector."""
        kinds = self.config.coefficients
        return kinds.get(column) or kinds.get(column.rpartition("_")[0])

    def number(self, value: float | str) -> float:
        """A number, or that of this name."""
        try:
            return float(value)
        except ValueError:
            return self.arrays.number(value)

    def vector(self, values: Sequence[float | str]) -> tuple[float, ...]:
        """Numbers, or those of these names."""
        return tuple(map(self.number, values))

    def has(self, entries: Sequence[str]) -> bool:
        """Whether the arrays of some entries are there."""
        return {entry.partition(".")[0] for entry in entries} <= set(self.arrays.names)

    def _resolve(self, entry: str) -> tuple[str, list[tuple[int, str]]]:
        """The array of an entry, and its columns by number and name."""
        array, _, part = entry.partition(".")
        names = self._column_names(array)
        if not part:
            return array, list(enumerate(names))
        wanted = [part] if part in names else [f"{part}_{axis}" for axis in _AXES]
        if part.isdecimal() and int(part) < len(names):
            wanted = [names[int(part)]]
        if not set(wanted) <= set(names):
            raise ValueError(
                f"{self.arrays.path}: array {array!r}: expected a column {part!r}; "
                f"has {', '.join(names)}"
            )
        return array, [(names.index(name), name) for name in wanted]

    def _column_names(self, array: str) -> list[str]:
        shape = self.arrays.shape(array)
        width = int(np.prod(shape[1:]))
        names = self.arrays.attributes.get(f"{array.removesuffix('_fields')}_field_names")
        if array.endswith("_fields") and names is not None:
            if len(names) != width:
                raise ValueError(
                    f"{self.arrays.path}: array {array!r}: expected {len(names)} columns, "
                    f"{', '.join(names)}; got {width}"
                )
            return list(names)
        if width == 1:
            return [array]
        return [f"{array}_{end}" for end in (_AXES if width == 3 else range(width))]
