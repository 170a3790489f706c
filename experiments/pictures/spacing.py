"""How far the points of a cloud are apart, by which they are drawn as discs or spheres."""

import numpy as np
from jaxtyping import Float
from scipy.spatial import cKDTree


def neighbours(points: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Distances and indices of the nearest points of each point, itself among them."""
    order = np.arange(1, min(count, len(points)) + 1)
    return cKDTree(points).query(points, k=order)


def spacing(distances: Float[np.ndarray, "N k"]) -> Float[np.ndarray, " N"]:
    """Distance to the sixth neighbour.

    Discs of that radius leave open exp(-6) of a random cloud that is evenly dense on a surface.
    """
    return distances[:, min(6, distances.shape[1] - 1)]
