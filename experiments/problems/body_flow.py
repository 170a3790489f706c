"""Inviscid incompressible flow without lift around closed bodies: exact, and by source panels.

An ellipsoid's surface velocity is known (Lamb, Hydrodynamics, 6th edition, article 114). Any other
body is a sheet of sources, constant on each triangle, that lets no fluid through the triangles'
centres (Hess and Smith, Calculation of Potential Flow about Arbitrary Bodies, Progress in
Aeronautical Sciences 8, 1967). There is no circulation and hence neither wake nor force. The
potential of sources has one value everywhere, so that a ring is a body like any other.

All is dimensionless: the speed and the density of the free stream are 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int64
from scipy.linalg import lu_factor, lu_solve
from scipy.special import elliprd

RESIDUAL_LIMIT = 1e-10
# In steradians: rounding leaves 1e-10, a centre within the body 4 pi.
SOLID_ANGLE_LIMIT = 1e-4

# Pairs of points and triangles computed at a time: a few arrays of 8 MB each.
_PAIRS = 2**20


@dataclass(frozen=True)
class Panels:
    """The triangles of a closed surface.

    Attributes:
        points: in any unit of length.
        faces: three points each, counter-clockwise as seen from the fluid.
        centres: of the triangles, in the points' unit.
        normals: unit vectors into the fluid.
        areas: of the triangles, in the points' unit squared.
    """

    points: Float64[np.ndarray, "v 3"]
    faces: Int64[np.ndarray, "n 3"]
    centres: Float64[np.ndarray, "n 3"]
    normals: Float64[np.ndarray, "n 3"]
    areas: Float64[np.ndarray, " n"]

    @classmethod
    def between(cls, points: Float[np.ndarray, "v 3"], faces: Int64[np.ndarray, "n 3"]) -> "Panels":
        """The panels of these triangles.

        Raises:
            ValueError: points that are not finite, a triangle without area, an edge that is not
                shared by two triangles that run along it in opposite directions, or normals that
                point inwards.
        """
        points, faces = np.asarray(points, np.float64), np.asarray(faces, np.int64)
        if not np.isfinite(points).all():
            raise ValueError("points: expected finite coordinates; got NaN or infinity")
        if not is_closed(faces):
            raise ValueError(
                "faces: expected edges that two triangles share; got an open, branching or twisted"
                " surface"
            )
        corners = points[faces]
        across = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
        doubled = np.linalg.norm(across, axis=1)
        if not (doubled > 0.0).all():
            raise ValueError(f"faces: expected triangles; got no area in row {doubled.argmin()}")
        centres = corners.mean(axis=1)
        if not (across * centres).sum() > 0.0:
            raise ValueError("faces: expected normals that point outwards; got inward ones")
        return cls(points, faces, centres, across / doubled[:, None], 0.5 * doubled)


def is_closed(faces: Int64[np.ndarray, "n 3"]) -> bool:
    """Whether each edge belongs to two triangles, which run along it in opposite directions."""
    edges = np.stack([faces, np.roll(faces, -1, axis=1)], -1).reshape(-1, 2)
    there, back = np.unique(edges, axis=0), np.unique(edges[:, ::-1], axis=0)
    return len(there) == len(edges) > 0 and np.array_equal(there, back)


def ellipsoid_speeds(semi_axes: Float[np.ndarray, " 3"]) -> Float64[np.ndarray, " 3"]:
    """Largest speed on an ellipsoid in a free stream along each of its axes; 3/2 on a sphere.

    `2 / (2 - alpha_i)` with `alpha_i = a b c * integral from 0 to infinity of
    dl / ((a_i^2 + l) sqrt((a^2 + l) (b^2 + l) (c^2 + l)))` (Lamb, article 114). The integral is two
    thirds of Carlson's R_D (NIST Digital Library of Mathematical Functions, 19.16.5).

    Args:
        semi_axes: `a, b, c > 0`, in any unit of length.

    Returns:
        In units of the free stream's speed.
    """
    axes = np.asarray(semi_axes, np.float64)
    squares = axes**2
    alpha = 2.0 / 3.0 * axes.prod() * elliprd(np.roll(squares, 1), np.roll(squares, 2), squares)
    return 2.0 / (2.0 - alpha)


def ellipsoid_velocity(
    semi_axes: Float[np.ndarray, " 3"],
    points: Float[np.ndarray, "n 3"],
    direction: Float[np.ndarray, " 3"],
) -> Float64[np.ndarray, "n 3"]:
    """Exact velocity on an ellipsoid about the origin whose axes are x, y and z.

    The potential on the surface is linear in the position, so that the velocity is the tangential
    part of one constant vector (Lamb, article 114).

    Args:
        semi_axes: in any unit of length.
        points: near the surface, in the same unit; the velocity is that where the ray from the
            origin through a point meets the ellipsoid.
        direction: unit vector of the free stream.

    Returns:
        In units of the free stream's speed.
    """
    # The gradient of (x/a)^2 + (y/b)^2 + (z/c)^2 keeps its direction along a ray.
    normals = np.asarray(points, np.float64) / np.square(semi_axes)
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    constant = ellipsoid_speeds(semi_axes) * direction
    return constant - (normals @ constant)[:, None] * normals


def panel_velocity(
    panels: Panels, direction: Float[np.ndarray, " 3"]
) -> Float64[np.ndarray, "n 3"]:
    """Velocity on the outer side of the triangles' centres, by a dense LU factorization.

    Each triangle's field is integrated exactly, so that nothing is lost where two sides of a body
    are close. Takes `8 n^2` bytes for the matrix and a little more.

    Args:
        panels: the body.
        direction: unit vector of the free stream.

    Returns:
        In units of the free stream's speed.

    Raises:
        RuntimeError: the surface crosses itself, or the fluid goes through a triangle's centre
            faster than 1e-10 of the free stream.
    """
    edges, edge_of, outward = _edges(panels)
    count = len(panels.areas)
    matrix = np.empty((count, count))
    for rows, solid_angles, logarithms in _influences(panels, edges):
        # From outside, the sides of a closed surface that one sees and those behind cancel.
        if not abs(solid_angles.sum(axis=1)).max() < SOLID_ANGLE_LIMIT:
            raise RuntimeError("expected a surface that does not cross itself; got one that does")
        part = solid_angles * (panels.normals[rows] @ panels.normals.T)
        for side in range(3):
            part += logarithms[:, edge_of[:, side]] * (panels.normals[rows] @ outward[:, side].T)
        matrix[rows] = part / (4.0 * np.pi)
    sources = lu_solve(
        lu_factor(matrix, overwrite_a=True, check_finite=False), -panels.normals @ direction
    )
    # An edge's logarithm is the same for both of its triangles.
    edge_sources = np.zeros((len(edges), 3))
    np.add.at(edge_sources, edge_of, outward * sources[:, None, None])
    velocity = np.tile(np.asarray(direction, np.float64), (count, 1))
    for rows, solid_angles, logarithms in _influences(panels, edges):
        normal = (solid_angles * sources) @ panels.normals
        velocity[rows] += (normal + logarithms @ edge_sources) / (4.0 * np.pi)
    residual = abs((velocity * panels.normals).sum(axis=1)).max()
    if not residual <= RESIDUAL_LIMIT:  # also catches NaN
        raise RuntimeError(
            f"expected a normal velocity of at most {RESIDUAL_LIMIT:g}; got {residual:.3g}"
        )
    return velocity


def pressure_coefficient(velocity: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, " n"]:
    """`1 - |v|^2` (Bernoulli), of velocities in units of the free stream's speed."""
    return 1.0 - np.square(velocity).sum(axis=1)


def force_share(panels: Panels, pressure: Float[np.ndarray, " n"]) -> float:
    """Net force of a pressure, as a share of all that it pushes and pulls.

    `|sum(Cp area normal)| / sum(|Cp| area)`. In a steady potential flow without circulation there
    is no force (d'Alembert), so that this tells how far a solution is from it.
    """
    pushes = pressure * panels.areas
    return float(np.linalg.norm(pushes @ panels.normals) / abs(pushes).sum())


def _edges(
    panels: Panels,
) -> tuple[Int64[np.ndarray, "e 2"], Int64[np.ndarray, "n 3"], Float64[np.ndarray, "n 3 3"]]:
    """The edges of a closed surface.

    Returns:
        The points of each edge; the edge on each side of each triangle; the unit vector in the
        triangle's plane that points out of it there.
    """
    faces = panels.faces
    sides = np.stack([faces, np.roll(faces, -1, axis=1)], -1)
    edges, edge_of = np.unique(np.sort(sides, axis=-1).reshape(-1, 2), axis=0, return_inverse=True)
    along = panels.points[sides[..., 1]] - panels.points[sides[..., 0]]
    outward = np.cross(along, panels.normals[:, None])
    outward /= np.linalg.norm(outward, axis=-1, keepdims=True)
    return edges, edge_of.reshape(-1, 3), outward


def _influences(
    panels: Panels, edges: Int64[np.ndarray, "e 2"]
) -> Iterator[tuple[slice, Float64[np.ndarray, "k n"], Float64[np.ndarray, "k e"]]]:
    """What sources on each triangle drive at the triangles' centres, some centres at a time.

    Of unit sources on a triangle, the velocity along its normal is its solid angle, and that in its
    plane is a logarithm for each edge along the edge's outward normal, both over 4 pi: the
    divergence theorem turns the gradient in the plane into a sum over the edges (Katz and Plotkin,
    Low-Speed Aerodynamics, section 10.4, has the same in coordinates of the panel). The solid angle
    is Van Oosterom and Strackee's (IEEE Transactions on Biomedical Engineering 30, 1983).

    Yields:
        Which centres; the solid angles that triangles subtend there, positive on the side of their
        normals; the logarithms of the edges.
    """
    points, faces, count = panels.points, panels.faces, len(panels.areas)
    lengths = np.linalg.norm(points[edges[:, 1]] - points[edges[:, 0]], axis=1)
    squares = np.square(points[faces] - points[np.roll(faces, -1, axis=1)]).sum(axis=-1)
    offsets = (panels.normals * panels.centres).sum(axis=1)
    step = max(1, _PAIRS // count)
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        centres = panels.centres[rows]
        distances = np.linalg.norm(centres[:, None] - points, axis=-1)
        logarithms = 2.0 * np.arctanh(
            lengths / (distances[:, edges[:, 0]] + distances[:, edges[:, 1]])
        )
        corners = [distances[:, faces[:, corner]] for corner in range(3)]
        height = centres @ panels.normals.T - offsets
        below = corners[0] * corners[1] * corners[2]
        for side in range(3):
            first, second = corners[side], corners[(side + 1) % 3]
            product = 0.5 * (first**2 + second**2 - squares[:, side])  # law of cosines
            below += product * corners[(side + 2) % 3]
        solid_angles = 2.0 * np.arctan2(2.0 * panels.areas * height, below)
        # A centre lies in the plane of its own triangle; the fluid is on its outer side.
        solid_angles[np.arange(rows.stop - start), np.arange(start, rows.stop)] = 2.0 * np.pi
        yield rows, solid_angles, logarithms
