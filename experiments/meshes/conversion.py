"""A folder of simulation files converted into a Zarr store, sample by sample."""

import errno
import json
import os
import shutil
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.files import locked, write_json
from experiments.meshes.sample_arrays import StoredSample
from experiments.meshes.samples import Contents, Source, find_samples, read_sample
from experiments.meshes.store import create_store, remove_partial, write_sample
from experiments.processes.workers import in_processes

_KINDS = ("surface", "volume")
REPORT = "report.json"
_LOCK = ".lock"
# Samples that a line names.
_NAMED = 5


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
        For each sample what it held (`field_names` and more) or why it could not be converted
        (`error`), and what else there is to tell (`note`); also in `report.json` in the store. A
        new store that no sample went into is removed again.

    Raises:
        FileNotFoundError: there is no folder.
        ValueError: it holds no samples, or the store is something else.
    """
    if workers < 1:
        raise ValueError(f"--workers: expected at least 1; got {workers}")
    sources = find_samples(folder)
    is_new = not Path(store).exists()
    create_store(store)
    with _only_one_into(store):
        rows = _convert_all(folder, store, sources, options, workers)
        if is_new and not any("field_names" in row for row in rows):
            shutil.rmtree(store)
    return rows


def _only_one_into(store: Path) -> AbstractContextManager[None]:
    """Two conversions would remove each other's unfinished samples."""
    return locked(
        Path(store) / _LOCK,
        f"{store}: expected a store that no other conversion writes to; got one at work",
    )


def _convert_all(
    folder: Path, store: Path, sources: Sequence[Source], options: Options, workers: int
) -> list[dict[str, Any]]:
    rows, waiting, expected, otherwise = [], [], None, []
    for source in sources:
        row, same_options = _unchanged(store, source, options)
        if row is not None and same_options:
            rows.append(row)
            expected = expected or row["field_names"]
            continue
        waiting.append(source)
        otherwise += [source.name] * (row is not None)
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
            rows.append({"sample": name, "note": f"{Path(store) / name}: is not in {folder} (any "
                         "more), but will be trained on"})  # fmt: skip
    if otherwise:
        rows.append({"sample": otherwise[0], "note": f"{_listed(otherwise)}: unchanged, but were "
                     "converted with other options; converted again"})  # fmt: skip
    if len(sources) == 1:
        rows += _of_one(folder, sources[0], rows)
    rows.sort(key=lambda row: row["sample"])
    write_json(Path(store) / REPORT, rows)
    return rows


def _of_one(folder: Path, source: Source, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A folder above that of the samples looks like one sample of many patches."""
    files = max((row.get(f"{kind}_files", 1) for row in rows for kind in _KINDS), default=1)
    if files == 1:
        return []
    where = Path(folder) / source.name
    note = f"{where}: {files} files became one sample; if each is one, convert {where}"
    return [{"sample": source.name, "note": note}]


def _listed(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    few = ", ".join(names[:_NAMED])
    return few if len(names) <= _NAMED else f"{few} and {len(names) - _NAMED} more"


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
                f"{source.name}: expected the fields of the samples before, {_words(expected)}; "
                f"got {_words(names)}"
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


def _unchanged(store: Path, source: Source, options: Options) -> tuple[dict[str, Any] | None, bool]:
    """The row of a sample that the store has of these files, and whether with these options."""
    path = Path(store) / source.name
    if not path.is_dir():
        return None, False
    try:
        attributes = StoredSample(path).attributes
    except ValueError:
        return None, False
    row = attributes["summary"] if attributes.get("source") == source.signature() else None
    return row, attributes.get("options") == _plain(options)


def _plain(options: Options) -> dict[str, Any]:
    """The options as JSON gives them back."""
    return json.loads(json.dumps(asdict(options)))


def _field_names(contents: Contents) -> dict[str, list[str]]:
    return {
        kind: contents.attributes[f"{kind}_field_names"]
        for kind in _KINDS
        if f"{kind}_field_names" in contents.attributes
    }


def _words(names: dict[str, list[str]]) -> str:
    return " and ".join(
        f"{', '.join(own) or 'none'} of a {kind}" for kind, own in names.items()
    ) or "none"  # fmt: skip


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
        summary[f"{kind}_files"] = len(contents.parts.get(kind, ())) or 1
        summary[f"{kind}_ranges"] = {
            name: [float(values[:, i].min()), float(values[:, i].max())]
            for i, name in enumerate(contents.attributes.get(f"{kind}_field_names", columns))
        }
    if "stl_faces" in contents.arrays:
        summary["stl_triangles"] = len(contents.arrays["stl_faces"]) // 3
    return summary


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """The report as text: points and triangles a sample, ranges over all samples, and errors.

    Errors that differ in the place alone are one line.
    """
    good = [row for row in rows if "field_names" in row]
    lines = []
    if good:
        lines.append(f"{len(good)} samples:")
        for row in good:
            held = [_held(row, kind) for kind in _KINDS if f"{kind}_points" in row]
            held += [f"{row['stl_triangles']:,} triangles"] if "stl_triangles" in row else []
            lines.append(f"  {row['sample']}: {', '.join(held)}")
        for kind in _KINDS:
            ranges = [row[f"{kind}_ranges"] for row in good if f"{kind}_ranges" in row]
            for name in ranges[0] if ranges else ():
                both = np.array([each[name] for each in ranges])
                lines.append(f"  {kind} {name}: from {both.min():g} to {both.max():g}")
    lines += [f"note: {row['note']}" for row in rows if "note" in row]
    alike: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "error" in row:
            alike.setdefault(row["error"].partition(": ")[2], []).append(row)
    for first, *others in alike.values():
        likewise = f" (likewise {_listed([row['sample'] for row in others])})" if others else ""
        lines.append(f"error: {first['error']}{likewise}")
    return "\n".join(lines)


def _held(row: dict[str, Any], kind: str) -> str:
    files = row.get(f"{kind}_files", 1)
    return f"{row[f'{kind}_points']:,} {kind} points" + (f" of {files} files" if files > 1 else "")
