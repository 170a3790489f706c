"""What can be wrong with a store or its configuration before a single point is read."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.configuration.schema import COEFFICIENTS, StoreConfig, StreamConfig
from experiments.meshes.wiring import Wired

# Vertices of an STL keep their order when its triangles are shuffled, by which they are named.
_NEVER_SHUFFLED = ("stl_coordinates", "stl_faces")
_COUNTS = ("train", "validation", "test", "resolution", "geometry_resolution")
_VECTOR = 3


def entries(stream: StreamConfig) -> list[str]:
    """All entries of a stream, whose arrays have one length."""
    positions = [] if stream.local_positions is None else [stream.local_positions]
    return [*stream.embedding, *stream.fx, *positions, *stream.targets]


def shuffled_kind(sample: Wired, names: Iterable[str]) -> str | None:
    """The kind whose random order all arrays of some entries lie in, `surface` say.

    Raises:
        ValueError: their orders differ.
    """
    given = sample.arrays.attributes.get("shuffled")
    kinds: dict[str | None, Any] = {}
    for array in (name.partition(".")[0] for name in names):
        kind = array.partition("_")[0]
        is_shuffled = isinstance(given, list) and kind in given and array not in _NEVER_SHUFFLED
        kinds.setdefault(kind if is_shuffled else None, array)
    if len(kinds) > 1:
        first, other, *_ = kinds.values()
        raise ValueError(
            f"{sample.arrays.path}: array {other!r}: expected the order of rows of {first!r}; "
            "got one that was shuffled by itself"
        )
    return next(iter(kinds), None)


def check_config(config: StoreConfig) -> None:
    """Refuses what no store can have.

    Raises:
        ValueError: names the key.
    """
    if not config.streams:
        raise ValueError("data.streams: expected at least one stream; got none")
    for name, stream in config.streams.items():
        for part in ("embedding", "targets"):
            given = getattr(stream, part)
            if isinstance(given, str) or not given:
                raise ValueError(
                    f"data.streams.{name}.{part}: expected at least one entry; got {given!r}"
                )
    for name in _COUNTS:
        count = getattr(config, name)
        if count is not None and count < 1:
            raise ValueError(f"data.{name}: expected a positive number; got {count}")
    for column, kind in config.coefficients.items():
        if kind not in COEFFICIENTS:
            raise ValueError(
                f"data.coefficients.{column}: expected one of {', '.join(COEFFICIENTS)}; "
                f"got {kind!r}"
            )
    if config.forces.pressure is not None:
        _check_forces_config(config)


def _check_forces_config(config: StoreConfig) -> None:
    forces = config.forces
    if forces.stream not in config.streams:
        raise ValueError(
            f"data.forces.stream: expected one of {', '.join(config.streams)}; "
            f"got {forces.stream!r}"
        )
    if not (forces.directions or forces.moments):
        raise ValueError("data.forces.directions: expected at least one; got none, nor moments")
    twice = forces.directions.keys() & forces.moments.keys()
    if twice:
        raise ValueError(
            f"data.forces.moments: expected other names than those of directions; got {min(twice)}"
        )
    for key, values in _vectors(config):
        if len(values) != _VECTOR or any(isinstance(v, bool | None) for v in values):
            raise ValueError(
                f"data.forces.{key}: expected three numbers, or names of numbers; got {values}"
            )


def _vectors(config: StoreConfig) -> Iterable[tuple[str, Sequence[float | str]]]:
    forces = config.forces
    for group in ("directions", "moments"):
        yield from ((f"{group}.{name}", axis) for name, axis in getattr(forces, group).items())
    yield "centre", forces.centre


def check_sample(sample: Wired) -> None:
    """Refuses a sample that lacks what the configuration asks for, by its shapes and numbers.

    Raises:
        ValueError: names the sample and what is wrong.
    """
    config = sample.config
    for name, stream in config.streams.items():
        _check_rows(sample, entries(stream))
        if stream.local_positions is not None:
            width = len(sample.columns([stream.local_positions]))
            if width != _VECTOR:
                raise ValueError(
                    f"{sample.arrays.path}: data.streams.{name}.local_positions: expected "
                    f"{_VECTOR} columns; got {width}"
                )
        fields = sample.columns(stream.targets)
        if len(set(fields)) < len(fields):
            raise ValueError(
                f"{sample.arrays.path}: data.streams.{name}.targets: expected each field once; "
                f"got {', '.join(fields)}"
            )
    if config.geometry:
        _check_rows(sample, config.geometry)
    sample.positive("data.frame.length", config.frame.length)
    if config.frame.centroid:
        _check_areas(sample, *sample.frame_surface())
    _check_coefficients(sample)
    if config.forces.pressure is not None:
        _check_forces(sample)


def _check_rows(sample: Wired, names: Sequence[str]) -> None:
    sample.length(names)
    shuffled_kind(sample, names)
    for array in dict.fromkeys(name.partition(".")[0] for name in names):
        if sample.arrays.dtype(array).kind not in "fiub":
            raise ValueError(
                f"{sample.arrays.path}: array {array!r}: expected numbers; "
                f"got type {sample.arrays.dtype(array)}"
            )
        width = math.prod(sample.arrays.shape(array)[1:])
        if sample.holds_coordinates(array) and width != _VECTOR:
            raise ValueError(
                f"{sample.arrays.path}: array {array!r}: expected {_VECTOR} coordinates; "
                f"got {width}"
            )


def _check_areas(sample: Wired, surface: str, areas: str) -> None:
    _check_rows(sample, [surface, areas])
    shape = sample.arrays.shape(areas)
    if math.prod(shape[1:]) != 1:
        raise ValueError(
            f"{sample.arrays.path}: array {areas!r}: expected one area a row; got shape {shape}"
        )


def _check_coefficients(sample: Wired) -> None:
    config = sample.config
    known = {column for array in sample.arrays.names for column in sample.column_names(array)}
    for name in config.coefficients:
        if not {name, f"{name}_x"} & known:
            fields = [array for array in sample.arrays.names if array.endswith("_fields")]
            raise ValueError(
                f"{sample.arrays.path}: data.coefficients.{name}: expected a column or a vector; "
                f"has {', '.join(sample.columns(fields)) or 'no fields'}"
            )
    used = [name for stream in config.streams.values() for name in entries(stream)]
    kinds = map(sample.kind, sample.columns([*used, *config.geometry]))
    if config.forces.pressure is not None or any(kinds):
        _ = sample.free_stream


def _check_forces(sample: Wired) -> None:
    config, forces = sample.config, sample.config.forces
    stream = config.streams[forces.stream]
    fields = sample.columns(stream.targets)
    shear = [] if forces.shear is None else [f"{forces.shear}_{axis}" for axis in "xyz"]
    for key, column in (("pressure", forces.pressure), *(("shear", each) for each in shear)):
        if column not in fields:
            raise ValueError(
                f"{sample.arrays.path}: data.forces.{key}: expected one of the targets of "
                f"{forces.stream!r}, {', '.join(fields)}; got {column!r}"
            )
    _check_rows(sample, [*stream.targets, "surface_normals", "surface_mesh_centers"])
    width = len(sample.columns(["surface_normals"]))
    if width != _VECTOR:
        raise ValueError(
            f"{sample.arrays.path}: array 'surface_normals': expected {_VECTOR} columns; "
            f"got {width}"
        )
    _check_areas(sample, "surface_normals", "surface_areas")
    sample.positive("data.forces.area", forces.area)
    if forces.moments:
        sample.positive("data.forces.length", forces.length)
    for key, values in _vectors(config):
        vector = sample.vector(values)
        if key != "centre" and not any(vector):
            raise ValueError(
                f"{sample.arrays.path}: data.forces.{key}: expected a direction; got {values}"
            )
