"""Random closed bodies of even triangles: ellipsoids, and what PyVista makes or brings along.

A body is a fine closed surface that is then covered with few triangles of about one size. The fine
surface of an ellipsoid is exact. That of any other body lies outside of the shape that it comes
from, at a distance that the triangles resolve: this closes gaps, joins parts that touch, and rounds
edges, at which the flow would be infinitely fast. The longest edge of the box around a body is 1
before the body is deformed.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyvista
from jaxtyping import Float64, Int64
from pyvista import examples
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, dijkstra
from scipy.spatial import cKDTree

from experiments.problems.body_flow import Panels

# Of the axes of an ellipsoid, before the longest is made 1.
AXIS_RANGE = (0.3, 1.0)
STRETCH_RANGE = (0.75, 1.25)
BEND_RANGE = (-0.4, 0.4)
WAVE_NUMBER_RANGE = (2.0, 6.0)
# Largest slope of each of three waves; waves whose slopes add up to less than 1 cannot fold space.
WAVE_SLOPE = 0.15

# In edges of the triangles that would cover a shape: how far outside of it the surface lies, and
# the edges of the fine surface.
_OFFSET = 2.0
# Where more would close a hole.
_OFFSETS = {"torus": 1.0, "nut": 1.0}
_FINE_EDGE = 1.0 / 7.0
# More hardly move the centres, which stay on points of the fine surface.
_RELAXATIONS = 12


class Body(NamedTuple):
    """A closed surface.

    Attributes:
        kind: one of `KINDS`.
        panels: its triangles.
        semi_axes: along x, y and z, if it is an ellipsoid about the origin.
    """

    kind: str
    panels: Panels
    semi_axes: Float64[np.ndarray, " 3"] | None = None


class _Fine(NamedTuple):
    """A fine closed surface."""

    points: Float64[np.ndarray, "v 3"]
    faces: Int64[np.ndarray, "n 3"]


def _superellipsoid(generator: np.random.Generator) -> pyvista.PolyData:
    polar, equatorial = generator.uniform(0.4, 1.6, 2)
    return pyvista.ParametricSuperEllipsoid(n1=polar, n2=equatorial)


def _torus(generator: np.random.Generator) -> pyvista.PolyData:
    thickness, turn = generator.uniform([0.2, 0.0], [0.3, 90.0])
    return pyvista.ParametricTorus(ringradius=1.0, crosssectionradius=thickness).rotate_y(turn)


def _capsule(generator: np.random.Generator) -> pyvista.PolyData:
    return pyvista.Capsule(radius=0.5, cylinder_length=generator.uniform(0.5, 3.0))


def _cylinder(generator: np.random.Generator) -> pyvista.PolyData:
    return pyvista.Cylinder(
        radius=0.5, height=generator.uniform(0.5, 3.0), direction=generator.normal(size=3)
    )


def _cone(generator: np.random.Generator) -> pyvista.PolyData:
    return pyvista.Cone(
        radius=0.5, height=generator.uniform(0.7, 2.0), resolution=60, direction=(-1.0, 0.0, 0.0)
    )


def _box(generator: np.random.Generator) -> pyvista.PolyData:
    x, y, z = generator.uniform(0.3, 1.0, 3)
    return pyvista.Box(bounds=(-x, x, -y, y, -z, z))


_SHAPES: dict[str, Callable[[np.random.Generator], pyvista.PolyData]] = {
    "superellipsoid": _superellipsoid,
    "torus": _torus,
    "capsule": _capsule,
    "cylinder": _cylinder,
    "cone": _cone,
    "box": _box,
    # Both point along x, as the free stream nearly does.
    "airplane": lambda _: examples.load_airplane().rotate_z(-90.0),
    "ant": lambda _: examples.load_ant().rotate_y(-90.0),
    "nut": lambda _: examples.load_nut(),
}
KINDS = ("ellipsoid", *_SHAPES)


def draw_body(generator: np.random.Generator, faces: int, kind: str | None = None) -> Body:
    """A random body.

    Args:
        generator: what all is drawn with.
        faces: number of triangles; an odd one gives one less.
        kind: one of `KINDS`; by default an ellipsoid in a third of all cases, else any other.

    Raises:
        ValueError: the triangles that came out are no closed surface; another draw's may be.
    """
    if kind is None:
        ellipsoid = generator.uniform() < 1.0 / 3.0
        kind = "ellipsoid" if ellipsoid else str(generator.choice(KINDS[1:]))
    if kind == "ellipsoid":
        axes = generator.uniform(*AXIS_RANGE, 3)
        semi_axes = 0.5 * axes / axes.max()
        return Body(kind, _covered(_fine_ellipsoid(semi_axes, faces), faces, generator), semi_axes)
    fine = _fine_outside(_SHAPES[kind](generator), faces, _OFFSETS.get(kind, _OFFSET))
    fine = fine._replace(points=deformed(fine.points, generator))
    return Body(kind, _covered(fine, faces, generator))


def deformed(
    points: Float64[np.ndarray, "v 3"], generator: np.random.Generator
) -> Float64[np.ndarray, "v 3"]:
    """Points moved by a random stretch, bend and three waves of low frequency.

    This maps all of space and takes no two points to one, so that it never makes a surface cross
    itself; displacements along the normals may.

    Args:
        points: of a surface about the origin whose size is 1.
        generator: what the map is drawn with.
    """
    points = points * generator.uniform(*STRETCH_RANGE, 3)
    points[:, 1:] += np.square(points[:, :1]) * generator.uniform(*BEND_RANGE, 2)
    waves = np.zeros_like(points)
    for _ in range(3):
        along, moved = (vector / np.linalg.norm(vector) for vector in generator.normal(size=(2, 3)))
        number = generator.uniform(*WAVE_NUMBER_RANGE)
        phase = generator.uniform(0.0, 2.0 * np.pi)
        waves += WAVE_SLOPE / number * np.sin(number * points @ along + phase)[:, None] * moved
    return points + waves


def _fine_ellipsoid(semi_axes: Float64[np.ndarray, " 3"], faces: int) -> _Fine:
    # An icosphere has 20 * 4^n triangles.
    halvings = round(np.log(faces / _FINE_EDGE**2 / 20.0) / np.log(4.0))
    sphere = pyvista.Icosphere(radius=1.0, nsub=halvings)
    points = np.asarray(sphere.points, np.float64)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    return _Fine(points * semi_axes, sphere.regular_faces)


def _fine_outside(shape: pyvista.PolyData, faces: int, offset: float) -> _Fine:
    """The outermost surface at a distance from a shape, which need not be closed."""
    shape = pyvista.PolyData(np.asarray(shape.points, np.float64), shape.faces).triangulate()
    edge = np.sqrt(4.0 / np.sqrt(3.0) * shape.area / faces)  # of equilateral triangles
    distance = offset * edge
    # By default VTK divides all triangles that are larger than 1, whatever the unit.
    cloud = shape.subdivide_adaptive(
        max_edge_len=0.5 * distance, max_tri_area=distance**2, max_n_passes=20
    ).points
    # Halved below, which takes less time than a finer grid.
    spacing = 2.0 * _FINE_EDGE * edge
    low, high = cloud.min(axis=0) - distance, cloud.max(axis=0) + distance
    grid = pyvista.ImageData(
        dimensions=np.ceil((high - low) / spacing).astype(int) + 5,
        spacing=[spacing] * 3,
        origin=low - 2.0 * spacing,
    )
    near, _ = cKDTree(cloud).query(grid.points, distance_upper_bound=2.0 * distance)
    grid.point_data["distance"] = np.minimum(near, 2.0 * distance)
    contour = grid.contour([distance], scalars="distance", method="flying_edges").subdivide(1)
    fine = _outermost(np.asarray(contour.points, np.float64), contour.regular_faces)
    low, high = fine.points.min(axis=0), fine.points.max(axis=0)
    return fine._replace(points=(fine.points - 0.5 * (low + high)) / (high - low).max())


def _outermost(points: Float64[np.ndarray, "v 3"], faces: Int64[np.ndarray, "n 3"]) -> _Fine:
    """The connected part with the largest box, turned outwards."""
    count, part_of = connected_components(_graph(points, faces), directed=False)
    sizes = [np.ptp(points[part_of == part], axis=0).prod() for part in range(count)]
    kept = part_of == np.argmax(sizes)
    faces = (np.cumsum(kept) - 1)[faces[kept[faces[:, 0]]]]
    points = points[kept]
    first, second, third = np.moveaxis(points[faces], 1, 0)
    outwards = (first * np.cross(second, third)).sum() > 0.0  # six times the volume
    return _Fine(points, faces if outwards else faces[:, ::-1])


def _graph(points: Float64[np.ndarray, "v 3"], faces: Int64[np.ndarray, "n 3"]) -> csr_array:
    """Lengths of the edges of a closed surface, each in both directions."""
    start, end = faces.ravel(), np.roll(faces, -1, axis=1).ravel()
    # A length of zero would be no edge.
    lengths = np.maximum(np.linalg.norm(points[end] - points[start], axis=1), 1e-9)
    return csr_array((lengths, (start, end)), shape=(len(points),) * 2)


def _covered(fine: _Fine, faces: int, generator: np.random.Generator) -> Panels:
    """A fine surface with fewer triangles: those between the centres of its Voronoi cells.

    Distances are those along the surface (Peyré and Cohen, Geodesic Remeshing Using Front
    Propagation, International Journal of Computer Vision 69, 2006), so that two sides of a thin
    part share no cell. Lloyd's relaxation makes the cells even.

    Raises:
        ValueError: the triangles are no closed surface with as many holes as the fine one.
    """
    points, triangles = fine
    characteristic = len(points) - len(triangles) // 2  # Euler's: 2, and 2 less for each hole
    cells = faces // 2 + characteristic
    corners = points[triangles]
    areas = np.linalg.norm(
        np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]), axis=1
    )
    weights = np.bincount(triangles.ravel(), np.repeat(areas, 3), len(points))
    graph = _graph(points, triangles)
    seeds = generator.choice(len(points), cells, replace=False, p=weights / weights.sum())
    for _ in range(_RELAXATIONS):
        cell_of = _nearest_seed(graph, seeds)
        sums = [np.bincount(cell_of, weights * values, cells) for values in (1.0, *points.T)]
        centres = np.stack(sums[1:], -1) / sums[0][:, None]
        # Of each cell the point that is nearest to its centre, the first one in this order.
        order = np.lexsort((np.linalg.norm(points - centres[cell_of], axis=1), cell_of))
        seeds = order[np.searchsorted(cell_of[order], np.arange(cells))]
    between = _nearest_seed(graph, seeds)[triangles]
    distinct = (between != np.roll(between, -1, axis=1)).all(axis=1)
    found, where = np.unique(np.sort(between[distinct], axis=1), axis=0, return_index=True)
    # With this number, what is closed has no points at which it touches itself.
    if len(found) != 2 * (faces // 2):
        raise ValueError(
            f"expected {2 * (faces // 2)} triangles between {cells} cells; got {len(found)}, around"
            " a part that is too thin"
        )
    # The flow is that around the points as files hold them.
    return Panels.between(points[seeds].astype(np.float32), between[distinct][where])


def _nearest_seed(graph: csr_array, seeds: Int64[np.ndarray, " m"]) -> Int64[np.ndarray, " v"]:
    """For each point the number of the seed with the shortest way to it."""
    _, _, nearest = dijkstra(graph, indices=seeds, min_only=True, return_predecessors=True)
    number = np.empty(graph.shape[0], np.int64)
    number[seeds] = np.arange(len(seeds))
    return number[nearest]
