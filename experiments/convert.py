"""`python -m experiments.convert FOLDER STORE`: a folder of simulation files into a Zarr store.

A sample is a subfolder, or the files of one name. What is already in the store and unchanged is
left alone, so that an interrupted conversion goes on. A sample that cannot be converted is named
with what is wrong, and the others go on; the command then ends with exit code 1.
"""

import argparse
import errno
import json
import os
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.cli import one_line_errors
from experiments.files import locked, write_json
from experiments.meshes.sample_arrays import StoredSample
from experiments.meshes.samples import Contents, Source, find_samples, read_sample
from experiments.meshes.store import create_store, remove_partial, write_sample
from experiments.processes.workers import in_processes

_KINDS = ("surface", "volume")
REPORT = "report.json"
_LOCK = ".lock"


@dataclass(frozen=True)
class Options:
    """What is taken of every sample.

    Attributes:
        surface_fields: names of fields of surfaces; `None` for all.
        volume_fields: likewise of volumes.
        shuffle: put points into a random order, so that random subsets can be read alone.
        distances: compute signed distances of a volume's points from the STL.
    """

    surface_fields: tuple[str, ...] | None = None
    volume_fields: tuple[str, ...] | None = None
    shuffle: bool = True
    distances: bool = True


def convert(folder: Path, store: Path, options: Options, workers: int) -> list[dict[str, Any]]:
    """Converts every sample of a folder.

    Args:
        folder: of the files, see `experiments.meshes.samples.find_samples`.
        store: the store, made if missing.
        options: what is taken.
        workers: processes.

    Returns:
        For each sample what it held, or why it could not be converted; also in `report.json` in the
        store.

    Raises:
        FileNotFoundError: there is no folder.
        ValueError: it holds no samples, or the store is something else.
    """
    if workers < 1:
        raise ValueError(f"--workers: expected at least 1; got {workers}")
    sources = find_samples(folder)
    create_store(store)
    with _only_one_into(store):
        return _convert_all(folder, store, sources, options, workers)


def _only_one_into(store: Path) -> AbstractContextManager[None]:
    """Two conversions would remove each other's unfinished samples."""
    return locked(
        Path(store) / _LOCK,
        f"{store}: expected a store that no other conversion writes to; got one at work",
    )


def _convert_all(
    folder: Path, store: Path, sources: Sequence[Source], options: Options, workers: int
) -> list[dict[str, Any]]:
    rows, waiting, expected = [], [], None
    for source in sources:
        row = _unchanged(store, source, options)
        if row is None:
            waiting.append(source)
        else:
            rows.append(row)
            expected = expected or row["field_names"]
    with tqdm(total=len(sources), initial=len(rows), desc="Converting", unit="sample") as bar:
        # The first sample that can be read says which fields the others must have.
        while waiting and expected is None:
            row = _convert(store, waiting.pop(0), options, None)
            rows.append(row)
            bar.update()
            expected = row.get("field_names")
        tasks = [(store, source, options, expected) for source in waiting]
        for row in in_processes(_convert, tasks, workers):
            rows.append(row)
            bar.update()
    names = {source.name for source in sources}
    for name in sorted({child.name for child in sorted(Path(store).iterdir())} - names):
        if StoredSample.is_one(Path(store) / name):
            rows.append({"sample": name, "left": f"{Path(store) / name}: is not in {folder} (any "
                         "more), but will be trained on"})  # fmt: skip
    rows.sort(key=lambda row: row["sample"])
    write_json(Path(store) / REPORT, rows)
    return rows


def _convert(
    store: Path, source: Source, options: Options, expected: dict[str, list[str]] | None
) -> dict[str, Any]:
    """Converts one sample; the row of the report."""
    try:
        contents = read_sample(
            source,
            options.surface_fields,
            options.volume_fields,
            distances=options.distances,
        )
        names = _field_names(contents)
        if expected is not None and names != expected:
            raise ValueError(
                f"{source.name}: expected the fields of the samples before, {expected}; got {names}"
            )
        if options.shuffle:
            contents.shuffle(zlib.crc32(source.name.encode()))
        row = {"sample": source.name, "field_names": names, **_summary(contents)}
        attributes = contents.attributes | {
            "source": source.signature(),
            "options": _plain(options),
            "summary": row,
        }
        write_sample(store, source.name, contents.arrays, attributes)
    except (ValueError, OSError) as error:
        remove_partial(store, source.name)
        what = str(error) if not isinstance(error, OSError) or error.errno is None else (
            f"{source.name}: {os.strerror(error.errno)}"
            + (f": {error.filename}" if error.errno != errno.ENOSPC and error.filename else "")
        )  # fmt: skip
        return {"sample": source.name, "error": what}
    return row


def _unchanged(store: Path, source: Source, options: Options) -> dict[str, Any] | None:
    """The row of a sample that the store already has, made of these files in this way."""
    path = Path(store) / source.name
    if not path.is_dir():
        return None
    try:
        attributes = StoredSample(path).attributes
    except ValueError:
        return None
    made_of = attributes.get("source"), attributes.get("options")
    return attributes["summary"] if made_of == (source.signature(), _plain(options)) else None


def _plain(options: Options) -> dict[str, Any]:
    """The options as JSON gives them back."""
    return json.loads(json.dumps(asdict(options)))


def _field_names(contents: Contents) -> dict[str, list[str]]:
    return {
        kind: contents.attributes[f"{kind}_field_names"]
        for kind in _KINDS
        if f"{kind}_field_names" in contents.attributes
    }


def _summary(contents: Contents) -> dict[str, Any]:
    """Points of each kind, and the range of each field."""
    summary: dict[str, Any] = {}
    for kind in _KINDS:
        if f"{kind}_fields" not in contents.arrays:
            continue
        values = contents.arrays[f"{kind}_fields"]
        values = values.reshape(len(values), -1)
        columns = map(str, range(values.shape[1]))
        summary[f"{kind}_points"] = len(values)
        summary[f"{kind}_ranges"] = {
            name: [float(values[:, i].min()), float(values[:, i].max())]
            for i, name in enumerate(contents.attributes.get(f"{kind}_field_names", columns))
        }
    if "stl_faces" in contents.arrays:
        summary["stl_triangles"] = len(contents.arrays["stl_faces"]) // 3
    return summary


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """The report as text: points and triangles a sample, ranges over all samples, and errors."""
    good = [row for row in rows if "error" not in row and "left" not in row]
    lines = []
    if good:
        lines.append(f"{len(good)} samples:")
        for row in good:
            held = [f"{row[f'{kind}_points']:,} {kind} points" for kind in _KINDS
                    if f"{kind}_points" in row]  # fmt: skip
            held += [f"{row['stl_triangles']:,} triangles"] if "stl_triangles" in row else []
            lines.append(f"  {row['sample']}: {', '.join(held)}")
        for kind in _KINDS:
            ranges = [row[f"{kind}_ranges"] for row in good if f"{kind}_ranges" in row]
            for name in ranges[0] if ranges else ():
                both = np.array([each[name] for each in ranges])
                lines.append(f"  {kind} {name}: from {both.min():g} to {both.max():g}")
    lines += [f"note: {row['left']}" for row in rows if "left" in row]
    lines += [f"error: {row['error']}" for row in rows if "error" in row]
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.convert",
        description="Turns a folder of VTK, STL, HDF5, .npz and .npy files into a Zarr store.",
    )
    parser.add_argument(
        "folder", type=Path, help="the files: a subfolder or a name for each sample"
    )
    parser.add_argument("store", type=Path, help="the store, made if missing")
    for kind in _KINDS:
        parser.add_argument(
            f"--{kind}-fields", nargs="+", metavar="NAME", help=f"fields of a {kind}; default: all"
        )
    parser.add_argument(
        "--keep-order",
        action="store_true",
        help="keep the order of the points; random subsets then cost reading nearly all",
    )
    parser.add_argument(
        "--no-distances",
        action="store_true",
        help="do not compute signed distances of a volume's points from the STL",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    arguments = parser.parse_args()
    surface_fields, volume_fields = (
        None if names is None else tuple(names)
        for names in (arguments.surface_fields, arguments.volume_fields)
    )
    options = Options(
        surface_fields,
        volume_fields,
        shuffle=not arguments.keep_order,
        distances=not arguments.no_distances,
    )
    rows = convert(arguments.folder, arguments.store, options, arguments.workers)
    print(describe(rows))
    if all("error" in row for row in rows):
        raise ValueError(f"{arguments.folder}: expected samples that can be converted; got none")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    one_line_errors(main)
