"""`python -m benchmarks.loading`: how much of a training step is spent waiting for data.

A store of random clouds is read while a model trains on it: whole clouds, or random subsets. What
is read is in the system's cache; a slow disk is tried by `--store`, with a folder on it.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.large_sample import STREAM, make_sample
from experiments.building import build_model
from experiments.cli import one_line_errors
from experiments.configuration.schema import MODELS, OptimizerConfig, StoreConfig
from experiments.data.batches import Loader
from experiments.datasets import load_dataset
from experiments.files import write_json
from experiments.training.optimizer import make_optimizer
from experiments.training.steps import initial_state, make_step

_SAMPLES = 8


def measure(folder: Path, resolution: int | None, options: argparse.Namespace) -> dict:
    """Seconds of a step, and of them those spent waiting for the loader."""
    config = StoreConfig(path=str(folder), streams={"points": STREAM}, resolution=resolution)
    dataset = load_dataset(config)
    widths: dict[str, Any] = dict(n_layers=4, n_hidden=64, n_head=4, slice_num=32, mlp_ratio=2)
    model = build_model(MODELS[options.model](name=options.model, **widths), dataset.description, 0)
    optimizer = make_optimizer(OptimizerConfig(), options.steps)
    state = initial_state(model, optimizer, dataset.statistics(), 0, average=False)
    loader = Loader(dataset.splits["train"], 1, 1, 0, options.threads, None)
    step = make_step(model, optimizer, None, state)
    state, metrics = step(state, next(loader))
    jax.block_until_ready(metrics)
    loader.waited, started = 0.0, time.perf_counter()
    for _ in range(options.steps):
        state, metrics = step(state, next(loader))
        # As a step that is logged does: otherwise the host runs ahead, and waits for nothing.
        jax.block_until_ready(metrics)
    seconds = time.perf_counter() - started
    return {
        "points": options.points,
        "resolution": resolution,
        "step_s": seconds / options.steps,
        "waiting_s": loader.waited / options.steps,
        "waiting_share": loader.waited / seconds,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__)
    parser.add_argument("--points", type=int, default=200_000, help="of a sample in the store")
    parser.add_argument("--resolution", type=int, default=50_000, help="points drawn of a sample")
    parser.add_argument("--model", choices=MODELS, default="flare")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1, help="that read")
    parser.add_argument("--store", type=Path, help="folder that the store is written into")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.store) as folder:
        for i in range(_SAMPLES):
            make_sample(Path(folder), f"sample_{i}", options.points)
        rows = [measure(Path(folder), count, options) for count in (None, options.resolution)]
    print("| points | of them a step | step s | waiting s | share |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(
            f"| {row['points']:,} | {row['resolution'] or row['points']:,} | {row['step_s']:.3f} | "
            f"{row['waiting_s']:.4f} | {100 * row['waiting_share']:.2f} % |"
        )
    if options.json is not None:
        write_json(options.json, rows)


if __name__ == "__main__":
    one_line_errors(main)
