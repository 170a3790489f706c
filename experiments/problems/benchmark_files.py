"""The published files of four benchmarks: elasticity, airfoil, pipe and plasticity.

They were made for Geo-FNO (arXiv 2207.05209, section 4) and are benchmarks of Transolver (arXiv
2402.02366, section 4.1), the first three also of FLARE (arXiv 2508.12594). Files keep their
published names and layouts. Which samples train and which test is that of Transolver's experiments:

| data set | points | field | samples | train | test |
| --- | --- | --- | --- | --- | --- |
| elasticity | 972 of a unit cell around a void | stress | 2000 | first 1000 | last 200 |
| airfoil | 221 around x 51 outwards, in chords | Mach number | 2490 | first 1000 | next 200 |
| pipe | 129 along x 129 across, in widths | velocity along | 2310 | first 1000 | next 200 |
| plasticity | 101 along x 31 across, at 20 times | deformation in mm | 987 | first 900 | last 80 |
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Shaped

from experiments.formats.limits import require_room
from experiments.formats.matlab_files import read_variable
from experiments.formats.npy_files import npy_entry
from experiments.messages import one_line
from experiments.problems.splits import split_slices

# The rows of each split, from the path of a file and the number of its samples.
_RowsOf = Callable[[Path, int], dict[str, slice]]


@dataclass(frozen=True)
class RepeatedRows:
    """An array whose row i is `rows[i // times]`, without copies of the rows.

    Attributes:
        rows: each of them stands for `times` rows in a row.
        times: how often a row is repeated.
    """

    rows: Float32[np.ndarray, "m N C"]
    times: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return (len(self), *self.rows.shape[1:])

    @property
    def ndim(self) -> int:
        """Number of its axes."""
        return self.rows.ndim

    @property
    def dtype(self) -> np.dtype:
        """Its type."""
        return self.rows.dtype

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows) * self.times

    def __getitem__(self, index: int | slice | Shaped[np.ndarray, " k"]) -> np.ndarray:
        """Rows, copied only where they are asked for."""
        return self.rows[np.arange(len(self))[index] // self.times]


@dataclass(frozen=True)
class BenchmarkArrays:
    """Samples of one split of a data set, on N points each.

    Attributes:
        fx: input values at the points, or `None`. Of plasticity, the profile of the die over each
            point of the block, in mm.
        embedding: positions (x, y) of the points, in the unit of the file. Of plasticity, places on
            the grid from 0 to 1: along the block, where the die's profile changes, and across it.
        target: fields at the points in the units of the file.
        global_embedding: of plasticity the time, from 0 at its first step to 1 at its last one;
            else `None`.
        fields: names of the fields.
        structured_shape: shape of the grid, whose points are in row-major order, or `None`.
    """

    fx: Float32[np.ndarray, "n N C_in"] | RepeatedRows | None
    embedding: Float32[np.ndarray, "n N 2"] | RepeatedRows
    target: Float32[np.ndarray, "n N C_out"]
    global_embedding: Float32[np.ndarray, "n 1 1"] | None
    fields: tuple[str, ...]
    structured_shape: tuple[int, ...] | None

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.target)


def load_benchmark(name: str, folder: Path, sizes: Mapping[str, int]) -> dict[str, BenchmarkArrays]:
    """Reads samples of a published data set: of NumPy's files only these, MATLAB's as a whole.

    Args:
        name: one of `elasticity`, `airfoil`, `pipe` and `plasticity`.
        folder: holds the files, or the folders that they are published in: `elasticity/Meshes`,
            `airfoil/naca`, `pipe`, `plasticity`.
        sizes: simulations in each of "train", "validation" and "test" (any of them may be absent),
            each `>= 1`: the first of those that the benchmark trains on, the last of them, and the
            first of those that it tests on. A simulation of plasticity is one sample for each of
            its times, in order, so that no two splits share a simulation.

    Returns:
        The arrays of each split that `sizes` names.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a bad argument, more samples than the benchmark has, or a file that cannot be
            read or has a wrong shape, too few samples or values that are not finite in float32.
    """
    if name not in _BENCHMARKS:
        raise ValueError(f"name: expected one of {', '.join(_BENCHMARKS)}; got {name!r}")
    benchmark = _BENCHMARKS[name]
    _require_sizes(benchmark, sizes)
    return benchmark.read(_find_files(benchmark, Path(folder)), partial(_rows, benchmark, sizes))


@dataclass(frozen=True)
class _Benchmark:
    """What is published of a data set.

    Attributes:
        files: their names.
        folders: where they may lie.
        trained: number of samples that the benchmark trains on, the first ones.
        tested: number of samples that it tests on.
        tests_last: whether these are the last samples, else those after the ones trained on.
        read: reads the splits from the paths of the files.
    """

    files: tuple[str, ...]
    folders: tuple[str, ...]
    trained: int
    tested: int
    tests_last: bool
    read: Callable[[list[Path], _RowsOf], dict[str, BenchmarkArrays]]


def _require_sizes(benchmark: _Benchmark, sizes: Mapping[str, int]) -> None:
    split_slices(sizes)
    train, validation = sizes.get("train", 0), sizes.get("validation", 0)
    if train + validation > benchmark.trained:
        raise ValueError(
            f"sizes: expected at most {benchmark.trained} samples in train and validation "
            f"together; got {train} and {validation}"
        )
    if sizes.get("test", 0) > benchmark.tested:
        raise ValueError(
            f"sizes: expected at most {benchmark.tested} samples in test; got {sizes['test']}"
        )


def _find_files(benchmark: _Benchmark, folder: Path) -> list[Path]:
    """All files from one folder, so that no two of different origin are mixed."""
    places = [folder / place for place in benchmark.folders]
    missing = {
        place: [name for name in benchmark.files if not (place / name).is_file()]
        for place in places
    }
    nearest = min(places, key=lambda place: len(missing[place]))
    if missing[nearest]:
        others = [place for place in benchmark.folders if place != "."]
        raise FileNotFoundError(
            f"{folder}: expected {', '.join(benchmark.files)} there or in {', '.join(others)}; "
            f"got {nearest} without {', '.join(missing[nearest])}"
        )
    return [nearest / name for name in benchmark.files]


def _rows(
    benchmark: _Benchmark, sizes: Mapping[str, int], path: Path, count: int
) -> dict[str, slice]:
    """Which of the `count` samples of a file belong to which split."""
    trained, tested = benchmark.trained, benchmark.tested
    if count < trained + tested:
        raise ValueError(f"{path}: expected at least {trained + tested} samples; got {count}")
    first = {"train": 0, "test": count - tested if benchmark.tests_last else trained}
    first["validation"] = trained - sizes.get("validation", 0)
    return {name: slice(first[name], first[name] + int(size)) for name, size in sizes.items()}


def _read_elasticity(paths: list[Path], rows_of: _RowsOf) -> dict[str, BenchmarkArrays]:
    """Positions `(N, 2, samples)`, stress `(N, samples)`."""
    positions, stress = (_map_array(path) for path in paths)
    _require(paths[0], positions, positions.ndim == 3 and positions.shape[1] == 2, "(N, 2, n)")
    expected = (len(positions), positions.shape[2])
    _require(paths[1], stress, stress.shape == expected, f"{expected} as in {paths[0].name}")
    return {
        name: BenchmarkArrays(
            None,
            _finite(paths[0], np.moveaxis(positions[:, :, rows], 2, 0), rows),
            _finite(paths[1], stress[:, rows].T[..., None], rows),
            None,
            ("stress",),
            None,
        )
        for name, rows in rows_of(paths[0], positions.shape[2]).items()
    }


def _read_flow(
    channel: int, field: str, paths: list[Path], rows_of: _RowsOf
) -> dict[str, BenchmarkArrays]:
    """One channel of a flow on grids: x and y `(n, I, J)`, flow `(n, C, I, J)`."""
    x, y, flow = (_map_array(path) for path in paths)
    _require(paths[0], x, x.ndim == 3, "(n, I, J)")
    _require(paths[1], y, y.shape == x.shape, f"{x.shape} as in {paths[0].name}")
    count, height, width = x.shape
    expected = f"({count}, {channel + 1} or more, {height}, {width}) as in {paths[0].name}"
    matches = flow.ndim == 4 and flow.shape[1] > channel
    _require(paths[2], flow, matches and flow[:, 0].shape == x.shape, expected)
    splits = {}
    for name, rows in rows_of(paths[0], count).items():
        positions = [_finite(paths[0], x[rows], rows), _finite(paths[1], y[rows], rows)]
        target = _finite(paths[2], flow[rows, channel], rows, f"channel {channel}")
        splits[name] = BenchmarkArrays(
            None,
            np.stack(positions, -1).reshape(len(target), -1, 2),
            target.reshape(len(target), -1, 1),
            None,
            (field,),
            (height, width),
        )
    return splits


def _read_plasticity(paths: list[Path], rows_of: _RowsOf) -> dict[str, BenchmarkArrays]:
    """Profile of the die `input` `(n, I)`, deformed positions and displacements `output`."""
    (path,) = paths
    profile, output = (read_variable(path, name) for name in ("input", "output"))
    matches = output.ndim == 5 and output.shape[4] == 4
    _require(path, output, matches, "(n, I, J, times, 4)", "output")
    _require(path, profile, profile.shape == output.shape[:2], f"{output.shape[:2]}", "input")
    count, along, across, times, _ = output.shape
    axes = np.linspace(0.0, 1.0, along), np.linspace(0.0, 1.0, across)
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(1, -1, 2).astype(np.float32)
    time = np.linspace(0.0, 1.0, times, dtype=np.float32)
    splits = {}
    for name, rows in rows_of(path, count).items():
        cases = rows.stop - rows.start
        heights = _finite(path, profile[rows], rows, "variable 'input'")
        target = _finite(path, np.moveaxis(output[rows], 3, 1), rows, "variable 'output'")
        splits[name] = BenchmarkArrays(
            RepeatedRows(np.repeat(heights, across, axis=1)[..., None], times),
            RepeatedRows(grid, cases * times),
            target.reshape(cases * times, along * across, 4),
            np.tile(time, cases).reshape(-1, 1, 1),
            ("position_x", "position_y", "displacement_x", "displacement_y"),
            (along, across),
        )
    return splits


def _map_array(path: Path) -> Shaped[np.ndarray, "..."]:
    """The array of a `.npy` file, of which only what is used later is read."""
    try:
        npy_entry(path.name, lambda: path.open("rb"), path.stat().st_size)
        # As `numpy.load`, but never of another format, and so never unpickles.
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # damaged headers reach several decoders
        raise ValueError(
            f"{path}: expected a readable .npy file of numbers; got {one_line(error)}"
        ) from error


def _require(
    path: Path, values: np.ndarray, matches: bool, expected: str, variable: str | None = None
) -> None:
    where = f"{path}:" if variable is None else f"{path}: variable {variable!r}:"
    if not matches or values.dtype.kind not in "fiu" or 0 in values.shape:
        raise ValueError(
            f"{where} expected real numbers {expected}; got {values.dtype} {values.shape}"
        )


def _finite(
    path: Path, values: Shaped[np.ndarray, "n ..."], rows: slice, part: str | None = None
) -> Float32[np.ndarray, "n ..."]:
    """A float32 copy of the samples `rows`, which does not hold on to the file."""
    require_room(path, "samples", values.size * np.dtype(np.float32).itemsize)
    with np.errstate(over="ignore"):  # found below, as infinity
        converted = np.array(values, np.float32, order="C")
    bad = np.flatnonzero([not np.isfinite(sample).all() for sample in converted])
    if bad.size:
        where = f"{path}:" if part is None else f"{path}: {part}:"
        raise ValueError(
            f"{where} expected finite values; got NaN or infinity in sample {rows.start + bad[0]}"
        )
    return converted


_BENCHMARKS = {
    "elasticity": _Benchmark(
        files=("Random_UnitCell_XY_10.npy", "Random_UnitCell_sigma_10.npy"),
        folders=(".", "Meshes", "elasticity/Meshes", "elasticity"),
        trained=1000,
        tested=200,
        tests_last=True,
        read=_read_elasticity,
    ),
    "airfoil": _Benchmark(
        files=("NACA_Cylinder_X.npy", "NACA_Cylinder_Y.npy", "NACA_Cylinder_Q.npy"),
        folders=(".", "naca", "airfoil/naca", "airfoil"),
        trained=1000,
        tested=200,
        tests_last=False,
        # Density, velocity in x and in y, pressure, Mach number.
        read=partial(_read_flow, 4, "mach_number"),
    ),
    "pipe": _Benchmark(
        files=("Pipe_X.npy", "Pipe_Y.npy", "Pipe_Q.npy"),
        folders=(".", "pipe"),
        trained=1000,
        tested=200,
        tests_last=False,
        # Velocity along and across, pressure.
        read=partial(_read_flow, 0, "velocity_x"),
    ),
    "plasticity": _Benchmark(
        files=("plas_N987_T20.mat",),
        folders=(".", "plasticity"),
        trained=900,
        tested=80,
        tests_last=True,
        read=_read_plasticity,
    ),
}
