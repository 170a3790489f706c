"""What is derived of a sample before a model sees it: distances, reference frames, coefficients."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyvista
from jaxtyping import Float, Float32, Shaped


def signed_distance(
    coordinates: Float[np.ndarray, "V 3"],
    faces: Shaped[np.ndarray, "F 3"],
    points: Float[np.ndarray, "N 3"],
) -> tuple[Float32[np.ndarray, " N"], Float32[np.ndarray, "N 3"]]:
    """Distance of points from a surface, and the direction to its nearest point.

    Args:
        coordinates: corners of the surface.
        faces: three corners a triangle; their order tells the outer side.
        points: where it is asked for.

    Returns:
        Distances in the unit of the points, negative inside; and unit vectors, zero for a point on
        the surface.
    """
    corners = np.column_stack([np.full(len(faces), 3), faces]).ravel()
    surface = pyvista.PolyData(np.asarray(coordinates, np.float64), corners)
    cloud = pyvista.PolyData(np.asarray(points, np.float64))
    distance = np.asarray(cloud.compute_implicit_distance(surface)["implicit_distance"])
    # PyVista's types do not say that a flag makes a result a pair.
    found: Any = surface.find_closest_cell(cloud.points, return_closest_point=True)
    _, nearest = found
    towards = nearest - cloud.points
    length = np.linalg.norm(towards, axis=1, keepdims=True)
    direction = np.divide(towards, length, out=np.zeros_like(towards), where=length > 0)
    return distance.astype(np.float32), direction.astype(np.float32)


@dataclass(frozen=True)
class Frame:
    """Where a sample's coordinates begin and what they are measured in.

    Attributes:
        origin: in the unit of the files.
        length: reference length in that unit.
    """

    origin: Float[np.ndarray, " 3"]
    length: float = 1.0

    @classmethod
    def of_surface(
        cls,
        centers: Float[np.ndarray, "F 3"],
        areas: Float[np.ndarray, " F"],
        length: float = 1.0,
    ) -> "Frame":
        """One that begins at the centroid of a surface, each part by its area.

        Raises:
            ValueError: the surface has no area, or the length is not positive.
        """
        total = float(np.sum(areas, dtype=np.float64))
        if not total > 0:
            raise ValueError(f"frame: expected a surface of some area; got {total:g}")
        if not length > 0:
            raise ValueError(f"frame: expected a positive reference length; got {length!r}")
        weights = np.asarray(areas, np.float64)[:, None] / total
        return cls((weights * centers).sum(0), float(length))

    def positions(self, points: Float[np.ndarray, "N 3"]) -> Float32[np.ndarray, "N 3"]:
        """Positions of points in this frame."""
        return ((np.asarray(points, np.float64) - self.origin) / self.length).astype(np.float32)


@dataclass(frozen=True)
class FreeStream:
    """The undisturbed flow, by which fields become coefficients and back.

    Attributes:
        density: in kg/m^3; 1 for pressures over density.
        velocity: speed in m/s.
        pressure: in Pa.
    """

    density: float
    velocity: float
    pressure: float = 0.0

    def __post_init__(self) -> None:
        """Refuses what nothing can be divided by.

        Raises:
            ValueError: density or velocity are not positive.
        """
        for name in ("density", "velocity"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"free stream: expected a positive {name}; got {getattr(self, name)!r}"
                )

    def coefficient(self, field: Float[np.ndarray, "N *C"], kind: str) -> np.ndarray:
        """A field over what the free stream makes of it.

        Args:
            field: in SI units.
            kind: `pressure`, over the dynamic pressure, less that of the free stream; `stress`,
                over the dynamic pressure; `velocity`, over the speed.

        Raises:
            ValueError: the kind is unknown.
        """
        offset, scale = self._reference(kind)
        return (field - offset) / scale

    def field(self, coefficient: Float[np.ndarray, "N *C"], kind: str) -> np.ndarray:
        """The field of which `coefficient` makes this, in SI units."""
        offset, scale = self._reference(kind)
        return coefficient * scale + offset

    def _reference(self, kind: str) -> tuple[float, float]:
        dynamic = 0.5 * self.density * self.velocity**2
        references = {
            "pressure": (self.pressure, dynamic),
            "stress": (0.0, dynamic),
            "velocity": (0.0, self.velocity),
        }
        if kind not in references:
            raise ValueError(f"free stream: expected one of {', '.join(references)}; got {kind!r}")
        return references[kind]
