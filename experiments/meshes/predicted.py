"""What is read of a file to predict its fields, and how these compare to those that it has."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from experiments.configuration.schema import StoreConfig
from experiments.data.batch import Sample
from experiments.data.description import Description
from experiments.meshes.arrays import ARRAY_ENDINGS
from experiments.meshes.files import MESH_ENDINGS
from experiments.meshes.groups import is_group
from experiments.meshes.rows import Rows
from experiments.meshes.sample_arrays import HeldSample, StoredSample
from experiments.meshes.sample_forces import force_columns, forces_of
from experiments.meshes.sample_inputs import cloud, tokens
from experiments.meshes.samples import PARAMETERS, Contents, Known, Source, read_sample
from experiments.meshes.wiring import Wired

_AXES = ("_x", "_y", "_z")


@dataclass(frozen=True)
class Input:
    """A file as a run reads it.

    Attributes:
        path: of the file.
        name: of the sample.
        wired: its arrays by the run's configuration, whose targets are single columns.
        contents: of a mesh or a file of arrays; `None` for a sample of a store.
        sample: without targets.
        description: of the run's data.
    """

    path: Path
    name: str
    wired: Wired
    contents: Contents | None
    sample: Sample
    description: Description


@dataclass(frozen=True)
class Prediction:
    """Fields of each stream, in the units of the targets.

    Attributes:
        fields: `(N, C)`.
        deviations: over the draws of dropouts, or `None`.
    """

    fields: Sequence[Float[np.ndarray, "N C"]]
    deviations: Sequence[Float[np.ndarray, "N C"]] | None = None


def read_input(path: Path, config: StoreConfig, data: Description) -> Input:
    """Reads a file, see `experiments.predict`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it cannot be read, or lacks something that the run reads.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: expected a file or a folder; there is none")
    contents = None
    arrays: StoredSample | HeldSample
    if is_group(path):
        arrays = StoredSample(path)
        name = arrays.name
    else:
        source = _source_of(path)
        contents, name = _contents(source, config, data), source.name
        arrays = HeldSample(path, contents.arrays, contents.attributes)
    streams = {
        stream.name: replace(config.streams[stream.name], targets=list(stream.targets))
        for stream in data.streams
    }
    wired = Wired(arrays, replace(config, streams=streams))
    sample = _sample(wired)
    _check_widths(path, sample, data)
    return Input(path, name, wired, contents, sample, data)


def _check_widths(path: Path, sample: Sample, data: Description) -> None:
    """Refuses what would not fit the model."""
    for stream, read in zip(data.streams, sample.clouds, strict=True):
        for name in ("embedding", "fx"):
            values = getattr(read, name)
            width = 0 if values is None else values.shape[1]
            if width != getattr(stream, name):
                raise ValueError(
                    f"{path}: {stream.name}.{name}: expected {getattr(stream, name)} columns, as "
                    f"the run was trained on; got {width}"
                )
    width = None if sample.geometry is None else sample.geometry.shape[1]
    if width != data.geometry:
        raise ValueError(f"{path}: geometry: expected {data.geometry} columns; got {width}")
    shape = None if sample.global_embedding is None else sample.global_embedding.shape
    if shape != data.global_embedding:
        raise ValueError(
            f"{path}: global_embedding: expected numbers of shape {data.global_embedding}; "
            f"got {shape}"
        )


def _sample(wired: Wired) -> Sample:
    config = wired.config
    clouds = []
    for stream in config.streams.values():
        rows = Rows.all(wired.length([*stream.embedding, *stream.fx]))
        clouds.append(cloud(wired, replace(stream, targets=[]), rows))
    geometry = None
    if config.geometry:
        rows = Rows.all(wired.length(config.geometry))
        geometry = wired.values(config.geometry, rows)
    return Sample(tuple(clouds), geometry, 0 if geometry is None else len(geometry), tokens(wired))


def _source_of(path: Path) -> Source:
    if path.is_dir():
        source = Source.of(path.name, sorted(path.iterdir()))
        if source.is_empty:
            raise ValueError(
                f"{path}: expected a folder with the files of one sample, or a sample of a store; "
                "got neither"
            )
        return source
    ending, name = path.suffix.lower(), path.stem
    if ending not in (*MESH_ENDINGS, *ARRAY_ENDINGS):
        raise ValueError(
            f"{path}: expected a file ending in one of "
            f"{', '.join((*MESH_ENDINGS, *ARRAY_ENDINGS))}; got {path.suffix or 'none'}"
        )
    # What belongs to a sample beside its mesh.
    beside = [path.with_name(other) for other in (f"{name}.stl", f"{name}.json")]
    source = Source.of(name, [path, *(other for other in beside if other.is_file())])
    if source.parameters is None and (path.parent / PARAMETERS).is_file():
        source = replace(source, parameters=path.parent / PARAMETERS)
    if ending == ".stl":
        source = replace(source, meshes=(path,), geometry=(path,))
    return source


def _contents(source: Source, config: StoreConfig, data: Description) -> Contents:
    entries = [entry for stream in data.streams for entry in stream.targets]
    for stream in config.streams.values():
        entries += [*stream.embedding, *stream.fx]
    entries += config.geometry
    on_cells = {stream.kind: stream.on_cells for stream in data.streams}
    columns: dict[str, list[str]] = {"surface": [], "volume": []}
    for array, _, column in (entry.partition(".") for entry in entries):
        kind = array.removesuffix("_fields")
        if kind in columns and array != kind and column:
            columns[kind].append(column)
    known = {kind: Known(tuple(own), on_cells.get(kind, True)) for kind, own in columns.items()}
    return read_sample(source, known=known)


def true_fields(read: Input, place: int) -> dict[str, Float[np.ndarray, " N"]]:
    """The fields of a stream that the file has, by name, in the units of the targets."""
    entries = list(read.wired.config.streams.values())[place].targets
    fields = read.description.streams[place].fields
    there = {
        field: entry
        for field, entry in zip(fields, entries, strict=True)
        if read.wired.has([entry])
    }
    if not there:
        return {}
    asked = list(there.values())
    values = read.wired.values(asked, Rows.all(read.wired.length(asked)))
    return dict(zip(there, values.T, strict=True))


def errors_of(read: Input, prediction: Prediction) -> dict[str, Any]:
    """Relative L2 errors of the fields that the file has, and the forces that are asked for."""
    found: dict[str, Any] = {}
    forces = read.wired.config.forces
    for place, (stream, predicted) in enumerate(
        zip(read.description.streams, prediction.fields, strict=True)
    ):
        fields, true = dict(zip(stream.fields, predicted.T, strict=True)), true_fields(read, place)
        several = len(read.description.streams) > 1
        for field, values in true.items():
            name = f"{stream.name}/{field}" if several else field
            found.setdefault("relative_l2", {})[name] = _relative_l2(fields[field], values)
        if forces.pressure is not None and forces.stream == stream.name:
            of = [fields, true] if {*force_columns(forces)} <= {*true} else [fields]
            each = [forces_of(read.wired, [*own], np.stack([*own.values()], 1)) for own in of]
            found["forces"] = {name: [those[name] for those in each] for name in each[0]}
    return found


def _relative_l2(predicted: Float[np.ndarray, " N"], true: Float[np.ndarray, " N"]) -> float:
    """NaN for a field that is zero everywhere."""
    norm = np.linalg.norm(true.astype(np.float64))
    return float(np.linalg.norm(predicted.astype(np.float64) - true) / norm) if norm else np.nan


def vectors(columns: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Names of fields and their columns: three that end in `_x`, `_y`, `_z` are one vector."""
    found, i = [], 0
    while i < len(columns):
        base = columns[i].removesuffix("_x")
        if list(columns[i : i + 3]) == [base + axis for axis in _AXES]:
            found.append((base, [i, i + 1, i + 2]))
            i += 3
        else:
            found.append((columns[i], [i]))
            i += 1
    return found
