"""Maps of points, of those that were summed before as well."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from parallel import chunks
from parallel.annotations import Position, Size
from parallel.streaming.shards import (
    CLOUD,
    HELD,
    PLACES,
    SAMPLES,
    Held,
    copies_of,
    island,
    tied,
)
from parallel.walk import Chunking, Places, Walk, over_shards


def map_points(
    function: Callable, chunking: Chunking, weights: Any, latents: Any, points: Any
) -> Any:
    """`function(..., point_n, ...)` of every point; arguments as `sum_over_points`.

    Returns:
        A tree of arrays `(B, N, ...)`, laid out as the points.
    """
    return _map_jitted(function, chunking, weights, latents, points)


def map_held(function: Callable, chunking: Chunking, weights: Any, latents: Any, held: Held) -> Any:
    """Like `map_points`, of points that were summed before, and of the weights of that sum.

    Args:
        function: is given both weights, `(held.weights, weights)`.
        chunking: as in `sum_over_points`, like the following.
        weights: those that the sum has not.
        latents: see there.
        held: see there.

    Returns:
        A tree of arrays `(B, N, ...)`, laid out as the points.
    """
    return _map_jitted(function, chunking, weights, latents, held)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _map(
    function: Callable[..., PyTree],
    chunking: Chunking,
    weights: PyTree,
    latents: PyTree,
    points: PyTree,
) -> PyTree:
    return _map_forward(function, chunking, weights, latents, points)[0]


def _map_forward(
    function: Callable[..., PyTree],
    chunking: Chunking,
    weights: PyTree,
    latents: PyTree,
    points: PyTree,
) -> tuple[PyTree, PyTree]:
    def local(
        places: Places, weights: PyTree, latents: PyTree, points: PyTree, *, axis: str | None
    ) -> PyTree:
        _, walk = _walk_of(function, chunking, places, weights, latents, points)
        outputs = jax.tree.map(
            lambda leaf: jnp.zeros((leaf.shape[0], walk.total, *leaf.shape[2:]), leaf.dtype),
            walk.made,
        )

        def write(start: Position, size: Size, outputs: PyTree) -> PyTree:
            return jax.tree.map(
                lambda out, new: chunks.put(out, new, start, 1), outputs, walk.make(start, size)
            )

        return walk.fold(write, outputs)

    run = island(local, (PLACES, P(), SAMPLES, _of_points(points)), CLOUD)
    places = Places.of(_only_points(points))
    return run(places, weights, latents, tied(points)), (weights, latents, points)


def _map_backward(
    function: Callable[..., PyTree], chunking: Chunking, residuals: PyTree, d_outputs: PyTree
) -> tuple[PyTree, PyTree, PyTree]:
    weights, latents, points = residuals

    def local(
        places: Places,
        weights: PyTree,
        latents: PyTree,
        points: PyTree,
        d_outputs: PyTree,
        *,
        axis: str | None,
    ) -> PyTree:
        held, walk = _walk_of(function, chunking, places, weights, latents, points)

        def d_made_of(start: Position, size: Size) -> Callable[..., PyTree]:
            return lambda made: jax.tree.map(
                lambda leaf: chunks.take(leaf, start, size, 1), d_outputs
            )

        d_weights, d_latents, d_points = walk.gradients(d_made_of)
        if not held:
            return over_shards(d_weights, weights), d_latents, d_points
        d_own, d_weights = d_weights
        return over_shards(d_weights, weights), d_latents, Held(copies_of(d_own), d_points)

    of_points = _of_points(points)
    run = island(local, (PLACES, P(), SAMPLES, of_points, CLOUD), (P(), SAMPLES, of_points))
    places = Places.of(_only_points(points))
    return run(places, weights, latents, tied(points), d_outputs)


_map.defvjp(_map_forward, _map_backward)
_map_jitted = jax.jit(_map, static_argnums=(0, 1))


def _walk_of(
    function: Callable[..., PyTree],
    chunking: Chunking,
    places: Places,
    weights: PyTree,
    latents: PyTree,
    points: PyTree,
) -> tuple[bool, Walk]:
    """A walk over points, or over those held, with the weights held beside the others."""
    if not isinstance(points, Held):
        return False, Walk(function, chunking, places, weights, latents, points)
    own = jax.tree.map(lambda copy: copy[0], points.weights)
    return True, Walk(function, chunking, places, (own, weights), latents, points.points)


def _of_points(points: PyTree) -> PyTree:
    return HELD if isinstance(points, Held) else CLOUD


def _only_points(points: PyTree) -> PyTree:
    return points.points if isinstance(points, Held) else points
