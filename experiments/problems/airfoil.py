"""Samples of the airfoil problem: points around a shape, and the inviscid flow at them.

Given the shape of an airfoil and the angle of attack, predict velocity and pressure around it. The
points lie anywhere, the shape is a second cloud of points, and the angle is one value for all:
a problem for models of unstructured data with geometry and global context. All quantities are
dimensionless (chord, density and speed of the free stream are 1), arrays are float32, and angles of
attack are in degrees. The third dimension is there for models of space; nothing extends along it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, Int64, Shaped

from experiments.problems.airfoil_flow import FlowSolver, Panels, lift_coefficient
from experiments.problems.airfoil_shapes import contains, distance_to

# Distances of points from the surface, in chords.
NEAREST_POINT = 1e-3
FARTHEST_POINT = 1.0

# Points drawn at a time: bounds the memory of their distances to all panels.
_TRIES = 4096


@dataclass(frozen=True)
class AirfoilSample:
    """One shape at one angle of attack; N points, of which the first M lie on the surface.

    Attributes:
        positions: in chords, z = 0. The first M are the midpoints of the panels, from the
            trailing edge over the upper side, around the nose and back along the lower side; the
            others are in no order.
        fields: velocity u and v in units of the free stream's speed, pressure coefficient.
        geometry: position and outward unit normal of the midpoints, z and its normal 0.
        panel_lengths: in chords; with the normals, what an integral over the surface needs.
        global_embedding: cosine and sine of the angle of attack: the direction of the free stream.
        angle_of_attack: in degrees.
        lift_coefficient: of the pressure in `fields`.
    """

    positions: Float32[np.ndarray, "N 3"]
    fields: Float32[np.ndarray, "N 3"]
    geometry: Float32[np.ndarray, "M 6"]
    panel_lengths: Float32[np.ndarray, " M"]
    global_embedding: Float32[np.ndarray, "1 2"]
    angle_of_attack: float
    lift_coefficient: float


@dataclass(frozen=True)
class AirfoilArrays:
    """Samples of one split, which may differ in their number of points, one after another.

    Attributes:
        positions: of the points of all samples, see `AirfoilSample`.
        fields: at these points.
        offsets: sample i has the rows from `offsets[i]` up to `offsets[i + 1]`; the first M of
            them lie on its surface.
        geometry: see `AirfoilSample`.
        panel_lengths: in chords.
        global_embedding: cosine and sine of the angles of attack.
        angle_of_attack: in degrees.
        lift_coefficient: of the pressure in `fields`.
        shape: names of the shapes; no two splits share one.
    """

    positions: Float32[np.ndarray, "points 3"]
    fields: Float32[np.ndarray, "points 3"]
    offsets: Int64[np.ndarray, " n+1"]
    geometry: Float32[np.ndarray, "n M 6"]
    panel_lengths: Float32[np.ndarray, "n M"]
    global_embedding: Float32[np.ndarray, "n 1 2"]
    angle_of_attack: Float64[np.ndarray, " n"]
    lift_coefficient: Float64[np.ndarray, " n"]
    shape: Shaped[np.ndarray, " n"]

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.geometry)

    def rows(self, index: int) -> slice:
        """The rows of a sample in `positions` and `fields`."""
        return slice(int(self.offsets[index]), int(self.offsets[index + 1]))

    def surface_rows(self, index: int) -> slice:
        """The rows of a sample's surface, in the order of its panels."""
        start = int(self.offsets[index])
        return slice(start, start + self.panel_lengths.shape[1])

    def take(self, samples: slice) -> "AirfoilArrays":
        """Consecutive samples, as views of these arrays.

        Args:
            samples: from one index up to another, both given.
        """
        offsets = self.offsets[samples.start : samples.stop + 1]
        points = slice(int(offsets[0]), int(offsets[-1]))
        return AirfoilArrays(
            self.positions[points],
            self.fields[points],
            offsets - offsets[0],
            *(getattr(self, name)[samples] for name in _PER_SAMPLE),
        )


_PER_SAMPLE = (
    "geometry",
    "panel_lengths",
    "global_embedding",
    "angle_of_attack",
    "lift_coefficient",
    "shape",
)


def concatenate(samples: Sequence[AirfoilSample], shapes: Sequence[str]) -> AirfoilArrays:
    """Puts samples of any lengths one after another.

    Args:
        samples: at least one, all with the same number of surface points.
        shapes: the name of each sample's shape.
    """
    lengths = [len(sample.positions) for sample in samples]
    stacked = {
        name: np.stack([getattr(sample, name) for sample in samples]) for name in _PER_SAMPLE[:-1]
    }
    return AirfoilArrays(
        positions=np.concatenate([sample.positions for sample in samples]),
        fields=np.concatenate([sample.fields for sample in samples]),
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        shape=np.array(shapes),
        **stacked,
    )


def surface_lift(
    surface_pressure: Float32[np.ndarray, " M"],
    geometry: Float32[np.ndarray, "M 6"],
    panel_lengths: Float32[np.ndarray, " M"],
    angle_of_attack: float,
) -> float:
    """Lift coefficient of a true or a predicted pressure at the surface points of a sample.

    Args:
        surface_pressure: pressure coefficient at the first M points.
        geometry: of the sample.
        panel_lengths: of the sample, in chords.
        angle_of_attack: in degrees.

    Raises:
        ValueError: the arrays differ in length.
    """
    shapes = (surface_pressure.shape, geometry.shape, panel_lengths.shape)
    points = len(panel_lengths)
    if shapes != ((points,), (points, 6), (points,)):
        raise ValueError(f"surface: expected shapes (M,), (M, 6) and (M,); got {shapes}")
    return lift_coefficient(
        surface_pressure, geometry[:, 3:5], panel_lengths, np.radians(angle_of_attack)
    )


def make_sample(
    solver: FlowSolver, angle_of_attack: float, points: int, generator: np.random.Generator
) -> AirfoilSample:
    """Draws points around an airfoil and evaluates its flow there.

    Args:
        solver: the solved airfoil; its M panels are the sample's surface.
        angle_of_attack: in degrees.
        points: number of points N, more than M.
        generator: where the points come from.

    Raises:
        ValueError: `points` is not more than M.
    """
    panels = solver.panels
    surface_points = len(panels.lengths)
    if points <= surface_points:
        raise ValueError(
            f"points: expected more than the {surface_points} on the surface; got {points}"
        )
    angle = np.radians(angle_of_attack)
    flow = solver.at(float(angle))
    outside = draw_points(panels, points - surface_points, generator)
    velocity = flow.velocity(outside)
    pressure = 1.0 - (velocity**2).sum(axis=1)  # Bernoulli

    positions = _in_space(np.concatenate([panels.midpoints, outside]))
    fields = np.empty_like(positions)
    fields[:, :2] = np.concatenate([flow.surface_velocity, velocity])
    fields[:, 2] = np.concatenate([flow.surface_pressure, pressure])
    geometry = np.concatenate([positions[:surface_points], _in_space(panels.normals)], axis=1)
    panel_lengths = panels.lengths.astype(np.float32)
    return AirfoilSample(
        positions=positions,
        fields=fields,
        geometry=geometry,
        panel_lengths=panel_lengths,
        global_embedding=np.array([[np.cos(angle), np.sin(angle)]], np.float32),
        angle_of_attack=float(angle_of_attack),
        lift_coefficient=surface_lift(
            fields[:surface_points, 2], geometry, panel_lengths, angle_of_attack
        ),
    )


def draw_points(
    panels: Panels, count: int, generator: np.random.Generator
) -> Float64[np.ndarray, "count 2"]:
    """Points around an airfoil, denser towards it in inverse proportion to distance.

    Each point starts on the surface, evenly along its length, and goes into any direction on the
    outer side by a distance whose logarithm is even between those of 0.001 and 1 chord. It is
    drawn again if that leads into the airfoil or within 0.001 chords of it.

    Args:
        panels: the airfoil.
        count: number of points.
        generator: where they come from.

    Returns:
        Positions in chords.
    """
    shares = panels.lengths / panels.lengths.sum()
    found = np.empty((0, 2))
    while len(found) < count:
        tries = min(count - len(found) + 16, _TRIES)
        panel = generator.choice(len(shares), tries, p=shares)
        along = generator.uniform(0.0, panels.lengths[panel])
        aside = generator.uniform(-0.5 * np.pi, 0.5 * np.pi, tries)
        reach = np.exp(generator.uniform(np.log(NEAREST_POINT), np.log(FARTHEST_POINT), tries))
        tangent, normal = panels.tangents[panel], panels.normals[panel]
        direction = np.cos(aside)[:, None] * normal + np.sin(aside)[:, None] * tangent
        points = panels.nodes[panel] + along[:, None] * tangent + reach[:, None] * direction
        far = distance_to(panels.nodes, points) >= NEAREST_POINT
        found = np.concatenate([found, points[far & ~contains(panels.nodes, points)]])
    return found[:count]


def _in_space(vectors: Float64[np.ndarray, "k 2"]) -> Float32[np.ndarray, "k 3"]:
    return np.pad(vectors, ((0, 0), (0, 1))).astype(np.float32)
