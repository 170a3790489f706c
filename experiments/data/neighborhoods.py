"""Neighbours found on the host, once, by a k-d tree: what `parallel.radius_search` would find."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy.spatial import cKDTree

from geotransolver_jax import Neighborhoods
from parallel.neighbors import Neighbors

# A tree returns equally near points in any order, and may leave out the wrong ones of them. A few
# more than are asked for show where that could be.
_SPARE = 8


def find_neighborhoods(
    positions: Sequence[Float[np.ndarray, "N_i D"]],
    geometry: Sequence[Float[np.ndarray, "M_i D"]],
    radius: float,
    count: int,
) -> list[Neighborhoods]:
    """The neighbourhoods of one stream, sample by sample, on the host.

    Stacked over samples of one length, they are what `GeoTransolver` takes as `neighborhoods`.

    Args:
        positions: coordinates of the points of each sample.
        geometry: coordinates of the points of its geometry.
        radius: the largest of the model's radii.
        count: the largest of its `neighbors_in_radius`.
    """
    return [
        Neighborhoods(
            nearest_within(points, surface, radius, count),
            nearest_within(surface, points, radius, count),
        )
        for points, surface in zip(positions, geometry, strict=True)
    ]


def nearest_within(
    queries: Float[np.ndarray, "Q D"], points: Float[np.ndarray, "M D"], radius: float, count: int
) -> Neighbors:
    """The nearest `count` points within `radius` of each query, equally near ones by lower index.

    Returns:
        Indices `(Q, count)`, -1 in empty slots, and distances, infinite there.

    Raises:
        ValueError: no arrays of coordinates of one width, an empty cloud, or a coordinate that is
            not finite.
    """
    for name, cloud in (("queries", queries), ("points", points)):
        shape = np.shape(cloud)
        if not isinstance(cloud, np.ndarray) or len(shape) != 2 or not shape[0]:
            raise ValueError(f"{name}: expected coordinates (N, D); got shape {shape}")
        if shape[1] != points.shape[1]:
            raise ValueError(f"{name}: expected the width {points.shape[1]} of points; got {shape}")
        wrong = ~np.isfinite(cloud).all(1)
        if wrong.any():
            first = wrong.argmax()
            raise ValueError(
                f"{name}: expected finite coordinates; got {cloud[first].tolist()} at point {first}"
            )
    tree, wanted = cKDTree(points), min(count + _SPARE, len(points))
    while True:
        _, found = tree.query(queries, wanted)
        found = found.reshape(len(queries), wanted)
        squares = _squares(queries, points[found])
        order = np.lexsort((found, squares), axis=-1)
        found, squares = (np.take_along_axis(array, order, -1) for array in (found, squares))
        # If the last that is kept is nearer than the last that was looked at, none is missing.
        if wanted == len(points) or (squares[:, min(count, wanted) - 1] < squares[:, -1]).all():
            break
        wanted = min(2 * wanted, len(points))
    found, distances = found[:, :count], np.sqrt(squares[:, :count])
    inside = distances <= points.dtype.type(radius)
    missing = [(0, 0), (0, count - found.shape[1])]
    return Neighbors(
        np.pad(np.where(inside, found, -1), missing, constant_values=-1).astype(np.int32),
        np.pad(np.where(inside, distances, np.inf), missing, constant_values=np.inf),
    )


def _squares(queries: np.ndarray, neighbors: np.ndarray) -> np.ndarray:
    """Squared distances in the type of the coordinates, summed as the search sums them."""
    difference = queries[:, None] - neighbors
    squares = difference[..., 0] * difference[..., 0]
    for axis in range(1, difference.shape[-1]):
        squares = squares + difference[..., axis] * difference[..., axis]
    return squares
