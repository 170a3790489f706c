"""What is computed once of the samples of a store, and kept in a folder beside it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from experiments.files import locked
from experiments.meshes.groups import METADATA
from experiments.meshes.sample_arrays import StoredSample
from experiments.meshes.store import Store, create_store, write_sample
from experiments.processes.coordination import wait_for_all

_OF = "found_of"


def kept_beside(
    samples: Sequence[StoredSample],
    compute: Callable[[int], Mapping[str, np.ndarray]],
    name: str,
    part: str = "",
    *,
    doing: str,
    hint: str,
) -> list[StoredSample]:
    """Arrays of samples from a folder, where those that are missing or too old are computed first.

    On several hosts one of them does that, and the others wait.

    Args:
        samples: of one store, at least one.
        compute: the arrays of a sample, from its place among `samples`.
        name: of the folder, after that of the store: `STORE.NAME`; made if missing.
        part: a folder in it, where the arrays depend on more than the samples.
        doing: what is done, for the progress bar.
        hint: what the folder is for, or how to do without it, where it cannot be written.

    Returns:
        For each sample what was computed of it.

    Raises:
        ValueError: the folder cannot be written.
    """
    store = samples[0].path.resolve().parent
    beside = store.with_name(f"{store.name}.{name}")
    folder = beside / part
    if jax.process_index() == 0:
        try:
            _fill(folder, samples, compute, doing)
        except OSError as error:
            raise ValueError(
                f"{beside}: expected a folder that can be written, {hint}; got {error.strerror}"
            ) from error
    wait_for_all("kept_beside")
    found = Store(folder)
    return [found.sample(sample.name) for sample in samples]


def _fill(
    folder: Path,
    samples: Sequence[StoredSample],
    compute: Callable[[int], Mapping[str, np.ndarray]],
    doing: str,
) -> None:
    if not _missing(folder, samples):
        return
    folder.parent.mkdir(exist_ok=True)
    # Other jobs that fill the folder would remove the files of this one.
    with locked(folder.with_name(f".{folder.name}.lock")):
        create_store(folder)
        for index in tqdm(_missing(folder, samples), desc=doing, unit="sample"):
            attributes = {_OF: _signature(samples[index])}
            write_sample(folder, samples[index].name, compute(index), attributes)


def _missing(folder: Path, samples: Sequence[StoredSample]) -> list[int]:
    return [i for i, sample in enumerate(samples) if not _is_there(folder, sample)]


def _is_there(folder: Path, sample: StoredSample) -> bool:
    try:
        kept = StoredSample(folder / sample.name)
    except ValueError:
        return False
    return kept.attributes.get(_OF) == _signature(sample)


def _signature(sample: StoredSample) -> list[int]:
    """What changes when a sample, or an array of it, is written anew."""
    folders = [sample.path, *(sample.path / name for name in sample.names)]
    files = [folder / name for folder in folders for name in METADATA]
    return [file.stat().st_mtime_ns for file in files if file.is_file()]
