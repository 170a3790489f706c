"""What a shard of the points works with: how its arguments are split, and what it keeps.

Sums and maps of points are islands of `shard_map` with these layouts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from parallel import mesh as mesh_lib
from parallel.mesh import DATA, POINTS
from parallel.precision import accumulation_dtype
from parallel.walk import OVER, Places, Walk, over_shards

# What points were summed to, by this name for `jax.checkpoint_policies`.
GATHERED = "gathered"

SAMPLES = P(DATA)
CLOUD = P(DATA, POINTS)
COPIES = P(OVER)
PLACES = Places._make((P(DATA), P(POINTS)))
GRADIENTS = (P(), SAMPLES, CLOUD)


class Held(NamedTuple):
    """What points were summed of, to read on from.

    The gradient of what reads them here comes to that of the sum, before any of it is exchanged:
    weights that serve both are reduced over the shards once.

    Attributes:
        weights: `(shards, H or 1, ...)`, a copy for each shard, in float32 or wider: so is what
            comes back to it before the shards meet.
        points: `(B, N, ...)`.
    """

    weights: Any
    points: Any


HELD = Held(COPIES, CLOUD)


def all_gradients(
    walk: Walk, weights: PyTree, d_made_of: Callable, d_held: Held
) -> tuple[PyTree, PyTree, PyTree]:
    """Gradients of weights, latents and points of a sum, and of what read on from it."""
    d_weights = jax.tree.map(lambda copy: copy[0], d_held.weights)
    d_weights, d_latents, d_points = walk.gradients(d_made_of, d_weights, d_held.points)
    return over_shards(d_weights, weights), d_latents, d_points


def copies_of(tree: PyTree) -> PyTree:
    """What a shard has of its own, as one of a stack over the shards."""
    return jax.tree.map(lambda leaf: leaf[None], tree)


def wide(tree: PyTree) -> PyTree:
    """In float32 or wider, where it is of floating type."""
    return jax.tree.map(
        lambda leaf: (
            leaf.astype(accumulation_dtype(leaf.dtype))
            if jnp.issubdtype(leaf.dtype, jnp.floating)
            else leaf
        ),
        tree,
    )


def island(
    local: Callable[..., PyTree], in_specs: PyTree, out_specs: PyTree
) -> Callable[..., PyTree]:
    """A function of one shard, as one of the whole mesh."""
    return mesh_lib.island(local, in_specs, out_specs, over=OVER)


def tied(points: PyTree) -> PyTree:
    """The points, as something of which nothing is known.

    What has no gradient is held to what has, see `chunks.tie`. And of the points that a scan over
    layers keeps the compiler then makes no transposed copy, of all layers at once.
    """
    return jax.lax.optimization_barrier(points)
