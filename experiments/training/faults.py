"""What goes wrong in a run that it can survive, and what it then leaves to look at."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.data.batch import Sample
from experiments.data.batches import Loader
from experiments.data.dataset import Split
from experiments.files import locked, write_atomically

LOCK = ".lock"


@contextlib.contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a folder; the system opens it again however this one ends.

    Raises:
        ValueError: another run is in it.
    """
    if jax.process_index() != 0:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    refusal = f"{folder}: expected a folder that no other run is in; another process trains there"
    with locked(folder / LOCK, refusal):
        yield


def bad_step(folder: Path, split: Split, loader: Loader, step: int) -> str:
    """Writes the batches of a step whose loss or gradient was not finite, for a look.

    Each process writes what it reads.

    Returns:
        The samples of the step and the file.
    """
    names = [str(split.names[index]) for index in loader.samples_of(step)]
    name = f"nonfinite_step_{step}" + ("_process_{}" if jax.process_count() > 1 else "") + ".npz"
    arrays: dict[str, Any] = _arrays(loader.read_again(step))
    path = folder / name.format(jax.process_index())
    write_atomically(path, lambda temporary: np.savez(temporary, **arrays))
    # The same line in all processes, of which one tells it.
    return f"samples {', '.join(names)}; the batch is in {name.format('*')}"


def _arrays(batches: Sequence[dict[int, Sample]]) -> dict[str, np.ndarray]:
    """What was read of samples, by batch, place and stream: `0.3.embedding`."""
    arrays = {}
    for batch, samples in enumerate(batches):
        for row, sample in samples.items():
            for stream, cloud in enumerate(sample.clouds):
                own = f"{batch}.{row}." if len(sample.clouds) == 1 else f"{batch}.{row}.{stream}."
                for name in ("embedding", "target", "fx", "positions"):
                    arrays[own + name] = getattr(cloud, name)
            for name in ("geometry", "global_embedding"):
                arrays[f"{batch}.{row}.{name}"] = getattr(sample, name)
    return {name: values for name, values in arrays.items() if values is not None}
