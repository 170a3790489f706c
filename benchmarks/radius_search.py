"""`python -m benchmarks.radius_search`: time and memory of a radius search on one device.

Queries and points are uniform in a cube. The same search by SciPy's k-d tree stands beside it, and
the neighbours of some queries are compared with those found by comparing all pairs.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from scipy.spatial import cKDTree

import parallel
from benchmarks.memory import peak_mib
from experiments.cli import one_line_errors

_CHECKED = 1000
Result = TypeVar("Result")


def _timed(function: Callable[[], Result]) -> tuple[float, Result]:
    start = time.perf_counter()
    result = jax.block_until_ready(function())
    return time.perf_counter() - start, result


def _by_all_pairs(query: np.ndarray, points: np.ndarray, radius: float, count: int) -> np.ndarray:
    """Indices of one query's neighbours, by definition."""
    difference = query - points
    x, y, z = (difference * difference).T
    squares = x + y + z
    near = np.flatnonzero(np.sqrt(squares) <= np.float32(radius))
    order = np.argsort(squares[near], kind="stable")[:count]
    return np.pad(near[order], (0, count - len(order)), constant_values=-1)


def measure(queries: int, points: int, count: int, radius: float, size: float, seed: int) -> dict:
    """What one search takes.

    Args:
        queries: number of queries.
        points: number of points.
        count: slots for the neighbours of a query.
        radius: radius of the search.
        size: edge of the cube.
        seed: seed of the coordinates.

    Returns:
        Seconds, MiB and numbers, by name.

    Raises:
        RuntimeError: a checked query has other neighbours than by comparing all pairs.
    """
    draw = np.random.default_rng(seed)
    query_cloud = size * draw.random((1, queries, 3), np.float32)
    cloud = size * draw.random((1, points, 3), np.float32)
    # The device and the compiler are loaded before memory is counted.
    on_device, searched = jax.block_until_ready(jax.device_put((query_cloud, cloud)))
    search = partial(parallel.radius_search, on_device, searched, radius, count)
    before = peak_mib()
    first = _timed(search)[0]
    second, found = _timed(search)
    peak = peak_mib() - before

    indices = np.asarray(found.indices[0])
    checked = draw.choice(queries, min(queries, _CHECKED), replace=False)
    for i in checked:
        expected = _by_all_pairs(query_cloud[0, i], cloud[0], radius, count)
        if not np.array_equal(indices[i], expected):
            raise RuntimeError(f"query {i}: expected neighbours {expected}; got {indices[i]}")

    tree_seconds, _ = _timed(
        lambda: cKDTree(cloud[0]).query(query_cloud[0], count, distance_upper_bound=radius)
    )
    return {
        "queries": queries,
        "points": points,
        "count": count,
        "radius": radius,
        "size": size,
        "first_call_s": first,
        "second_call_s": second,
        "peak_mib": peak,
        "mean_found": float((indices >= 0).sum(-1).mean()),
        "checked": len(checked),
        "kd_tree_s": tree_seconds,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.radius_search", description=__doc__)
    parser.add_argument("--queries", type=int, default=200_000)
    parser.add_argument("--points", type=int, default=300_000)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--radius", type=float, default=0.05)
    parser.add_argument("--size", type=float, default=1.0, help="edge of the cube")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = vars(parser.parse_args())
    file = options.pop("json")
    figures = measure(**options)
    print(
        f"{figures['queries']:,} queries, {figures['points']:,} points in a cube of edge "
        f"{figures['size']:g}, radius {figures['radius']:g}, count {figures['count']}, float32, "
        f"{jax.devices()[0].device_kind}; {figures['checked']:,} queries equal all pairs\n"
    )
    print("| what | figure |\n| --- | ---: |")
    print(f"| first call, compiled | {figures['first_call_s']:.2f} s |")
    print(f"| second call | {figures['second_call_s']:.2f} s |")
    print(f"| SciPy's k-d tree, built and searched | {figures['kd_tree_s']:.2f} s |")
    print(f"| peak memory above what was there before | {figures['peak_mib']:,.0f} MiB |")
    print(f"| neighbours found, mean | {figures['mean_found']:.1f} |")
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    one_line_errors(main)
