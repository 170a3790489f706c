"""Surfaces of random bodies in an ideal flow, as files: one sample a number, made by that alone."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyvista
from jaxtyping import Float64
from tqdm import tqdm

from experiments.files import write_atomically, write_json
from experiments.problems.body_flow import (
    Panels,
    ellipsoid_velocity,
    panel_velocity,
    pressure_coefficient,
)
from experiments.problems.body_shapes import draw_body
from experiments.problems.splits import require_integer
from experiments.processes.workers import in_processes

AIR_DENSITY = 1.2
STREAM_VELOCITY_RANGE = (20.0, 40.0)
LARGEST_INCIDENCE = np.radians(20.0)
MINIMUM_FACES = 100

# With 1000 triangles nearly all draws are sound, with few of them holes and thin parts get lost.
_DRAWS = 20


class Sample(NamedTuple):
    """A body in a free stream.

    Attributes:
        kind: of the body, one of `experiments.problems.body_shapes.KINDS`.
        panels: the body, in m; the box around it is 1 m long before it is deformed.
        direction: unit vector of the free stream.
        stream_velocity: speed of the free stream in m/s.
        velocity: at the triangles' centres, in units of the free stream's speed.
    """

    kind: str
    panels: Panels
    direction: Float64[np.ndarray, " 3"]
    stream_velocity: float
    velocity: Float64[np.ndarray, "n 3"]


def make_sample(seed: int, index: int, faces: int) -> Sample:
    """One sample; no other is needed to make it.

    The flow around an ellipsoid is exact, that around any other body a panel method's.

    Args:
        seed: of the data set, `>= 0`.
        index: number of the sample, `>= 0`.
        faces: number of triangles, `>= 100`; an odd one gives one less.

    Raises:
        RuntimeError: of 20 bodies none is a closed surface that does not cross itself.
    """
    generator = np.random.default_rng([seed, index])
    speed = float(generator.uniform(*STREAM_VELOCITY_RANGE))
    direction = _draw_direction(generator)
    for _ in range(_DRAWS):
        try:
            body = draw_body(generator, faces)
            if body.semi_axes is None:
                velocity = panel_velocity(body.panels, direction)
            else:
                velocity = ellipsoid_velocity(body.semi_axes, body.panels.centres, direction)
        except (ValueError, RuntimeError) as error:
            unsound = error
        else:
            return Sample(body.kind, body.panels, direction, speed, velocity)
    raise RuntimeError(f"sample {index}: expected a sound body in {_DRAWS} draws") from unsound


def _draw_direction(generator: np.random.Generator) -> Float64[np.ndarray, " 3"]:
    """Unit vector, spread evenly over the directions within 20 degrees of x."""
    along = generator.uniform(np.cos(LARGEST_INCIDENCE), 1.0)
    roll = generator.uniform(0.0, 2.0 * np.pi)
    across = np.sqrt(1.0 - along**2)
    return np.array([along, across * np.cos(roll), across * np.sin(roll)])


def write_sample(folder: Path, index: int, sample: Sample) -> None:
    """Writes the three files of a sample, each whole or not at all.

    Fields of the triangles, in float32: `pressure_coefficient`; `velocity` in units of the free
    stream's speed; `pressure` above that of the free stream, in Pa.
    """
    vtp, stl, numbers = _paths(folder, index)
    coefficient = pressure_coefficient(sample.velocity)
    dynamic_pressure = 0.5 * AIR_DENSITY * sample.stream_velocity**2
    points: np.ndarray = sample.panels.points.astype(np.float32)
    surface = pyvista.PolyData.from_regular_faces(points, sample.panels.faces)
    # Normals computed for STL would stay among the fields of the surface.
    write_atomically(stl, lambda path: surface.save(path, recompute_normals=False))
    write_json(
        numbers,
        {
            "stream_velocity": sample.stream_velocity,
            "air_density": AIR_DENSITY,
            **{f"direction_{axis}": float(sample.direction[i]) for i, axis in enumerate("xyz")},
        },
    )
    surface.cell_data["pressure_coefficient"] = coefficient.astype(np.float32)
    surface.cell_data["velocity"] = sample.velocity.astype(np.float32)
    surface.cell_data["pressure"] = (dynamic_pressure * coefficient).astype(np.float32)
    write_atomically(vtp, surface.save)


def make_bodies(folder: Path, samples: int, faces: int, seed: int, workers: int) -> None:
    """Writes the samples that a folder lacks.

    Args:
        folder: made if missing.
        samples: how many there are to be, `>= 1`.
        faces: triangles of each, `>= 100`; an odd number gives one less.
        seed: of the data set, `>= 0`.
        workers: processes, `>= 1`.

    Raises:
        ValueError: a number is too small, or the folder is a file.
        RuntimeError: see `make_sample`.
    """
    require_integer("--samples", samples, 1)
    require_integer("--faces", faces, MINIMUM_FACES)
    require_integer("--seed", seed, 0)
    require_integer("--workers", workers, 1)
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder, or nothing there yet; got a file")
    folder.mkdir(parents=True, exist_ok=True)
    missing = [
        index
        for index in range(samples)
        if not all(path.exists() for path in _paths(folder, index))
    ]
    done = samples - len(missing)
    tasks = [(folder, index, faces, seed) for index in missing]
    with tqdm(total=samples, initial=done, desc="Making bodies", unit="sample") as bar:
        for _ in in_processes(_make, tasks, workers):
            bar.update()


def _paths(folder: Path, index: int) -> tuple[Path, ...]:
    return tuple(folder / f"{index:03d}.{ending}" for ending in ("vtp", "stl", "json"))


def _make(folder: Path, index: int, faces: int, seed: int) -> None:
    write_sample(folder, index, make_sample(seed, index, faces))
