"""Airfoil shapes as polygons: the NACA four-digit family, and the panelling of any outline.

Shapes are dimensionless: the chord is 1, the trailing edge lies at (1, 0) and the leading edge
near (0, 0). An outline is an open list of points that runs counter-clockwise, from the trailing
edge over the upper side to the leading edge and along the lower side back to the trailing edge;
its two ends coincide. Nodes are what panels are made of: the same order, without the repeated end.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64

from experiments.problems.splits import require_integer

THICKNESS_RANGE = (0.06, 0.20)
CAMBER_RANGE = (0.0, 0.06)
CAMBER_POSITION_RANGE = (0.2, 0.6)

MINIMUM_PANELS = 32

# Points of each side of a dense outline; a cubic spline through them is exact to 1e-8 chords.
_DENSE_POINTS = 401


class NacaParameters(NamedTuple):
    """A member of the NACA four-digit family, as fractions of the chord.

    Attributes:
        thickness: largest thickness.
        camber: largest height of the camber line.
        camber_position: where that height is.
    """

    thickness: float
    camber: float
    camber_position: float


def sample_naca(seed: int, index: int) -> NacaParameters:
    """Parameters of one shape, each drawn evenly from its range.

    Args:
        seed: seed of the data set, `>= 0`.
        index: which shape of the data set, `>= 0`; no other shape is needed to draw it.

    Raises:
        ValueError: an argument is not an integer or is too small.
    """
    require_integer("seed", seed, 0)
    require_integer("index", index, 0)
    generator = np.random.default_rng(np.random.SeedSequence(int(seed), spawn_key=(0, int(index))))
    low, high = np.array([THICKNESS_RANGE, CAMBER_RANGE, CAMBER_POSITION_RANGE]).T
    return NacaParameters(*(float(value) for value in generator.uniform(low, high)))


def naca_outline(parameters: NacaParameters) -> Float64[np.ndarray, "m 2"]:
    """Dense outline of a NACA four-digit airfoil with a closed trailing edge.

    The thickness is laid off at right angles to two parabolas that meet at the largest camber
    (Abbott and von Doenhoff, Theory of Wing Sections, section 6.4). The last coefficient of the
    thickness is -0.1036 instead of -0.1015, which closes the trailing edge.

    Args:
        parameters: fractions of the chord; `thickness` and `camber_position` in (0, 1), `camber`
            in [0, 1).

    Returns:
        801 points in units of the chord.

    Raises:
        ValueError: a parameter is out of its range.
    """
    thickness, camber, position = parameters
    if not (0.0 < thickness < 1.0 and 0.0 <= camber < 1.0 and 0.0 < position < 1.0):
        raise ValueError(
            "NACA parameters: expected thickness and camber position in (0, 1) and camber in"
            f" [0, 1); got {tuple(parameters)}"
        )
    # Even in this angle, points gather at both ends and the root of the nose is smooth.
    x = 0.5 * (1.0 - np.cos(np.linspace(0.0, np.pi, _DENSE_POINTS)))
    powers = np.stack([np.sqrt(x), x, x**2, x**3, x**4], -1)
    half_thickness = 5.0 * thickness * (powers @ [0.2969, -0.1260, -0.3516, 0.2843, -0.1036])
    length = np.where(x < position, position, 1.0 - position)
    front = np.where(x < position, 0.0, 1.0 - 2.0 * position)
    height = camber / length**2 * (front + 2.0 * position * x - x**2)
    slope = np.arctan(2.0 * camber / length**2 * (position - x))
    centre = np.stack([x, height], -1)
    offset = half_thickness[:, None] * np.stack([-np.sin(slope), np.cos(slope)], -1)
    outline = np.concatenate([(centre + offset)[::-1], (centre - offset)[1:]])
    outline[[0, -1]] = 1.0, 0.0  # the coefficients add up to zero but for rounding
    return outline


def panel_nodes(outline: Float64[np.ndarray, "m 2"], panels: int) -> Float64[np.ndarray, "n 2"]:
    """Nodes on a cubic spline through an outline, gathered at the leading and trailing edges.

    The spline's parameter is the length along the outline. Each side, from the trailing edge to
    the point that is farthest from it, is divided by a cosine in that length.

    Args:
        outline: in units of the chord, the first and the last point alike.
        panels: number of nodes, even, `>= 32`; half of the panels are on each side.

    Returns:
        Nodes in units of the chord: node 0 is the trailing edge, node `panels / 2` the leading
        edge.

    Raises:
        ValueError: `panels` is too small or odd, or points of the outline coincide.
    """
    require_integer("panels", panels, MINIMUM_PANELS)
    if panels % 2:
        raise ValueError(f"panels: expected an even number; got {panels}")
    steps = np.hypot(*np.diff(outline, axis=0).T)
    if not (steps > 0.0).all():
        raise ValueError(
            f"outline: expected distinct consecutive points; got {int((steps <= 0.0).sum())} pairs"
            " that coincide"
        )
    # Half a second to import, which no other data set needs.
    from scipy.interpolate import CubicSpline

    length = np.concatenate([[0.0], np.cumsum(steps)])
    spline = CubicSpline(length, outline)

    def chord(at: Float64[np.ndarray, " k"]) -> Float64[np.ndarray, " k"]:
        return np.hypot(*(spline(at) - outline[0]).T)

    nearest = int(np.argmax(chord(length)))
    bracket = np.linspace(length[nearest - 1], length[min(nearest + 1, len(length) - 1)], 2001)
    nose = bracket[np.argmax(chord(bracket))]
    fractions = 0.5 * (1.0 - np.cos(np.linspace(0.0, np.pi, panels // 2 + 1)))[:-1]
    return spline(np.concatenate([nose * fractions, nose + (length[-1] - nose) * fractions]))


def signed_area(nodes: Float64[np.ndarray, "n 2"]) -> float:
    """Area of a closed polygon in square chords, positive where it runs counter-clockwise."""
    following = np.roll(nodes, -1, axis=0)
    return 0.5 * float((nodes[:, 0] * following[:, 1] - nodes[:, 1] * following[:, 0]).sum())


def crosses_itself(nodes: Float64[np.ndarray, "n 2"]) -> bool:
    """Whether two edges of a closed polygon that do not share a node touch or cross."""
    ends = np.roll(nodes, -1, axis=0)

    def side_of(point: Float64[np.ndarray, "n 2"]) -> Float64[np.ndarray, "n n"]:
        """Twice the area between each edge (axis 0) and each point (axis 1)."""
        edge = (ends - nodes)[:, None]
        offset = point[None] - nodes[:, None]
        return edge[..., 0] * offset[..., 1] - edge[..., 1] * offset[..., 0]

    straddles = side_of(nodes) * side_of(ends) <= 0.0
    # Two edges of one straight side straddle each other's line, by rounding, and yet are apart.
    low, high = np.minimum(nodes, ends), np.maximum(nodes, ends)
    overlap = (low[:, None] <= high[None, :]).all(axis=-1)
    index = np.arange(len(nodes))
    apart = (index[:, None] - index[None, :]) % len(nodes)
    unrelated = (apart > 1) & (apart < len(nodes) - 1)
    return bool((straddles & straddles.T & overlap & overlap.T & unrelated).any())


def contains(
    nodes: Float64[np.ndarray, "n 2"], points: Float64[np.ndarray, "k 2"]
) -> Bool[np.ndarray, " k"]:
    """Whether points lie inside a closed polygon: rays from there cross it an odd number of times.

    Args:
        nodes: the polygon, in either direction.
        points: any points; the answer for one exactly on an edge is unspecified.
    """
    ends = np.roll(nodes, -1, axis=0)
    above = points[:, None, 1] < nodes[None, :, 1]
    spans = above != np.roll(above, -1, axis=1)
    row, edge = np.nonzero(spans)  # few of all pairs
    share = (points[row, 1] - nodes[edge, 1]) / (ends[edge, 1] - nodes[edge, 1])
    right = points[row, 0] < nodes[edge, 0] + share * (ends[edge, 0] - nodes[edge, 0])
    return np.bincount(row, right, len(points)) % 2 == 1


def distance_to(
    nodes: Float64[np.ndarray, "n 2"], points: Float64[np.ndarray, "k 2"]
) -> Float64[np.ndarray, " k"]:
    """Distance in chords of points, inside and outside alike, from a closed polygon's edges."""
    edges = np.roll(nodes, -1, axis=0) - nodes
    lengths = np.hypot(*edges.T)
    tangents = edges / lengths[:, None]
    x = points[:, None, 0] - nodes[:, 0]
    y = points[:, None, 1] - nodes[:, 1]
    along = x * tangents[:, 0] + y * tangents[:, 1]
    across = y * tangents[:, 0] - x * tangents[:, 1]
    beyond = np.maximum(np.maximum(-along, along - lengths), 0.0)
    return np.sqrt((across**2 + beyond**2).min(axis=1))
