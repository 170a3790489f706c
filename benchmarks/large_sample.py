"""`python -m benchmarks.large_sample`: statistics and prediction of one sample of many points.

Each size is a process of its own, whose peak of memory is read when it ends. The model has weights
as they are drawn: what it predicts means nothing, and costs what it costs.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from experiments.building import build_model
from experiments.cli import one_line_errors
from experiments.configuration.schema import MODELS, StoreConfig, StreamConfig
from experiments.data.dataset import Dataset
from experiments.files import write_json
from experiments.meshes.dataset import StoreSplit
from experiments.meshes.sample_arrays import StoredSample
from experiments.meshes.store import write_sample
from experiments.results.whole_cloud import WholeCloud

_NAME = "sample"
_FIELDS = ("p", "U_x", "U_y", "U_z")
_BLOCK = 2**20
_POINTS = (5_000_000, 10_000_000, 20_000_000)


STREAM = StreamConfig(embedding=["volume_mesh_centers"], targets=["volume_fields"])


def make_sample(folder: Path, name: str, points: int) -> None:
    """Writes a sample of a smooth field at random points of a cube."""
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    centers = np.empty((points, 3), np.float32)
    fields = np.empty((points, len(_FIELDS)), np.float32)
    for start in range(0, points, _BLOCK):
        rows = slice(start, min(start + _BLOCK, points))
        centers[rows] = draw.uniform(-1, 1, (rows.stop - rows.start, 3))
        waves = np.sin(3 * centers[rows])
        fields[rows] = np.concatenate([waves.prod(1, keepdims=True), waves], axis=1)
    arrays = {"volume_mesh_centers": centers, "volume_fields": fields}
    attributes = {"volume_field_names": list(_FIELDS), "shuffled": ["volume"]}
    write_sample(folder, name, arrays, attributes)


def measure(folder: Path, model: str, hidden: int) -> dict:
    """Seconds of statistics and of prediction, and the peak of memory of this process."""
    config = StoreConfig(path=str(folder), streams={"volume": STREAM})
    split = StoreSplit([StoredSample(folder / _NAME)], config)
    dataset = Dataset({"train": split}, split.description)

    started = time.perf_counter()
    statistics = dataset.statistics()
    seconds = {"statistics_s": time.perf_counter() - started}
    options: dict[str, Any] = dict(n_layers=4, n_hidden=hidden, n_head=4, slice_num=32, mlp_ratio=2)
    made = build_model(MODELS[model](name=model, **options), split.description, 0)
    made.eval()
    whole = WholeCloud(made, statistics)
    started = time.perf_counter()
    (fields,), _ = whole.predict(split.whole(0))
    seconds["prediction_s"] = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"points": len(fields), "model": model, "hidden": hidden, **seconds, "peak_bytes": peak}


def table(rows: list[dict]) -> str:
    """The figures as a Markdown table."""
    lines = [
        "| model | width | points | statistics s | prediction s | points/s | peak GiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [
            row["model"],
            row["hidden"],
            f"{row['points']:,}",
            f"{row['statistics_s']:.1f}",
            f"{row['prediction_s']:.1f}",
            f"{row['points'] / row['prediction_s']:,.0f}",
            f"{row['peak_bytes'] / 2**30:.2f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_sample", description=__doc__)
    parser.add_argument(
        "--points", nargs="+", type=int, default=[5_000_000, 10_000_000, 20_000_000]
    )
    parser.add_argument("--model", choices=MODELS, default="flare")
    parser.add_argument("--hidden", type=int, default=64, help="width of the points")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.store is not None:
        print(json.dumps(measure(options.store, options.model, options.hidden)))
        return
    rows = []
    for points in options.points:
        with tempfile.TemporaryDirectory() as folder:
            make_sample(Path(folder), _NAME, points)
            command = [sys.executable, "-m", "benchmarks.large_sample", "--store", folder]
            command += ["--model", options.model, "--hidden", str(options.hidden)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(table(rows[-1:]), flush=True)
    print(f"\n{table(rows)}")
    if options.json is not None:
        write_json(options.json, rows)


if __name__ == "__main__":
    one_line_errors(main)
