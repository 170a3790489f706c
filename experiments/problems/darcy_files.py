"""The Darcy problem's published data: MATLAB files, thinned to a coarser grid and split."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Shaped

from experiments.formats.matlab_files import read_variable
from experiments.problems.darcy import (
    MINIMUM_RESOLUTION,
    DarcyArrays,
    grid_points,
)
from experiments.problems.splits import require_integer, split_slices


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
    require_integer("resolution", resolution, MINIMUM_RESOLUTION)
    split_slices(splits)  # a bad split is found before a file is opened
    coordinates = grid_points(np.linspace(0.0, 1.0, resolution))
    arrays = {}
    for path, names in ((train_file, ("train", "validation")), (test_file, ("test",))):
        needed = {name: splits[name] for name in names if name in splits}
        if not needed:
            continue
        slices = split_slices(needed)
        count = max(rows.stop for rows in slices.values())
        permeability, pressure = _read_samples(Path(path), resolution, count)
        for name, rows in slices.items():
            arrays[name] = DarcyArrays(permeability[rows], pressure[rows], coordinates)
    return arrays


def _read_samples(
    path: Path, resolution: int, count: int
) -> tuple[Float32[np.ndarray, "n r r"], Float32[np.ndarray, "n r r"]]:
    """First `count` samples of `coeff` and `sol`, thinned to `resolution` points per side."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a MATLAB file, got no such file")
    variables = {name: read_variable(path, name) for name in ("coeff", "sol")}
    native_shape = variables["coeff"].shape
    for name, values in variables.items():
        where = f"{path}: variable {name!r}"
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
    stride = _stride(path, native_shape[1], resolution)
    permeability, pressure = (
        _finite_float32(f"{path}: variable {name!r}", values[:count, ::stride, ::stride])
        for name, values in variables.items()
    )
    return permeability, pressure


def _stride(path: Path, native_resolution: int, resolution: int) -> int:
    """Stride that leaves `resolution` of the points, the first and the last among them."""
    intervals = native_resolution - 1
    if intervals < resolution - 1 or intervals % (resolution - 1):
        reachable = [d + 1 for d in range(3, intervals + 1) if intervals % d == 0]
        raise ValueError(
            f"{path}: expected a resolution that a stride reaches from {native_resolution}"
            f" points, one of {reachable}, got {resolution}"
        )
    return intervals // (resolution - 1)


def _finite_float32(
    where: str, values: Shaped[np.ndarray, "n r r"]
) -> Float32[np.ndarray, "n r r"]:
    with np.errstate(over="ignore"):  # found below, as infinity
        converted = values.astype(np.float32)
    bad_samples = np.flatnonzero(~np.isfinite(converted).all(axis=(1, 2)))
    if bad_samples.size:
        raise ValueError(
            f"{where}: expected finite float32 values, got NaN or infinity"
            f" in sample {bad_samples[0]}"
        )
    return converted
