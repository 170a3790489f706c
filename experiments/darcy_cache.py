"""Data sets of the Darcy problem: samples made by the solver, split, and kept on disk."""

import hashlib
import json
import os
import uuid
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float32
from tqdm import tqdm

from experiments.darcy import (
    COSINE_MODES,
    COVARIANCE_SHIFT,
    FORCING,
    MINIMUM_RESOLUTION,
    PERMEABILITY_HIGH,
    PERMEABILITY_LOW,
    DarcyArrays,
    cell_centres,
    require_integer,
    sample_permeability,
    solve_darcy,
    split_slices,
)

_CACHE_FORMAT = 1


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
    cache_dir = Path(cache_dir)
    if cache_dir.exists() and not cache_dir.is_dir():
        raise NotADirectoryError(f"cache_dir: expected a folder, got the file {cache_dir}")

    path = cache_dir / f"darcy_r{resolution}_seed{seed}_n{count}.npz"
    meta = _describe_samples(resolution, seed, count)
    if path.exists():
        permeability, pressure = _read_cache(path, meta)
    else:
        permeability, pressure = _make_samples(resolution, seed, count, progress)
        _write_cache(path, meta, permeability, pressure)
    coordinates = cell_centres(resolution)
    return {
        name: DarcyArrays(permeability[rows], pressure[rows], coordinates)
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


def _checksum(
    meta: str,
    permeability: Float32[np.ndarray, "n r r"],
    pressure: Float32[np.ndarray, "n r r"],
) -> str:
    digest = hashlib.sha256(meta.encode())
    for array in (permeability, pressure):
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def _write_cache(
    path: Path,
    meta: str,
    permeability: Float32[np.ndarray, "n r r"],
    pressure: Float32[np.ndarray, "n r r"],
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own for each writer, in the folder where a rename is atomic.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("xb") as file:
            np.savez(
                file,
                meta=np.array(meta),
                sha256=np.array(_checksum(meta, permeability, pressure)),
                permeability=permeability,
                pressure=pressure,
            )
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _read_cache(
    path: Path, expected_meta: str
) -> tuple[Float32[np.ndarray, "n r r"], Float32[np.ndarray, "n r r"]]:
    def bad_cache(what: str) -> ValueError:
        return ValueError(f"Darcy cache {path}: {what}; delete it to make it again")

    if not zipfile.is_zipfile(path):
        raise bad_cache("expected a complete .npz archive, got a truncated or foreign file")
    try:
        with np.load(path, allow_pickle=False) as archive:
            meta, checksum = str(archive["meta"]), str(archive["sha256"])
            permeability, pressure = archive["permeability"], archive["pressure"]
        altered = _checksum(meta, permeability, pressure) != checksum
    except Exception as error:  # damaged bytes reach many decoders, each with errors of its own
        raise bad_cache(f"expected a readable Darcy archive, got {error!r}") from error
    if altered:
        raise bad_cache("expected arrays that match their SHA-256 checksum, got altered ones")
    if meta != expected_meta:
        raise bad_cache(f"expected samples of {expected_meta}, got {meta}")
    return permeability, pressure
