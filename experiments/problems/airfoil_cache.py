"""Data sets of the airfoil problem: shapes, angles of attack, splits, and the cache on disk."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import numpy as np
from jaxtyping import Float64
from tqdm import tqdm

from experiments.configuration.schema import AIRFOIL_SHAPES, AirfoilConfig
from experiments.problems.airfoil import (
    FARTHEST_POINT,
    NEAREST_POINT,
    AirfoilArrays,
    AirfoilSample,
    concatenate,
    make_sample,
)
from experiments.problems.airfoil_files import (
    LARGEST_DEVIATION,
    LARGEST_GAP,
    LARGEST_TURN,
    SAME_SHAPE,
    airfoil_paths,
    fingerprint,
    read_shapes,
    uiuc_folder,
)
from experiments.problems.airfoil_flow import FlowSolver, solve_airfoil
from experiments.problems.airfoil_shapes import (
    CAMBER_POSITION_RANGE,
    CAMBER_RANGE,
    MINIMUM_PANELS,
    THICKNESS_RANGE,
    naca_outline,
    panel_nodes,
    sample_naca,
)
from experiments.problems.array_cache import read_arrays, require_folder, write_arrays
from experiments.problems.splits import require_integer, split_slices

_CACHE_FORMAT = 1
_INTEGERS = ("points", "max_points", "surface_points", "angles", "seed")
_NAMES = tuple(field.name for field in fields(AirfoilArrays))
# Streams of random numbers that must not coincide; that of NACA shapes is 0.
_SAMPLE_STREAM, _ORDER_STREAM = 1, 2

ShapeByNumber = Callable[[int], tuple[str, Float64[np.ndarray, "n 2"]]]


def load_airfoil(
    config: AirfoilConfig,
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
        config: what samples are made of.
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
    _check(config)
    slices = split_slices(splits)
    paths = _coordinate_files(config)
    meta = _describe_samples(config, {name: int(splits[name]) for name in slices}, paths)
    name = hashlib.sha256(meta.encode()).hexdigest()[:16]
    path = require_folder(cache_dir) / f"airfoil_{config.shapes}_{name}.npz"
    if path.exists():
        arrays = AirfoilArrays(**read_arrays(path, meta, _NAMES, "airfoil"))
    else:
        arrays = _make_samples(config, slices, paths, progress)
        write_arrays(path, meta, {name: getattr(arrays, name) for name in _NAMES})
    return {name: arrays.take(samples) for name, samples in slices.items()}


def sample_of(config: AirfoilConfig, solver: FlowSolver, shape: int, angle: int) -> AirfoilSample:
    """One sample of a data set; no other is needed to make it.

    Args:
        config: what samples are made of.
        solver: the solved shape.
        shape: number of the shape in the data set.
        angle: number of the angle of attack of this shape.
    """
    generator = _generator(config.seed, _SAMPLE_STREAM, shape, angle)
    degrees = generator.uniform(config.min_angle, config.max_angle)
    points = generator.integers(config.points, config.max_points or config.points, endpoint=True)
    return make_sample(solver, degrees, int(points), generator)


def shape_numbers(splits: Mapping[str, int], angles: int) -> dict[str, range]:
    """The shapes of each split: consecutive, and none in two splits.

    Args:
        splits: samples in each split.
        angles: samples of one shape.
    """
    needed = {name: -(-count // angles) for name, count in splits.items()}
    return {name: range(part.start, part.stop) for name, part in split_slices(needed).items()}


def _check(config: AirfoilConfig) -> None:
    """Refuses values that are out of range or do not go with each other."""
    if config.shapes not in AIRFOIL_SHAPES:
        raise ValueError(
            f"shapes: expected one of {', '.join(AIRFOIL_SHAPES)}; got {config.shapes!r}"
        )
    if config.uiuc_dir is not None and config.shapes != "uiuc":
        raise ValueError(f"uiuc_dir: expected none with shapes={config.shapes}; got one")
    require_integer("surface_points", config.surface_points, MINIMUM_PANELS)
    if config.surface_points % 2:
        raise ValueError(f"surface_points: expected an even number; got {config.surface_points}")
    require_integer("points", config.points, config.surface_points + 1)
    if config.max_points is not None:
        require_integer("max_points", config.max_points, config.points)
    require_integer("angles", config.angles, 1)
    require_integer("seed", config.seed, 0)
    if not -90.0 < config.min_angle <= config.max_angle < 90.0:
        raise ValueError(
            "min_angle, max_angle: expected ascending angles between -90 and 90 degrees; got"
            f" {config.min_angle} and {config.max_angle}"
        )


def _generator(seed: int, *key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(int(seed), spawn_key=key))


def _coordinate_files(config: AirfoilConfig) -> list[Path]:
    if config.shapes == "naca":
        return []
    return airfoil_paths(uiuc_folder() if config.uiuc_dir is None else Path(config.uiuc_dir))


def _describe_samples(config: AirfoilConfig, splits: Mapping[str, int], paths: list[Path]) -> str:
    """All that the samples depend on, as JSON."""
    meta = {"format": _CACHE_FORMAT, "splits": splits}
    # Of coordinate files the contents count, wherever they lie.
    meta |= {name: getattr(config, name) for name in _INTEGERS}
    meta |= {name: float(getattr(config, name)) for name in ("min_angle", "max_angle")}
    meta["shapes"] = config.shapes
    meta["distances"] = [NEAREST_POINT, FARTHEST_POINT]
    if config.shapes == "naca":
        meta["ranges"] = [THICKNESS_RANGE, CAMBER_RANGE, CAMBER_POSITION_RANGE]
    else:
        meta["files"] = fingerprint(paths)
        meta["limits"] = [LARGEST_GAP, LARGEST_DEVIATION, LARGEST_TURN, SAME_SHAPE]
    return json.dumps(meta, sort_keys=True, default=int)


def _make_samples(
    config: AirfoilConfig, slices: Mapping[str, slice], paths: list[Path], progress: bool
) -> AirfoilArrays:
    """The samples of all splits, one split after another."""
    splits = {name: part.stop - part.start for name, part in slices.items()}
    numbers = shape_numbers(splits, config.angles)
    shape = _naca_shape(config) if not paths else _file_shape(config, paths, numbers)
    pairs = [
        pair
        for name, count in splits.items()
        for pair in _shapes_and_angles(numbers[name], config.angles, count)
    ]
    samples, names = [], []
    for number, angle in tqdm(pairs, "Airfoils", unit="sample", disable=not progress):
        if angle == 0:
            name, nodes = shape(number)
            try:
                solver = solve_airfoil(nodes)
            except RuntimeError as error:
                raise RuntimeError(f"airfoil {name}: {error}") from error
        samples.append(sample_of(config, solver, number, angle))
        names.append(name)
    return concatenate(samples, names)


def _shapes_and_angles(numbers: range, angles: int, count: int) -> Iterator[tuple[int, int]]:
    """The first `count` pairs of a shape and the number of an angle, shape by shape."""
    for sample in range(count):
        yield numbers[sample // angles], sample % angles


def _naca_shape(config: AirfoilConfig) -> ShapeByNumber:
    def shape(number: int) -> tuple[str, Float64[np.ndarray, "n 2"]]:
        parameters = sample_naca(config.seed, number)
        name = "naca " + " ".join(f"{value:.6f}" for value in parameters)
        return name, panel_nodes(naca_outline(parameters), config.surface_points)

    return shape


def _file_shape(
    config: AirfoilConfig, paths: list[Path], numbers: Mapping[str, range]
) -> ShapeByNumber:
    """Shapes from files, in a random order."""
    shapes = read_shapes(paths, config.surface_points)
    needed = max(part.stop for part in numbers.values())
    if len(shapes) < needed:
        raise ValueError(
            f"{paths[0].parent}: expected {needed} different shapes for these splits with"
            f" {config.angles} angles each; got {len(shapes)}"
        )
    names = list(shapes)
    order = _generator(config.seed, _ORDER_STREAM).permutation(len(names))

    def shape(number: int) -> tuple[str, Float64[np.ndarray, "n 2"]]:
        name = names[order[number]]
        return name, shapes[name]

    return shape
