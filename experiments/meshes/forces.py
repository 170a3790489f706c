"""Force and moment coefficients of a body, integrated from the fields on its surface."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float


def tractions(
    normals: Float[np.ndarray, "N 3"],
    pressure: Float[np.ndarray, " N"],
    shear: Float[np.ndarray, "N 3"] | None = None,
    *,
    inward: bool = False,
) -> Float[np.ndarray, "N 3"]:
    """Force on the body per area, `-p n + tau` with normals that point into the fluid.

    Args:
        normals: unit normals.
        pressure: over that of the undisturbed flow.
        shear: wall shear stress; none for an inviscid flow.
        inward: normals point into the body, and shear is that on the fluid.
    """
    sign = -1.0 if inward else 1.0
    force = -sign * pressure[:, None].astype(np.float64) * normals
    return force if shear is None else force + sign * shear


def force_coefficients(
    tractions: Float[np.ndarray, "N 3"],
    areas: Float[np.ndarray, " N"],
    directions: Mapping[str, Sequence[float]],
    reference: float,
) -> dict[str, float]:
    """Components of the force over `reference`, the dynamic pressure times an area.

    Args:
        tractions: force per area.
        areas: of the surface's points.
        directions: along which components are taken, by name; their length counts for nothing.
        reference: by which they are divided.
    """
    force = (tractions * areas[:, None].astype(np.float64)).sum(0)
    return {name: float(force @ _unit(axis) / reference) for name, axis in directions.items()}


def moment_coefficients(
    tractions: Float[np.ndarray, "N 3"],
    areas: Float[np.ndarray, " N"],
    positions: Float[np.ndarray, "N 3"],
    axes: Mapping[str, Sequence[float]],
    centre: Sequence[float],
    reference: float,
) -> dict[str, float]:
    """Components of the moment about `centre`, over dynamic pressure, area and length."""
    arms = positions.astype(np.float64) - np.asarray(centre, np.float64)
    moment = (np.cross(arms, tractions) * areas[:, None]).sum(0)
    return {name: float(moment @ _unit(axis) / reference) for name, axis in axes.items()}


def _unit(direction: Sequence[float]) -> np.ndarray:
    along = np.asarray(direction, np.float64)
    return along / np.linalg.norm(along)
