"""One of two processes with two devices each, for `test_data`: `python two_processes.py PORT RANK`.

It prints, as JSON, which samples it read and what the devices of both made of them.
"""

import json
import sys

import jax
import numpy as np

import parallel
from experiments.batches import Loader, whole_batches
from experiments.data import GridSplit
from parallel.points import to_host

SAMPLES, POINTS, BATCH = 10, 5, 4


class RecordingSplit(GridSplit):
    """A split that remembers which samples were asked of it."""

    def read(self, index, windows, seeds=(0,)):
        self.__dict__.setdefault("taken", []).append(index)
        return super().read(index, windows, seeds)


def split() -> RecordingSplit:
    """Samples that can be told apart; their points divide over nothing."""
    fx = np.arange(SAMPLES * POINTS, dtype=np.float32).reshape(SAMPLES, POINTS, 1)
    return RecordingSplit(fx, np.linspace(0, 1, POINTS, dtype=np.float32)[:, None], -fx)


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


def main(port: str, rank: str) -> None:
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
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
