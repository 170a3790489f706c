"""Point-sharded mathematics on a device mesh."""

from parallel.attention import attention
from parallel.mesh import make_mesh
from parallel.points import local_rows, shard_points, unshard_points
from parallel.random import points_dropout, points_uniform
from parallel.reductions import (
    masked_mean,
    masked_mean_and_variance,
    masked_sum,
    slice_sums,
)

__all__ = [
    "attention",
    "local_rows",
    "make_mesh",
    "masked_mean",
    "masked_mean_and_variance",
    "masked_sum",
    "points_dropout",
    "points_uniform",
    "shard_points",
    "slice_sums",
    "unshard_points",
]
