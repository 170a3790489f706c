"""Darcy flow through a two-valued random medium, made by a finite-volume solver or read from file.

The benchmark of FLARE (arXiv 2508.12594) and Transolver (arXiv 2402.02366), first posed for the
Fourier neural operator (arXiv 2010.08895, section 5.2 and appendix A.3): given the permeability
`a`, predict the pressure `u` of `-div(a grad u) = 1` on the unit square with `u = 0` on its
boundary. All quantities are dimensionless.

Nothing here needs an accelerator. Samples may be made by worker processes, which import this
module alone.
"""

import functools
import hashlib
import json
import multiprocessing
import os
import sys
import types
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

import h5py
import numpy as np
import scipy.io
from numpy.typing import NDArray
from scipy.sparse import csc_array, diags_array
from scipy.sparse.linalg import splu
from tqdm import tqdm

PERMEABILITY_LOW = 3.0
PERMEABILITY_HIGH = 12.0
FORCING = 1.0

_MINIMUM_RESOLUTION = 4
_COVARIANCE_SHIFT = 9.0
# Modes per axis. Fixed, so that a sample is one function whatever grid it is evaluated on.
_COSINE_MODES = 256
_RESIDUAL_LIMIT = 1e-10
# About two seconds of work on one core; with less, starting a worker costs more than it saves.
_CELLS_PER_WORKER = 64 * 128 * 128
_SPLIT_ORDER = ("train", "validation", "test")
_CACHE_FORMAT = 1


@dataclass(frozen=True)
class DarcyArrays:
    """Samples of one split on an `r x r` grid, axis 0 of the grid along x and axis 1 along y.

    Attributes:
        permeability: `(n, r, r)` float32, dimensionless.
        pressure: `(n, r, r)` float32, dimensionless.
        coordinates: `(r*r, 2)` float32, (x, y) of each point in units of the square's side,
            in the order of `permeability[i].reshape(-1)`.
    """

    permeability: NDArray[np.float32]
    pressure: NDArray[np.float32]
    coordinates: NDArray[np.float32]


def cell_centres(resolution: int) -> NDArray[np.float32]:
    """Centres of the cells of a uniform grid on the unit square, row-major in ("i", "j").

    Args:
        resolution: cells per side, `r >= 4`.

    Returns:
        `(r*r, 2)` float32, (x, y) in units of the square's side.

    Raises:
        ValueError: `resolution` is not an integer of at least 4.
    """
    _require_integer("resolution", resolution, _MINIMUM_RESOLUTION)
    return _grid_points(_centre_axis(resolution))


def sample_permeability(resolution: int, seed: int, index: int) -> NDArray[np.float64]:
    """Permeability of one sample: a Gaussian random field, cut at zero into 3 and 12.

    The field has covariance `(-Laplacian + 9 I)^-2` with zero Neumann boundary
    (arXiv 2010.08895, appendix A.3), without its constant mode, as in the benchmark's published
    data. It is a series of 256 x 256 cosines whose coefficients depend on `(seed, index)` alone,
    evaluated exactly at the cell centres: grids of different resolution see the same function.

    Args:
        resolution: cells per side, `r >= 4`.
        seed: seed of the data set, `>= 0`.
        index: which sample of the data set, `>= 0`; no other sample is needed to make it.

    Returns:
        `(r, r)` float64, each value 3 or 12 (dimensionless), at the points of `cell_centres`.

    Raises:
        ValueError: an argument is not an integer or is too small.
    """
    _require_integer("resolution", resolution, _MINIMUM_RESOLUTION)
    _require_integer("seed", seed, 0)
    _require_integer("index", index, 0)
    seeds = np.random.SeedSequence(int(seed), spawn_key=(int(index),))
    white_noise = np.random.default_rng(seeds).standard_normal((_COSINE_MODES, _COSINE_MODES))

    wavenumbers = np.pi * np.arange(_COSINE_MODES)
    laplacian = wavenumbers[:, None] ** 2 + wavenumbers[None, :] ** 2
    coefficients = white_noise / (laplacian + _COVARIANCE_SHIFT)
    coefficients[0, 0] = 0.0

    cosines = np.cos(np.outer(_centre_axis(resolution), wavenumbers))
    cosines[:, 1:] *= np.sqrt(2.0)  # orthonormal on the unit interval
    field = cosines @ coefficients @ cosines.T
    return np.where(field >= 0.0, PERMEABILITY_HIGH, PERMEABILITY_LOW)


def solve_darcy(permeability: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve `-div(a grad u) = 1` on the unit square with `u = 0` on its boundary.

    Finite volumes on cell centres. The permeability of a face is the harmonic mean of its two
    cells, which keeps the flux continuous where `a` jumps; a boundary face lies half a cell from
    its centre. The sparse system is factorized directly, in float64.

    Args:
        permeability: `(r, r)`, `r >= 4`, positive and finite (dimensionless); converted to
            float64.

    Returns:
        `(r, r)` float64, pressure at the points of `cell_centres` (dimensionless).

    Raises:
        ValueError: `permeability` is not square, too small, or not positive and finite.
        RuntimeError: the relative residual of the solution exceeds 1e-10.
    """
    permeability = np.asarray(permeability, dtype=np.float64)
    shape = permeability.shape
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < _MINIMUM_RESOLUTION:
        raise ValueError(
            f"permeability: expected shape (r, r) with r >= {_MINIMUM_RESOLUTION}, got {shape}"
        )
    if not (np.isfinite(permeability).all() and (permeability > 0.0).all()):
        raise ValueError(
            "permeability: expected positive finite values,"
            f" got values from {permeability.min()} to {permeability.max()}"
        )
    matrix = _flux_matrix(permeability)
    source = np.full(permeability.size, FORCING / permeability.size)
    # The matrix is symmetric positive definite: no pivoting, and an ordering for A + A^T, make
    # the factors smaller and the residual no larger.
    factors = splu(
        matrix,
        permc_spec="MMD_AT_PLUS_A",
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )
    pressure = factors.solve(source)
    residual = np.linalg.norm(source - matrix @ pressure) / np.linalg.norm(source)
    if not residual <= _RESIDUAL_LIMIT:  # also catches NaN
        raise RuntimeError(
            f"expected a relative residual of at most {_RESIDUAL_LIMIT:g}, got {residual:.3g}"
        )
    return pressure.reshape(shape)


def load_darcy(
    resolution: int,
    splits: Mapping[str, int],
    seed: int,
    cache_dir: Path,
    processes: int | None = None,
    progress: bool = True,
) -> dict[str, DarcyArrays]:
    """Make the benchmark's samples, or read them from the cache of an earlier call.

    The cache is one `.npz` file for each resolution, seed and total count. It appears under its
    name only when complete, so processes may be killed, or make the same cache at once.

    Args:
        resolution: cells per side, `r >= 4`.
        splits: samples in each of "train", "validation" and "test" (any of them may be absent),
            each `>= 1`; splits take consecutive sample indices in this order.
        seed: seed of the data set, `>= 0`.
        cache_dir: folder of the cache, made if missing.
        processes: most worker processes to start, `>= 1`; None allows one for each core. Small
            sets are made without any. The samples do not depend on it.
        progress: whether to draw a progress bar while solving.

    Returns:
        The arrays of each split that `splits` names, at the points of `cell_centres`.

    Raises:
        ValueError: a bad argument, or a cache file that is truncated, altered or of another
            problem.
        NotADirectoryError: `cache_dir` is a file.
        RuntimeError: a sample was not solved to a relative residual of 1e-10; names the sample.
    """
    _require_integer("resolution", resolution, _MINIMUM_RESOLUTION)
    _require_integer("seed", seed, 0)
    if processes is not None:
        _require_integer("processes", processes, 1)
    slices = _split_slices(splits, _SPLIT_ORDER)
    count = sum(int(n) for n in splits.values())
    cache_dir = Path(cache_dir)
    if cache_dir.exists() and not cache_dir.is_dir():
        raise NotADirectoryError(f"cache_dir: expected a folder, got the file {cache_dir}")

    path = cache_dir / f"darcy_r{resolution}_seed{seed}_n{count}.npz"
    meta = {
        "format": _CACHE_FORMAT,
        "resolution": int(resolution),
        "seed": int(seed),
        "count": count,
        "permeability": [PERMEABILITY_LOW, PERMEABILITY_HIGH],
        "covariance_shift": _COVARIANCE_SHIFT,
        "cosine_modes": _COSINE_MODES,
        "forcing": FORCING,
    }
    if path.exists():
        permeability, pressure = _read_cache(path, meta)
    else:
        permeability, pressure = _make_samples(resolution, seed, count, processes, progress)
        _write_cache(path, meta, permeability, pressure)
    coordinates = cell_centres(resolution)
    return {
        name: DarcyArrays(permeability[rows], pressure[rows], coordinates)
        for name, rows in slices.items()
    }


def load_darcy_mat(
    train_file: Path, test_file: Path, resolution: int, splits: Mapping[str, int]
) -> dict[str, DarcyArrays]:
    """Read the benchmark's published MATLAB files (arXiv 2010.08895, appendix A.3).

    Their variables `coeff` and `sol`, `(samples, R, R)` with `R = 421` in the published files,
    live on a grid that includes the boundary. It is thinned by an integer stride. MATLAB v5 and
    v7.3 files are read.

    Args:
        train_file: `piececonst_r421_N1024_smooth1.mat`; holds train, then validation.
        test_file: `piececonst_r421_N1024_smooth2.mat`; holds test.
        resolution: points per side, `r >= 4`, such that `r - 1` divides `R - 1`.
        splits: samples in each of "train", "validation" and "test" (any of them may be absent),
            each `>= 1`; a file that no split needs is not opened.

    Returns:
        The arrays of each split that `splits` names; coordinates run from 0 to 1 inclusive.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a bad argument, a resolution that no stride reaches, or a file that cannot be
            read or has a missing variable, a wrong shape, too few samples or non-finite values.
    """
    _require_integer("resolution", resolution, _MINIMUM_RESOLUTION)
    _split_slices(splits, _SPLIT_ORDER)
    coordinates = _grid_points(np.linspace(0.0, 1.0, resolution))
    arrays = {}
    for path, names in ((train_file, ("train", "validation")), (test_file, ("test",))):
        needed = {name: splits[name] for name in names if name in splits}
        if not needed:
            continue
        count = sum(int(n) for n in needed.values())
        permeability, pressure = _read_mat_samples(Path(path), resolution, count)
        for name, rows in _split_slices(needed, names).items():
            arrays[name] = DarcyArrays(permeability[rows], pressure[rows], coordinates)
    return arrays


def _require_integer(name: str, value: object, minimum: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name}: expected an integer of at least {minimum}, got {value!r}")


def _split_slices(splits: Mapping[str, int], order: Sequence[str]) -> dict[str, slice]:
    """Consecutive, disjoint index ranges of `splits`, laid out in `order`."""
    if not splits or not set(splits) <= set(order):
        raise ValueError(f"splits: expected some of {list(order)}, got {list(splits)}")
    slices, start = {}, 0
    for name in order:
        if name in splits:
            _require_integer(f"splits[{name!r}]", splits[name], 1)
            slices[name] = slice(start, start + int(splits[name]))
            start = slices[name].stop
    return slices


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


# Grid and equations ------------------------------------------------------------------------------


def _centre_axis(resolution: int) -> NDArray[np.float64]:
    return (np.arange(resolution) + 0.5) / resolution


def _grid_points(axis: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2).astype(np.float32)


def _flux_matrix(permeability: NDArray[np.float64]) -> csc_array:
    """Net outflow of each cell for a pressure `(r*r,)`; the spacing cancels in two dimensions."""
    resolution = len(permeability)
    x_faces = _harmonic_mean(permeability[1:], permeability[:-1])
    y_faces = _harmonic_mean(permeability[:, 1:], permeability[:, :-1])

    outflow = np.zeros_like(permeability)
    outflow[1:] += x_faces
    outflow[:-1] += x_faces
    outflow[:, 1:] += y_faces
    outflow[:, :-1] += y_faces
    for side in ((0, ...), (-1, ...), (..., 0), (..., -1)):
        outflow[side] += 2.0 * permeability[side]  # the boundary is half a spacing away

    # In row-major order the last cell of a row precedes the first of the next, but shares no face.
    y_couplings = np.pad(y_faces, ((0, 0), (0, 1))).reshape(-1)[:-1]
    x_couplings = x_faces.reshape(-1)
    return diags_array(
        [outflow.reshape(-1), -y_couplings, -y_couplings, -x_couplings, -x_couplings],
        offsets=[0, 1, -1, resolution, -resolution],
        format="csc",
    )


def _harmonic_mean(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    return 2.0 / (1.0 / left + 1.0 / right)


# Making samples ----------------------------------------------------------------------------------


def _make_sample(resolution: int, seed: int, index: int) -> tuple[NDArray, NDArray]:
    permeability = sample_permeability(resolution, seed, index)
    try:
        pressure = solve_darcy(permeability)
    except RuntimeError as error:
        raise RuntimeError(
            f"Darcy sample {index} (resolution {resolution}, seed {seed}): {error}"
        ) from error
    return permeability.astype(np.float32), pressure.astype(np.float32)


def _make_samples(
    resolution: int, seed: int, count: int, processes: int | None, progress: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Permeability and pressure of samples 0 to `count - 1`, each `(count, r, r)`."""
    useful_workers = max(1, count * resolution**2 // _CELLS_PER_WORKER)
    workers = min(processes or os.cpu_count() or 1, useful_workers, count)
    permeability = np.empty((count, resolution, resolution), np.float32)
    pressure = np.empty_like(permeability)
    make = functools.partial(_make_sample, resolution, seed)
    samples = tqdm(
        _map_ordered(make, count, workers),
        total=count,
        desc=f"Darcy {resolution} x {resolution}",
        unit="sample",
        disable=not progress,
    )
    for index, sample in enumerate(samples):
        permeability[index], pressure[index] = sample
    return permeability, pressure


def _map_ordered(
    make: Callable[[int], tuple[NDArray, NDArray]], count: int, workers: int
) -> Iterator[tuple[NDArray, NDArray]]:
    if workers == 1:
        yield from map(make, range(count))
        return
    # Never fork: the caller may hold JAX's threads and an accelerator.
    context = multiprocessing.get_context("spawn")
    chunksize = min(16, -(-count // workers))
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        with _main_module_hidden():
            results = pool.map(make, range(count), chunksize=chunksize)  # starts the workers
        yield from results


@contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep spawned processes from importing the caller's script, which may start JAX on import."""
    main_module = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main_module


# Cache -------------------------------------------------------------------------------------------


def _checksum(meta: str, permeability: NDArray, pressure: NDArray) -> str:
    digest = hashlib.sha256(meta.encode())
    for array in (permeability, pressure):
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def _write_cache(path: Path, meta: dict, permeability: NDArray, pressure: NDArray) -> None:
    meta_text = json.dumps(meta, sort_keys=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own for each writer, in the folder where a rename is atomic.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("xb") as file:
            np.savez(
                file,
                meta=np.array(meta_text),
                sha256=np.array(_checksum(meta_text, permeability, pressure)),
                permeability=permeability,
                pressure=pressure,
            )
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _read_cache(path: Path, expected_meta: dict) -> tuple[NDArray, NDArray]:
    def bad_cache(what: str) -> ValueError:
        return ValueError(f"Darcy cache {path}: {what}; delete it to make it again")

    if not zipfile.is_zipfile(path):
        raise bad_cache("expected a complete .npz archive, got a truncated or foreign file")
    try:
        with np.load(path, allow_pickle=False) as archive:
            entries = {name: archive[name] for name in archive.files}
        expected_entries = {"meta", "sha256", "permeability", "pressure"}
        if set(entries) != expected_entries:
            raise KeyError(f"entries {sorted(entries)} instead of {sorted(expected_entries)}")
        meta_text, arrays = str(entries["meta"]), (entries["permeability"], entries["pressure"])
        altered = _checksum(meta_text, *arrays) != str(entries["sha256"])
    except Exception as error:  # damaged bytes reach many decoders, each with errors of its own
        raise bad_cache(f"expected a readable Darcy archive, got {_one_line(error)}") from error
    if altered:
        raise bad_cache("expected arrays that match their SHA-256 checksum, got altered ones")
    if meta_text != json.dumps(expected_meta, sort_keys=True):
        raise bad_cache(f"expected samples of {json.dumps(expected_meta)}, got {meta_text}")
    return arrays


# Published files ---------------------------------------------------------------------------------


def _read_mat_samples(
    path: Path, resolution: int, count: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """First `count` samples of `coeff` and `sol`, thinned to `resolution` points per side."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a MATLAB file, got no such file")
    thinned, native_shape = [], None
    for name in ("coeff", "sol"):
        values = _read_mat_variable(path, name)
        where = f"{path}: variable {name!r}"
        native_shape = native_shape or values.shape
        if (
            values.dtype.kind not in "fiu"
            or values.ndim != 3
            or values.shape[1] != values.shape[2]
            or values.shape != native_shape
        ):
            raise ValueError(
                f"{where}: expected real numbers (samples, R, R), alike in coeff and sol,"
                f" got {values.dtype} {values.shape}"
            )
        if len(values) < count:
            raise ValueError(f"{where}: expected at least {count} samples, got {len(values)}")
        intervals = values.shape[1] - 1
        if intervals < resolution - 1 or intervals % (resolution - 1):
            reachable = [d + 1 for d in range(3, intervals + 1) if intervals % d == 0]
            raise ValueError(
                f"{where}: expected a resolution that a stride reaches from {intervals + 1}"
                f" points, one of {reachable}, got {resolution}"
            )
        stride = intervals // (resolution - 1)
        with np.errstate(over="ignore"):  # found below, as infinity
            kept = values[:count, ::stride, ::stride].astype(np.float32)
        bad_samples = np.flatnonzero(~np.isfinite(kept).all(axis=(1, 2)))
        if bad_samples.size:
            raise ValueError(
                f"{where}: expected finite float32 values, got NaN or infinity"
                f" in sample {bad_samples[0]}"
            )
        thinned.append(kept)
    return thinned[0], thinned[1]


def _read_mat_variable(path: Path, name: str) -> NDArray:
    try:
        if h5py.is_hdf5(path):
            with h5py.File(path, "r") as file:
                names = sorted(file)
                # v7.3 keeps MATLAB's column-major bytes, so HDF5 sees the axes reversed.
                values = file[name][()].T if name in names else None
        else:
            names = sorted(entry[0] for entry in scipy.io.whosmat(path))
            values = scipy.io.loadmat(path, variable_names=[name]).get(name)
    except Exception as error:  # damaged bytes reach many decoders, each with errors of its own
        raise ValueError(
            f"{path}: expected a readable MATLAB v5 or v7.3 file, got {_one_line(error)}"
        ) from error
    if values is None:
        raise ValueError(f"{path}: expected a variable {name!r}, got {names}")
    return np.asarray(values)
