"""Data sets of the Darcy problem: samples made by the solver, split, and kept on disk."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float32
from tqdm import tqdm

from experiments.problems.array_cache import read_arrays, require_folder, write_arrays
from experiments.problems.darcy import (
    COSINE_MODES,
    COVARIANCE_SHIFT,
    FORCING,
    MINIMUM_RESOLUTION,
    PERMEABILITY_HIGH,
    PERMEABILITY_LOW,
    DarcyArrays,
    cell_centres,
    sample_permeability,
    solve_darcy,
)
from experiments.problems.splits import require_integer, split_slices

_CACHE_FORMAT = 1
_NAMES = ("permeability", "pressure")


def load_darcy(
    resolution: int,
    splits: Mapping[str, int],
    seed: int,
    cache_dir: Path,
    progress: bool = True,
) -> dict[str, DarcyArrays]:
    """Make the benchmark's samples, or read them from the cache of an earlier call.

    Samples are solved one after another: 1,300 take about 7 s at 32 x 32 and 70 s at 128 x 128,
    once. The cache is one `.npz` file for each resolution, seed and total count. It appears under
    its name only when complete, so processes may be killed, or make the same cache at once.

    Args:
        resolution: cells per side, `r >= 4`.
        splits: samples in each of "train", "validation" and "test" (any of them may be absent),
            each `>= 1`; splits take consecutive sample indices in this order.
        seed: seed of the data set, `>= 0`.
        cache_dir: folder of the cache, made if missing.
        progress: whether to draw a progress bar while solving.

    Returns:
        The arrays of each split that `splits` names, at the points of `cell_centres`.

    Raises:
        ValueError: a bad argument, or a cache file that is truncated, altered or of another
            problem.
        NotADirectoryError: `cache_dir` is a file.
        RuntimeError: a sample was not solved to a relative residual of 1e-10; names the sample.
    """
    require_integer("resolution", resolution, MINIMUM_RESOLUTION)
    require_integer("seed", seed, 0)
    slices = split_slices(splits)
    count = max(rows.stop for rows in slices.values())
    path = require_folder(cache_dir) / f"darcy_r{resolution}_seed{seed}_n{count}.npz"
    meta = _describe_samples(resolution, seed, count)
    if path.exists():
        arrays = read_arrays(path, meta, _NAMES, "Darcy")
    else:
        samples = _make_samples(resolution, seed, count, progress)
        arrays = dict(zip(_NAMES, samples, strict=True))
        write_arrays(path, meta, arrays)
    coordinates = cell_centres(resolution)
    return {
        name: DarcyArrays(arrays["permeability"][rows], arrays["pressure"][rows], coordinates)
        for name, rows in slices.items()
    }


def _describe_samples(resolution: int, seed: int, count: int) -> str:
    """All that the samples depend on, as JSON."""
    meta = {
        "format": _CACHE_FORMAT,
        "resolution": int(resolution),
        "seed": int(seed),
        "count": count,
        "permeability": [PERMEABILITY_LOW, PERMEABILITY_HIGH],
        "covariance_shift": COVARIANCE_SHIFT,
        "cosine_modes": COSINE_MODES,
        "forcing": FORCING,
    }
    return json.dumps(meta, sort_keys=True)


def _make_samples(
    resolution: int, seed: int, count: int, progress: bool
) -> tuple[Float32[np.ndarray, "n r r"], Float32[np.ndarray, "n r r"]]:
    """Permeability and pressure of samples 0 to `count - 1`."""
    permeability = np.empty((count, resolution, resolution), np.float32)
    pressure = np.empty_like(permeability)
    description = f"Darcy {resolution} x {resolution}"
    for index in tqdm(range(count), description, unit="sample", disable=not progress):
        sample = sample_permeability(resolution, seed, index)
        try:
            pressure[index] = solve_darcy(sample)
        except RuntimeError as error:
            raise RuntimeError(
                f"Darcy sample {index} (resolution {resolution}, seed {seed}): {error}"
            ) from error
        permeability[index] = sample
    return permeability, pressure
