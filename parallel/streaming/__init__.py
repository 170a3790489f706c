"""Sums and softmaxes over points, and maps of points, in chunks and again for the gradient.

What a function makes for a chunk of points, however wide, is gone before the next chunk, forward
and backward. Only the points themselves, the results and the weights are kept. On a mesh each shard
goes through its own points; sums, and gradients of weights, meet in packed all-reduces.

A function is called as `function(weights, latents, chunk, places)`:

- `weights`: a tree of arrays `(H or 1, ...)` that all samples share;
- `latents`: a tree of arrays `(B, H, ...)`, something of each sample that every shard has;
- `chunk`: a tree of arrays `(B, n, ...)`, n of the points;
- `places`: see `Places`.

It must be hashable: a function of a module, or a `functools.partial` of one with hashable
arguments. Gradients flow to all leaves of floating type. Inside it a weight that the heads share
should have been broadcast to them: its gradient is then summed over them once, not for each chunk.
"""

from parallel.streaming.maps import map_held, map_points
from parallel.streaming.shards import GATHERED, Held
from parallel.streaming.softmaxes import (
    SoftmaxPart,
    greatest_over_points,
    merged_softmax,
    softmax_over_points,
    softmax_part,
)
from parallel.streaming.sums import pull_back_sums, sum_over_points
from parallel.walk import Chunking, Places

__all__ = [
    "GATHERED",
    "Chunking",
    "Held",
    "Places",
    "SoftmaxPart",
    "greatest_over_points",
    "map_held",
    "map_points",
    "merged_softmax",
    "pull_back_sums",
    "softmax_over_points",
    "softmax_part",
    "sum_over_points",
]
