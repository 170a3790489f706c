"""One of two processes with two devices each, for `test_data`.

`python two_processes.py PORT RANK FOLDER` prints, as JSON, which samples it read, what the devices
of both made of them, and which checkpoint in the folder it was left with.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

import parallel
from experiments.data.batches import Loader, whole_batches
from experiments.data.in_memory import GridSplit
from experiments.processes.coordination import all_or_none
from experiments.training.checkpoints import Checkpoints
from parallel.on_host import points_to_host
from parallel.placement import place, to_host

SAMPLES, POINTS, BATCH = 10, 5, 4
SPOILED = 3


class RecordingSplit(GridSplit):
    """A split that remembers which samples were asked of it."""

    def read(self, index, windows, seeds=(0,)):
        self.__dict__.setdefault("taken", []).append(index)
        return super().read(index, windows, seeds)


class SpoiledSplit(GridSplit):
    """A split of which one sample cannot be read by the second process."""

    def read(self, index, windows, seeds=(0,)):
        if index == SPOILED and jax.process_index() == 1:
            raise ValueError(f"sample {index}: expected readable values; got damaged ones")
        return super().read(index, windows, seeds)


def split(kind=RecordingSplit) -> GridSplit:
    """Samples that can be told apart; their points divide over nothing."""
    fx = np.arange(SAMPLES * POINTS, dtype=np.float32).reshape(SAMPLES, POINTS, 1)
    return kind(fx, np.linspace(0, 1, POINTS, dtype=np.float32)[:, None], -fx)


def held(array: jax.Array) -> list:
    """What the devices of this process hold: the place in the whole array, and the values."""
    return [
        [
            [[part.start, part.stop] for part in shard.index[:2]],
            np.asarray(shard.data)[..., 0].tolist(),
        ]
        for shard in array.addressable_shards
    ]


@jax.jit
def masked_sums(batch):
    """The sum over the real points of each sample: a reduction over devices of one process."""
    return parallel.masked_sum(batch.streams[0].fx, batch.streams[0].mask)[:, 0]


@jax.jit
def total(batch):
    """The sum over the real points of all samples: a reduction over both processes."""
    return parallel.masked_sum(batch.streams[0].fx, batch.streams[0].mask).sum()


def refusal() -> str:
    """What all processes are told of a file that the second alone cannot read."""

    def load() -> None:
        if jax.process_index() == 1:
            raise OSError("there is no such file")

    try:
        all_or_none(load)
    except ValueError as error:
        return str(error)
    return "none"


def newest_readable(folder: Path) -> tuple[int, list[float], list[str]]:
    """Saves two checkpoints, the newer of which the second process cannot read, and reads one."""
    checkpoints = Checkpoints(folder, keep=2)
    states = [{"a": place(np.full((1, 4, 1), step, np.float32))} for step in (1, 2)]
    for step, state in enumerate(states, 1):
        checkpoints.save(step, state, {}, None)
    checkpoints.settle()
    restore = ocp.PyTreeCheckpointHandler.restore

    def unreadable(self, directory, *arguments, **options):
        if jax.process_index() == 1 and directory.parent.name == "2":
            raise OSError("there is no such disk")
        return restore(self, directory, *arguments, **options)

    ocp.PyTreeCheckpointHandler.restore = unreadable
    step, state, _, problems = checkpoints.restore_newest(states[0])
    checkpoints.close()
    return step, to_host(state["a"]).ravel().tolist(), problems


def main(port: str, rank: str, folder: str) -> None:
    """Reads training and evaluation batches on a (2, 2, 1) mesh of both processes."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(rank))
    with jax.set_mesh(parallel.make_mesh(data=2, points=2)):
        rows = parallel.local_rows(BATCH)
        trained = split()
        loader = Loader(trained, BATCH, accumulate=1, seed=0, threads=0, structured_shape=None)
        batches = [next(loader)[0] for _ in range(3)]
        evaluated = split()
        counted = list(whole_batches(evaluated, BATCH, None))
        report = {
            "rows": [rows.start, rows.stop],
            "taken": np.reshape(trained.taken, (-1, 2))[:3].tolist(),
            "held": held(batches[0].streams[0].fx),
            "shape": batches[0].streams[0].fx.shape,
            "sums": [to_host(masked_sums(batch)).tolist() for batch in batches],
            "totals": [float(total(batch)) for batch in batches],
            "evaluated": np.reshape(evaluated.taken, (-1, 2)).tolist(),
            "evaluated_sums": [
                to_host(masked_sums(b))[: len(found)].tolist() for b, found in counted
            ],
        }
    # Both processes hold points of each sample.
    with jax.set_mesh(parallel.make_mesh(points=4)):
        loader = Loader(split(SpoiledSplit), BATCH, 1, 0, 1, None, skip_bad=True)
        embedded = [to_host(next(loader)[0].streams[0].fx)[:, :POINTS, 0] for _ in range(3)]
        report["without_spoiled"] = np.stack(embedded).tolist()
        # Five points of each shard, two at a time.
        numbered = place(np.arange(40, dtype=np.float32).reshape(1, 20, 2))
        report["points"] = points_to_host(numbered, 2).tolist()
        report["refusal"] = refusal()
        report["newest_readable"] = newest_readable(Path(folder))
        report["bad"] = {str(index): why for index, why in loader.bad.items()}
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
