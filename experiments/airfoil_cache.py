"""Data sets of the airfoil problem: shapes, angles of attack, splits, and the cache on disk."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from jaxtyping import Float64
from tqdm import tqdm

from experiments.airfoil import (
    FARTHEST_POINT,
    NEAREST_POINT,
    AirfoilArrays,
    AirfoilSample,
    concatenate,
    make_sample,
)
from experiments.airfoil_files import (
    LARGEST_DEVIATION,
    LARGEST_GAP,
    LARGEST_TURN,
    SAME_SHAPE,
    airfoil_paths,
    fingerprint,
    read_shapes,
    uiuc_folder,
)
from experiments.airfoil_flow import FlowSolver, solve_airfoil
from experiments.airfoil_shapes import (
    CAMBER_POSITION_RANGE,
    CAMBER_RANGE,
    MINIMUM_PANELS,
    THICKNESS_RANGE,
    naca_outline,
    panel_nodes,
    sample_naca,
)
from experiments.array_cache import read_arrays, require_folder, write_arrays
from experiments.schema import AIRFOIL_SHAPES
from experiments.splits import require_integer, split_slices

_CACHE_FORMAT = 1
_NAMES = tuple(field.name for field in fields(AirfoilArrays))
# Streams of random numbers that must not coincide; that of NACA shapes is 0.
_SAMPLE_STREAM, _ORDER_STREAM = 1, 2

ShapeByNumber = Callable[[int], tuple[str, Float64[np.ndarray, "n 2"]]]


@dataclass(frozen=True)
class AirfoilSettings:
    """What samples are made of, beside their number.

    Attributes:
        shapes: `naca`, random members of the four-digit family, or `uiuc`, coordinate files.
        uiuc_dir: folder of the coordinate files `*.dat`; `None` for those of the UIUC collection
            that the package `aerosandbox` brings.
        points: points of a sample, those on the surface included.
        max_points: `None`, or each sample has a random number from `points` to this.
        surface_points: points on the surface, one a panel of the solver: even, `>= 32`.
        angles: angles of attack of one shape, each a sample.
        min_angle: least angle of attack in degrees.
        max_angle: greatest angle of attack in degrees.
        seed: seed of shapes, angles and points, `>= 0`.

    Raises:
        ValueError: a value is out of its range, or does not go with another.
    """

    shapes: str = "naca"
    uiuc_dir: str | None = None
    points: int = 2000
    max_points: int | None = None
    surface_points: int = 256
    angles: int = 5
    min_angle: float = -5.0
    max_angle: float = 15.0
    seed: int = 0

    def __post_init__(self):
        if self.shapes not in AIRFOIL_SHAPES:
            raise ValueError(
                f"shapes: expected one of {', '.join(AIRFOIL_SHAPES)}; got {self.shapes!r}"
            )
        if self.uiuc_dir is not None and self.shapes != "uiuc":
            raise ValueError(f"uiuc_dir: expected none with shapes={self.shapes}; got one")
        require_integer("surface_points", self.surface_points, MINIMUM_PANELS)
        if self.surface_points % 2:
            raise ValueError(f"surface_points: expected an even number; got {self.surface_points}")
        require_integer("points", self.points, self.surface_points + 1)
        if self.max_points is not None:
            require_integer("max_points", self.max_points, self.points)
        require_integer("angles", self.angles, 1)
        require_integer("seed", self.seed, 0)
        if not -90.0 < self.min_angle <= self.max_angle < 90.0:
            raise ValueError(
                "min_angle, max_angle: expected ascending angles between -90 and 90 degrees; got"
                f" {self.min_angle} and {self.max_angle}"
            )


def load_airfoil(
    settings: AirfoilSettings,
    splits: Mapping[str, int],
    cache_dir: Path,
    progress: bool = True,
) -> dict[str, AirfoilArrays]:
    """Make the samples, or read them from the cache of an earlier call.

    Each split has shapes of its own, so that a test tells how a model does on shapes that it has
    never seen; the last shape of a split may have fewer angles than the others. A sample depends
    on the settings and on the numbers of its shape and its angle alone. 600 samples of 2,000 points
    take about 25 s on one core, once. The cache is one `.npz` file for each combination of settings
    and splits. It appears under its name only when complete, so processes may be killed, or make
    the same cache at once.

    Args:
        settings: what samples are made of.
        splits: samples in each of "train", "validation" and "test" (any of them may be absent),
            each `>= 1`; splits take consecutive shapes in this order.
        cache_dir: folder of the cache, made if missing.
        progress: whether to draw a progress bar.

    Returns:
        The arrays of each split that `splits` names.

    Raises:
        ValueError: a bad argument, fewer files than shapes, or a cache file that is truncated,
            altered or of another problem.
        FileNotFoundError: there are no coordinate files.
        NotADirectoryError: `cache_dir` is a file.
        RuntimeError: a flow was not solved to a relative residual of 1e-10; names the shape.
    """
    slices = split_slices(splits)
    paths = _coordinate_files(settings)
    meta = _describe_samples(settings, {name: int(splits[name]) for name in slices}, paths)
    name = hashlib.sha256(meta.encode()).hexdigest()[:16]
    path = require_folder(cache_dir) / f"airfoil_{settings.shapes}_{name}.npz"
    if path.exists():
        arrays = AirfoilArrays(**read_arrays(path, meta, _NAMES, "airfoil"))
    else:
        arrays = _make_samples(settings, slices, paths, progress)
        write_arrays(path, meta, {name: getattr(arrays, name) for name in _NAMES})
    return {name: arrays.take(samples) for name, samples in slices.items()}


def sample_of(
    settings: AirfoilSettings, solver: FlowSolver, shape: int, angle: int
) -> AirfoilSample:
    """One sample of a data set; no other is needed to make it.

    Args:
        settings: what samples are made of.
        solver: the solved shape.
        shape: number of the shape in the data set.
        angle: number of the angle of attack of this shape.
    """
    generator = _generator(settings.seed, _SAMPLE_STREAM, shape, angle)
    degrees = generator.uniform(settings.min_angle, settings.max_angle)
    points = generator.integers(
        settings.points, settings.max_points or settings.points, endpoint=True
    )
    return make_sample(solver, degrees, int(points), generator)


def shape_numbers(splits: Mapping[str, int], angles: int) -> dict[str, range]:
    """The shapes of each split: consecutive, and none in two splits.

    Args:
        splits: samples in each split.
        angles: samples of one shape.
    """
    needed = {name: -(-count // angles) for name, count in splits.items()}
    return {name: range(part.start, part.stop) for name, part in split_slices(needed).items()}


def _generator(seed: int, *key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(int(seed), spawn_key=key))


def _coordinate_files(settings: AirfoilSettings) -> list[Path]:
    if settings.shapes == "naca":
        return []
    return airfoil_paths(uiuc_folder() if settings.uiuc_dir is None else Path(settings.uiuc_dir))


def _describe_samples(
    settings: AirfoilSettings, splits: Mapping[str, int], paths: list[Path]
) -> str:
    """All that the samples depend on, as JSON."""
    meta = {"format": _CACHE_FORMAT, "splits": splits, **asdict(settings)}
    del meta["uiuc_dir"]  # the files count, wherever they lie
    meta["min_angle"], meta["max_angle"] = float(settings.min_angle), float(settings.max_angle)
    meta["distances"] = [NEAREST_POINT, FARTHEST_POINT]
    if settings.shapes == "naca":
        meta["ranges"] = [THICKNESS_RANGE, CAMBER_RANGE, CAMBER_POSITION_RANGE]
    else:
        meta["files"] = fingerprint(paths)
        meta["limits"] = [LARGEST_GAP, LARGEST_DEVIATION, LARGEST_TURN, SAME_SHAPE]
    return json.dumps(meta, sort_keys=True, default=int)


def _make_samples(
    settings: AirfoilSettings, slices: Mapping[str, slice], paths: list[Path], progress: bool
) -> AirfoilArrays:
    """The samples of all splits, one split after another."""
    splits = {name: part.stop - part.start for name, part in slices.items()}
    numbers = shape_numbers(splits, settings.angles)
    shape = _naca_shape(settings) if not paths else _file_shape(settings, paths, numbers)
    pairs = [
        pair
        for name, count in splits.items()
        for pair in _shapes_and_angles(numbers[name], settings.angles, count)
    ]
    samples, names = [], []
    for number, angle in tqdm(pairs, "Airfoils", unit="sample", disable=not progress):
        if angle == 0:
            name, nodes = shape(number)
            try:
                solver = solve_airfoil(nodes)
            except RuntimeError as error:
                raise RuntimeError(f"airfoil {name}: {error}") from error
        samples.append(sample_of(settings, solver, number, angle))
        names.append(name)
    return concatenate(samples, names)


def _shapes_and_angles(numbers: range, angles: int, count: int) -> Iterator[tuple[int, int]]:
    """The first `count` pairs of a shape and the number of an angle, shape by shape."""
    for sample in range(count):
        yield numbers[sample // angles], sample % angles


def _naca_shape(settings: AirfoilSettings) -> ShapeByNumber:
    def shape(number: int) -> tuple[str, Float64[np.ndarray, "n 2"]]:
        parameters = sample_naca(settings.seed, number)
        name = "naca " + " ".join(f"{value:.6f}" for value in parameters)
        return name, panel_nodes(naca_outline(parameters), settings.surface_points)

    return shape


def _file_shape(
    settings: AirfoilSettings, paths: list[Path], numbers: Mapping[str, range]
) -> ShapeByNumber:
    """Shapes from files, in a random order."""
    shapes = read_shapes(paths, settings.surface_points)
    needed = max(part.stop for part in numbers.values())
    if len(shapes) < needed:
        raise ValueError(
            f"{paths[0].parent}: expected {needed} different shapes for these splits with"
            f" {settings.angles} angles each; got {len(shapes)}"
        )
    names = list(shapes)
    order = _generator(settings.seed, _ORDER_STREAM).permutation(len(names))

    def shape(number: int) -> tuple[str, Float64[np.ndarray, "n 2"]]:
        name = names[order[number]]
        return name, shapes[name]

    return shape
