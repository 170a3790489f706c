"""Point-sharded mathematics on a device mesh."""

from parallel.attention import attention
from parallel.mesh import make_mesh
from parallel.neighbor_features import gather_neighbors, project_neighbors
from parallel.neighbors import Neighbors, radius_search, within
from parallel.placement import local_rows
from parallel.points import shard_points, unshard_points
from parallel.random import points_dropout, points_uniform
from parallel.reductions import (
    masked_mean,
    masked_mean_and_variance,
    masked_sum,
    slice_sums,
)

__all__ = [
    "Neighbors",
    "attention",
    "gather_neighbors",
    "local_rows",
    "make_mesh",
    "masked_mean",
    "masked_mean_and_variance",
    "masked_sum",
    "points_dropout",
    "points_uniform",
    "project_neighbors",
    "radius_search",
    "shard_points",
    "slice_sums",
    "unshard_points",
    "within",
]
