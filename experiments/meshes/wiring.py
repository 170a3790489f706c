"""Which arrays of a sample make the inputs and targets of a model, by name.

An entry is an array (`surface_normals`), or one of its columns by name or number
(`surface_fields.p`, `surface_fields.0`); a vector's name stands for its three columns. Entries side
by side make one input. Coordinates are taken in the sample's frame, and columns with a kind become
coefficients of the sample's free stream.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from jaxtyping import Float, Float32

from experiments.configuration.schema import StoreConfig
from experiments.meshes.features import Frame, FreeStream
from experiments.meshes.rows import Rows
from experiments.meshes.sample_arrays import Arrays

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
        length = self.positive("data.frame.length", self.config.frame.length)
        if not self.config.frame.centroid:
            return Frame(np.zeros(3), length)
        names = self.frame_surface()
        centers, areas = map(self.arrays.read, names)
        try:
            frame = Frame.of_surface(centers, np.ravel(areas), length)
        except ValueError as error:
            raise ValueError(f"{self.arrays.path}: {names[1]!r}: {error}") from error
        if not np.isfinite(frame.origin).all():
            raise ValueError(
                f"{self.arrays.path}: {names[0]!r}, {names[1]!r}: expected a finite centroid; "
                f"got {frame.origin.tolist()}"
            )
        return frame

    def frame_surface(self) -> tuple[str, str]:
        """Arrays of the centres and areas whose centroid the frame begins at.

        Raises:
            ValueError: there are none.
        """
        for names in (("stl_centers", "stl_areas"), ("surface_mesh_centers", "surface_areas")):
            if set(names) <= set(self.arrays.names):
                return names
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
        first, expected = "", 0
        for name, _ in map(self._resolve, entries):
            rows = next(iter(self.arrays.shape(name)), 0)
            if not rows:
                raise ValueError(f"{self.arrays.path}: array {name!r}: expected rows; got none")
            if not expected:
                first, expected = name, rows
            if rows != expected:
                raise ValueError(
                    f"{self.arrays.path}: array {name!r}: expected {expected} rows, as in "
                    f"{first!r}; got {rows}"
                )
        return expected

    def columns(self, entries: Sequence[str]) -> tuple[str, ...]:
        """Names of the columns of some entries side by side."""
        return tuple(column for _, columns in map(self._resolve, entries) for _, column in columns)

    def explicit(self, entries: Sequence[str]) -> tuple[str, ...]:
        """The columns of some entries as entries of their own."""
        return tuple(
            f"{array}.{column}"
            for array, columns in map(self._resolve, entries)
            for _, column in columns
        )

    def values(
        self, entries: Sequence[str], rows: Rows, window: slice = _ALL
    ) -> Float32[np.ndarray, "n C"]:
        """The entries side by side, in a window of some rows.

        Raises:
            ValueError: an array is missing, cannot be read, or has a value that is not finite.
        """
        known, parts = {}, []
        for name, columns in map(self._resolve, entries):
            if name not in known:
                read = rows.read(self.arrays, name, window)
                width = math.prod(self.arrays.shape(name)[1:])
                known[name] = self._in_frame(name, read.reshape(len(read), width))
            parts += [self._column(known[name][:, i], column) for i, column in columns]
        values = np.stack(parts, axis=1)
        wrong = ~np.isfinite(values).all(0)
        if wrong.any():
            column = wrong.argmax()
            raise ValueError(
                f"{self.arrays.path}: {self.columns(entries)[column]!r}: expected finite values; "
                f"got {np.count_nonzero(~np.isfinite(values[:, column]))} that are not"
            )
        return values

    def _column(self, values: np.ndarray, column: str) -> Float32[np.ndarray, " n"]:
        kind = self.kind(column)
        if kind is not None:
            # A pressure differs from that of the free stream in digits that float32 may not have.
            values = self.free_stream.coefficient(values.astype(np.float64), kind)
        with np.errstate(over="ignore"):  # found below, as infinity
            return values.astype(np.float32)

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

    def _in_frame(self, name: str, values: np.ndarray) -> np.ndarray:
        if self.holds_coordinates(name):
            return self.frame.positions(values)
        if name.endswith(_DISTANCES):
            return values / self.frame.length
        return values

    def holds_coordinates(self, array: str) -> bool:
        """Whether an array is of coordinates, by its name."""
        return array.endswith(_COORDINATES)

    def kind(self, column: str) -> str | None:
        """What a column is over the free stream, by its name or that of its vector."""
        kinds, (vector, _, axis) = self.config.coefficients, column.rpartition("_")
        return kinds.get(column) or (kinds.get(vector) if axis in _AXES else None)

    def number(self, value: float | str) -> float:
        """A number, or that of this name.

        Raises:
            ValueError: there is none of this name, or it is not finite.
        """
        try:
            number = float(value)
        except ValueError:
            return self.arrays.number(str(value))
        if not math.isfinite(number):
            raise ValueError(
                f"{self.arrays.path}: expected a finite number, or the name of one; got {value!r}"
            )
        return number

    def positive(self, key: str, value: float | str) -> float:
        """A number, or that of this name, of which a key of the configuration tells.

        Raises:
            ValueError: see `number`; or it is not positive.
        """
        number = self.number(value)
        if not number > 0:
            raise ValueError(f"{self.arrays.path}: {key}: expected a positive number; got {number}")
        return number

    def vector(self, values: Sequence[float | str]) -> tuple[float, ...]:
        """Numbers, or those of these names."""
        return tuple(map(self.number, values))

    def has(self, entries: Sequence[str]) -> bool:
        """Whether there is what some entries name."""
        try:
            self.columns(entries)
        except ValueError:
            return False
        return True

    def _resolve(self, entry: str) -> tuple[str, list[tuple[int, str]]]:
        """The array of an entry, and its columns by number and name.

        Raises:
            ValueError: there is no such array or column.
        """
        array, _, part = entry.partition(".")
        names = self.column_names(array)
        if not part:
            return array, list(enumerate(names))
        wanted = [part] if part in names else [f"{part}_{axis}" for axis in _AXES]
        if part.isdecimal() and part not in names and int(part) < len(names):
            wanted = [names[int(part)]]
        if not set(wanted) <= set(names):
            raise ValueError(
                f"{self.arrays.path}: array {array!r}: expected a column {part!r}; "
                f"has {', '.join(names)}"
            )
        return array, [(names.index(name), name) for name in wanted]

    def column_names(self, array: str) -> list[str]:
        """Names of the columns of an array, of its own or after it.

        Raises:
            ValueError: there is no such array, or its columns have other names than there are.
        """
        width = math.prod(self.arrays.shape(array)[1:])
        attribute = f"{array.removesuffix('_fields')}_field_names"
        names = self.arrays.attributes.get(attribute)
        if array.endswith("_fields") and names is not None:
            if not isinstance(names, list | tuple) or len({*map(str, names)}) != len(names):
                raise ValueError(
                    f"{self.arrays.path}: {attribute!r}: expected names that differ; got {names}"
                )
            if len(names) != width:
                raise ValueError(
                    f"{self.arrays.path}: array {array!r}: expected {len(names)} columns, "
                    f"{', '.join(names)}; got {width}"
                )
            return list(names)
        if width == 1:
            return [array]
        return [f"{array}_{end}" for end in (_AXES if width == 3 else range(width))]
