"""Predicted fields written beside what they were predicted from."""

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyvista

from experiments.files import write_atomically
from experiments.meshes.predicted import Input, Prediction, true_fields, vectors
from experiments.meshes.samples import RESERVED, Contents, Part
from experiments.meshes.store import write_sample

# What each kind of mesh can be written as; the first where it was read from something else.
_WRITTEN = {
    pyvista.PolyData: (".vtp", ".vtk"),
    pyvista.UnstructuredGrid: (".vtu", ".vtk"),
    pyvista.StructuredGrid: (".vts", ".vtk"),
    pyvista.ImageData: (".vti", ".vtk"),
    pyvista.RectilinearGrid: (".vtr", ".vtk"),
}


def write_prediction(
    read: Input, prediction: Prediction, out: Path, before: Sequence[Path] = ()
) -> list[Path]:
    """Writes the predicted fields of a file; those of a folder into a folder of its name.

    Args:
        read: the file.
        prediction: of its fields.
        out: folder that is written to.
        before: what was written there before, of other files.

    Returns:
        What was written: of a sample of several meshes, each of them.

    Raises:
        ValueError: it would be written over what was read, or was written before.
    """
    contents = read.contents
    if contents is not None and read.path.is_dir():
        out = out / read.path.name
        out.mkdir(exist_ok=True)
    arrays = [_arrays(read, place, prediction) for place in range(len(prediction.fields))]
    if contents is not None and contents.parts:
        return _write_meshes(read, contents.parts, arrays, out, before)
    merged = {
        f"{stream.kind}_{name}": values
        for stream, own in zip(read.description.streams, arrays, strict=True)
        for name, values in own.items()
    }
    if contents is None:
        _refuse(read.path, out / read.path.name, before)
        held = {name: read.wired.arrays.read(name) for name in read.wired.arrays.names}
        write_sample(out, read.path.name, held | merged, _plain(read.wired.arrays.attributes))
        return [out / read.path.name]
    return [_write_arrays(read, contents, merged, out, before)]


def _arrays(read: Input, place: int, prediction: Prediction) -> dict[str, np.ndarray]:
    """What is written of a stream, by name, in the units of the file."""
    columns, physical = read.description.streams[place].fields, read.wired.physical
    fields, true = prediction.fields[place], true_fields(read, place)
    parts = {"pred": (columns, physical(fields, columns))}
    if true:
        there = tuple(true)
        predicted = fields[:, [columns.index(name) for name in there]]
        error = physical(predicted, there) - physical(np.stack([*true.values()], 1), there)
        parts["error"] = (there, error)
    if prediction.deviations is not None:
        # A difference of fields: what is taken off a field to make a coefficient does not count.
        zero = physical(np.zeros_like(fields[:1]), columns)
        parts["std"] = (columns, physical(prediction.deviations[place], columns) - zero)
    return {
        f"{name}_{part}": np.squeeze(values[:, own], 1) if len(own) == 1 else values[:, own]
        for part, (names, values) in parts.items()
        for name, own in vectors(names)
    }


def _write_meshes(
    read: Input,
    parts: Mapping[str, Sequence[Part]],
    arrays: list[dict[str, np.ndarray]],
    out: Path,
    before: Sequence[Path],
) -> list[Path]:
    written: list[Path] = []
    for stream, own in zip(read.description.streams, arrays, strict=True):
        start = 0
        for part in parts.get(stream.kind or "", ()):
            rows = slice(start, start + len(part.sampled.positions))
            start = rows.stop
            mesh = part.mesh.copy(deep=False)
            data = mesh.cell_data if part.sampled.on_cells else mesh.point_data
            for name, values in own.items():
                data[name] = np.ascontiguousarray(values[rows])
            path = out / _mesh_name(part.path, mesh)
            _refuse(part.path, path, [*before, *written])
            _require_room(out, mesh)
            write_atomically(path, mesh.save)
            written.append(path)
    return written


def _mesh_name(path: Path, mesh: pyvista.DataSet) -> str:
    endings = next(known for kind, known in _WRITTEN.items() if isinstance(mesh, kind))
    return path.name if path.suffix.lower() in endings else path.with_suffix(endings[0]).name


def _require_room(out: Path, mesh: pyvista.DataSet) -> None:
    """VTK does not survive a disk that becomes full while it writes."""
    needed, free = mesh.actual_memory_size * 1024, shutil.disk_usage(out).free
    if needed > free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out))


def _write_arrays(
    read: Input,
    contents: Contents,
    predicted: dict[str, np.ndarray],
    out: Path,
    before: Sequence[Path],
) -> Path:
    arrays: dict[str, Any] = contents.arrays | predicted
    numbers = _plain(contents.attributes)
    if read.path.suffix.lower() in (".h5", ".hdf5"):
        path = out / read.path.name

        def write(temporary: Path) -> None:
            with h5py.File(temporary, "w") as file:
                for name, values in arrays.items():
                    file[name] = values
                file.attrs.update(numbers)

    else:
        path = out / f"{read.name}.npz"

        def write(temporary: Path) -> None:
            np.savez(temporary, **arrays, **numbers)

    _refuse(read.path, path, before)
    write_atomically(path, write)
    return path


def _plain(attributes: Mapping) -> dict:
    """Numbers and names, without what tells where a store has them from."""
    return {name: value for name, value in attributes.items() if name not in RESERVED}


def _refuse(read: Path, written: Path, before: Sequence[Path]) -> None:
    if written in before:
        raise ValueError(
            f"{read}: expected a file whose prediction has a name of its own; got {written} again"
        )
    if written.exists() and written.resolve() == read.resolve():
        raise ValueError(f"--out: expected another folder than that of {read}; got the same")
