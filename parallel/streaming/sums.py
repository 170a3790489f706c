"""Sums over points."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from parallel import mesh as mesh_lib
from parallel.annotations import Position, Size
from parallel.mesh import POINTS
from parallel.precision import accumulation_dtype
from parallel.streaming.shards import (
    CLOUD,
    COPIES,
    GATHERED,
    GRADIENTS,
    HELD,
    PLACES,
    SAMPLES,
    Held,
    all_gradients,
    copies_of,
    island,
    tied,
    wide,
)
from parallel.walk import Chunking, Places, Walk, all_sum, floating_leaves


def sum_over_points(
    function: Callable, chunking: Chunking, weights: Any, latents: Any, points: Any
) -> tuple[Any, Held]:
    """`sum_n function(..., point_n, ...)`, replicated over the points.

    Args:
        function: see the module; returns a tree of arrays `(B, H, ...)`, summed over the chunk.
        chunking: how long chunks are.
        weights: see the module, as are the following.
        latents: `(B, H, ...)`, replicated over the points.
        points: `(B, N, ...)`, split over the mesh axis `points`.

    Returns:
        The sums, in float32 or wider, and what they were made of.
    """
    return _sum_jitted(function, chunking, weights, latents, points)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum(
    function: Callable[..., PyTree],
    chunking: Chunking,
    weights: PyTree,
    latents: PyTree,
    points: PyTree,
) -> tuple[PyTree, Held]:
    return _sum_forward(function, chunking, weights, latents, points)[0]


def _sum_forward(
    function: Callable[..., PyTree],
    chunking: Chunking,
    weights: PyTree,
    latents: PyTree,
    points: PyTree,
) -> tuple[tuple[PyTree, Held], PyTree]:
    def local(
        places: Places, weights: PyTree, latents: PyTree, points: PyTree, *, axis: str | None
    ) -> PyTree:
        walk = Walk(function, chunking, places, weights, latents, points)
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, accumulation_dtype(leaf.dtype)), walk.made
        )

        def add(start: Position, size: Size, sums: PyTree) -> PyTree:
            return jax.tree.map(jnp.add, sums, walk.make(start, size))

        sums = all_sum(walk.fold(add, zeros), mesh_lib.split_axes(POINTS), lead=2)
        return sums, copies_of(wide(weights))

    run = island(local, (PLACES, P(), SAMPLES, CLOUD), (SAMPLES, COPIES))
    sums, copies = run(Places.of(points), weights, latents, tied(points))
    sums = checkpoint_name(sums, GATHERED)
    return (sums, Held(copies, points)), (weights, latents, points)


def _sum_backward(
    function: Callable[..., PyTree], chunking: Chunking, residuals: PyTree, gradients: PyTree
) -> tuple[PyTree, PyTree, PyTree]:
    return pull_back_sums(function, chunking, *residuals, *gradients)


def pull_back_sums(
    function: Callable,
    chunking: Chunking,
    weights: PyTree,
    latents: PyTree,
    points: PyTree,
    d_sums: PyTree,
    d_held: Held,
) -> tuple[Any, Any, Any]:
    """Gradients of weights, latents and points, from those of what `sum_over_points` returns.

    For a sum whose gradient is better had from another function than the one that it is made by.
    """

    def local(
        places: Places,
        weights: PyTree,
        latents: PyTree,
        points: PyTree,
        d_sums: PyTree,
        d_held: Held,
        *,
        axis: str | None,
    ) -> PyTree:
        walk = Walk(function, chunking, places, weights, latents, points)
        return all_gradients(walk, weights, lambda start, size: lambda made: d_sums, d_held)

    d_held = floating_leaves(d_held)
    run = island(local, (PLACES, P(), SAMPLES, CLOUD, SAMPLES, HELD), GRADIENTS)
    return run(Places.of(points), weights, latents, tied(points), d_sums, d_held)


_sum.defvjp(_sum_forward, _sum_backward)
_sum_jitted = jax.jit(_sum, static_argnums=(0, 1))
