"""What the scripts of this folder share: small runs of several processes, and how they compare."""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[folder]) for folder in (1, 2)]

import numpy as np  # noqa: E402
from commands import Result, compose, wait  # noqa: E402
from processes import (  # noqa: E402
    DARCY,
    PROCESSES,
    SMALL,
    killed,
    launch,
    start_each,
    wait_for_step,
)
from saved import saved_arrays, saved_steps  # noqa: E402

from experiments.datasets import load_dataset  # noqa: E402
from experiments.meshes.store import create_store, write_sample  # noqa: E402
from experiments.training.logs import read_log  # noqa: E402

# What scripts take from `tests/` comes by here, where the path to it is set.
__all__ = [
    "DARCY",
    "ON_STORE",
    "POINTS",
    "PROCESSES",
    "STEPS",
    "assert_same_bits",
    "killed",
    "launch",
    "line_with",
    "losses",
    "make_store",
    "saved_steps",
    "scratch",
    "start_each",
    "train",
    "train_and",
    "wait",
    "wait_for_step",
    "write_store_sample",
]

STEPS = 30


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for data, programs and runs, which goes at the end."""
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)


def train(cache: Path, folder: Path, *overrides, code: int = 0, **processes: int) -> Result:
    """Trains a run by `processes.launch` until it ends, with this exit code."""
    command = ["train", *overrides, f"hydra.run.dir={folder}"]
    if "data=surface" not in overrides:
        # A store is where it is.
        command.append(f"data.cache_dir={cache}")
    result = wait(launch(cache, *command, **processes), 500)
    assert result.code == code, f"exit code {result.code}\n{result.out}\n{result.err}"
    return result


def line_with(result: Result, *parts: str) -> str:
    """The one line of what was printed that has all of these parts, without its prefix."""
    lines = (result.out + result.err).splitlines()
    found = [line for line in lines if all(part in line for part in parts)]
    assert len(found) == 1, f"{len(found)} lines with {parts}\n{result.out}\n{result.err}"
    return found[0].partition("] ")[2]


def losses(folder: Path) -> np.ndarray:
    """The losses of a run's log."""
    return np.array([row["loss"] for row in read_log(folder) if "loss" in row])


def assert_same_bits(folder: Path, whole: Path, step: int = STEPS) -> None:
    """Two runs have the same log and, at a step, the same arrays, bit by bit."""
    expected, actual = saved_arrays(whole, step), saved_arrays(folder, step)
    assert actual.keys() == expected.keys()
    for path, values in expected.items():
        assert np.array_equal(actual[path], values, equal_nan=True), path
    assert (folder / "log.jsonl").read_text() == (whole / "log.jsonl").read_text()


# A store whose samples go bad while they are trained on: 4 of 6 train, 2 in a batch.
POINTS = 20_000
ON_STORE = [
    *SMALL,
    *("model=flare", "data=surface", "data.geometry=[]", "data.resolution=4000"),
    *("data.validation=1", "data.test=1", "train.batch_size=2", "train.checkpoint_every=10"),
]


def make_store(path: Path) -> list[str]:
    """Writes the store, whose clouds lie in three chunks each; the names of its training samples.

    Of the points that are drawn of a sample each process reads its own, in one chunk or two.
    """
    create_store(path)
    for number in range(6):
        draw = np.random.default_rng(number)
        write_store_sample(path, f"run_{number}", draw.random((POINTS, 1), np.float32))
    config = compose(*ON_STORE, f"data.path={path}").data
    return list(load_dataset(config).splits["train"].names)


def write_store_sample(path: Path, name: str, fields: np.ndarray) -> None:
    """Writes a sample of the store, in the place of that of the same name."""
    draw = np.random.default_rng(0)
    arrays = {"surface_mesh_centers": draw.random((POINTS, 3), np.float32)}
    arrays |= {"surface_normals": draw.random((POINTS, 3), np.float32), "surface_fields": fields}
    write_sample(path, name, arrays, {"surface_field_names": ["p"], "shuffled": ["surface"]})


def train_and(
    spoil: Callable[[], None], cache: Path, folder: Path, *overrides, processes: int
) -> Result:
    """Trains on a store that is spoiled at step 12, until the run ends."""
    command = ("train", *overrides, f"hydra.run.dir={folder}")
    run = launch(cache, *command, processes=processes, devices=1)
    try:
        wait_for_step([run], folder, 12)
        spoil()
        return wait(run, 500)
    finally:
        run.terminate()
