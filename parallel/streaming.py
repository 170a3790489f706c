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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from parallel import chunks, softmax
from parallel import mesh as mesh_lib
from parallel.annotations import Position, Size
from parallel.contraction import product
from parallel.mesh import DATA, POINTS
from parallel.precision import accumulation_dtype
from parallel.walk import (
    OVER,
    Chunking,
    Places,
    Walk,
    all_sum,
    floating_leaves,
    over_shards,
)

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

# What points were summed to, by this name for `jax.checkpoint_policies`.
GATHERED = "gathered"

_SAMPLES = P(DATA)
_CLOUD = P(DATA, POINTS)
_COPIES = P(OVER)
_PLACES = Places._make((P(DATA), P(POINTS)))
_GRADIENTS = (P(), _SAMPLES, _CLOUD)


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


_HELD = Held(_COPIES, _CLOUD)


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


def softmax_over_points(
    function: Callable, chunking: Chunking, weights: Any, latents: Any, points: Any
) -> tuple[Float[Array, "B H S D"], Held]:
    """`sum_n softmax_n(scores_n) values_n`, replicated over the points.

    Shards merge by log-sum-exp: one maximum and one packed sum.

    Args:
        function: see the module; returns scores `(B, H, S, n)` in float32 or wider, those of
            padding masked by `softmax.mask_scores`, and values `(B, H, D, n)`.
        chunking: how long chunks are.
        weights: see the module, as are the following.
        latents: `(B, H, ...)`, replicated over the points.
        points: `(B, N, ...)`, split over the mesh axis `points`.

    Returns:
        The weighted values in float32 or wider, and what they were made of.
    """
    return _softmax_jitted(function, chunking, weights, latents, points)


class SoftmaxPart(NamedTuple):
    """What `softmax_over_points` makes of a part of the points, to be merged with other parts.

    Attributes:
        means: `(B, H, S, D)`, the weighted values.
        log_sum_exp: `(B, H, S)`, of the scores.
    """

    means: Float[Array, "B H S D"]
    log_sum_exp: Float[Array, "B H S"]


def softmax_part(
    function: Callable, chunking: Chunking, weights: Any, latents: Any, points: Any
) -> SoftmaxPart:
    """The softmax over points of which others are elsewhere; arguments as `softmax_over_points`.

    No gradient flows through it. At least one point must be real.
    """
    arguments = jax.lax.stop_gradient((weights, latents, points))
    _, (*_, means, log_sum_exp) = _softmax_forward(function, chunking, *arguments)
    return SoftmaxPart(means, log_sum_exp)


def merged_softmax(parts: Sequence[SoftmaxPart]) -> Float[np.ndarray, "B H S D"]:
    """The weighted values of all parts, merged by log-sum-exp on the host, in float64."""
    means, sums = (np.stack([np.asarray(part[i], np.float64) for part in parts]) for i in range(2))
    shares = np.exp(sums - sums.max(0))
    return (shares[..., None] * means).sum(0) / shares.sum(0)[..., None]


def greatest_over_points(
    function: Callable, chunking: Chunking, weights: Any, latents: Any, points: Any
) -> Float[Array, "B H S"]:
    """The greatest score of each latent over all points; no gradient flows through it.

    Args:
        function: see the module; returns scores `(B, H, S, n)`, those of padding masked by
            `softmax.mask_scores`.
        chunking: as in `sum_over_points`, like the following.
        weights: see there.
        latents: see there.
        points: see there.

    Returns:
        The scores, replicated over the points: one all-reduce.
    """
    arguments = jax.lax.stop_gradient((weights, latents, points))
    return _greatest(function, chunking, *arguments)


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
        return sums, _copies(_wide(weights))

    run = _island(local, (_PLACES, P(), _SAMPLES, _CLOUD), (_SAMPLES, _COPIES))
    sums, copies = run(Places.of(points), weights, latents, _tied(points))
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
        return _all_gradients(walk, weights, lambda start, size: lambda made: d_sums, d_held)

    d_held = floating_leaves(d_held)
    run = _island(local, (_PLACES, P(), _SAMPLES, _CLOUD, _SAMPLES, _HELD), _GRADIENTS)
    return run(Places.of(points), weights, latents, _tied(points), d_sums, d_held)


_sum.defvjp(_sum_forward, _sum_backward)
_sum_jitted = jax.jit(_sum, static_argnums=(0, 1))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _softmax(
    function: Callable[..., PyTree],
    chunking: Chunking,
    weights: PyTree,
    latents: PyTree,
    points: PyTree,
) -> tuple[Array, Held]:
    return _softmax_forward(function, chunking, weights, latents, points)[0]


def _softmax_forward(
    function: Callable[..., PyTree],
    chunking: Chunking,
    weights: PyTree,
    latents: PyTree,
    points: PyTree,
) -> tuple[tuple[Array, Held], PyTree]:
    def local(
        places: Places, weights: PyTree, latents: PyTree, points: PyTree, *, axis: str | None
    ) -> PyTree:
        walk = Walk(function, chunking, places, weights, latents, points)
        scores, values = walk.made

        def add(start: Position, size: Size, sums: softmax.SoftmaxSums) -> softmax.SoftmaxSums:
            return softmax.accumulate(sums, *walk.make(start, size))

        batch, heads, slices, _ = scores.shape
        sums = softmax.start(batch, heads, slices, values.shape[2], scores.dtype)
        merged = softmax.merge(walk.fold(add, sums), axis)
        return softmax.finish(merged), _copies(_wide(weights))

    run = _island(local, (_PLACES, P(), _SAMPLES, _CLOUD), (_SAMPLES, _COPIES))
    finished, copies = run(Places.of(points), weights, latents, _tied(points))
    means, log_sum_exp = checkpoint_name(finished, GATHERED)
    return (means, Held(copies, points)), (weights, latents, points, means, log_sum_exp)


def _softmax_backward(
    function: Callable[..., PyTree], chunking: Chunking, residuals: PyTree, gradients: PyTree
) -> tuple[PyTree, PyTree, PyTree]:
    d_means, d_held = gradients

    def local(
        places: Places,
        weights: PyTree,
        latents: PyTree,
        points: PyTree,
        means: Array,
        log_sum_exp: Array,
        d_means: Array,
        d_held: Held,
        *,
        axis: str | None,
    ) -> PyTree:
        walk = Walk(function, chunking, places, weights, latents, points)
        delta = (d_means * means).sum(-1)

        def d_made(made: PyTree) -> PyTree:
            scores, values = made
            shares = softmax.weights(scores, log_sum_exp)
            narrow = d_means.astype(values.dtype)
            d_values = product("bhsd,bhsn->bhdn", narrow, shares.astype(values.dtype))
            d_shares = product("bhsd,bhdn->bhsn", narrow, values)
            return shares * (d_shares - delta[..., None]), d_values

        return _all_gradients(walk, weights, lambda start, size: d_made, d_held)

    samples = (_SAMPLES,) * 3
    run = _island(local, (_PLACES, P(), _SAMPLES, _CLOUD, *samples, _HELD), _GRADIENTS)
    weights, latents, points, *kept = residuals
    arguments = (Places.of(points), weights, latents, _tied(points), *kept, d_means)
    return run(*arguments, floating_leaves(d_held))


_softmax.defvjp(_softmax_forward, _softmax_backward)
_softmax_jitted = jax.jit(_softmax, static_argnums=(0, 1))


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

    run = _island(local, (_PLACES, P(), _SAMPLES, _of_points(points)), _CLOUD)
    places = Places.of(_only_points(points))
    return run(places, weights, latents, _tied(points)), (weights, latents, points)


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
        return over_shards(d_weights, weights), d_latents, Held(_copies(d_own), d_points)

    of_points = _of_points(points)
    run = _island(local, (_PLACES, P(), _SAMPLES, of_points, _CLOUD), (P(), _SAMPLES, of_points))
    places = Places.of(_only_points(points))
    return run(places, weights, latents, _tied(points), d_outputs)


_map.defvjp(_map_forward, _map_backward)
_map_jitted = jax.jit(_map, static_argnums=(0, 1))


@partial(jax.jit, static_argnums=(0, 1))
def _greatest(
    function: Callable[..., PyTree],
    chunking: Chunking,
    weights: PyTree,
    latents: PyTree,
    points: PyTree,
) -> Array:
    def local(
        places: Places, weights: PyTree, latents: PyTree, points: PyTree, *, axis: str | None
    ) -> PyTree:
        walk = Walk(function, chunking, places, weights, latents, points)
        least = jnp.finfo(walk.made.dtype).min

        def compare(start: Position, size: Size, greatest: Array) -> Array:
            return jnp.maximum(greatest, walk.make(start, size).max(-1))

        found = walk.fold(compare, jnp.full(walk.made.shape[:-1], least, walk.made.dtype))
        return found if axis is None else jax.lax.pmax(found, axis)

    run = _island(local, (_PLACES, P(), _SAMPLES, _CLOUD), _SAMPLES)
    return run(Places.of(points), weights, latents, _tied(points))


# One shard ---------------------------------------------------------------------------------------


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


def _all_gradients(
    walk: Walk, weights: PyTree, d_made_of: Callable, d_held: Held
) -> tuple[PyTree, PyTree, PyTree]:
    """Gradients of weights, latents and points of a sum, and of what read on from it."""
    d_weights = jax.tree.map(lambda copy: copy[0], d_held.weights)
    d_weights, d_latents, d_points = walk.gradients(d_made_of, d_weights, d_held.points)
    return over_shards(d_weights, weights), d_latents, d_points


def _copies(tree: PyTree) -> PyTree:
    """What a shard has of its own, as one of a stack over the shards."""
    return jax.tree.map(lambda leaf: leaf[None], tree)


def _wide(tree: PyTree) -> PyTree:
    return jax.tree.map(
        lambda leaf: (
            leaf.astype(accumulation_dtype(leaf.dtype))
            if jnp.issubdtype(leaf.dtype, jnp.floating)
            else leaf
        ),
        tree,
    )


def _of_points(points: PyTree) -> PyTree:
    return _HELD if isinstance(points, Held) else _CLOUD


def _only_points(points: PyTree) -> PyTree:
    return points.points if isinstance(points, Held) else points


def _island(
    local: Callable[..., PyTree], in_specs: PyTree, out_specs: PyTree
) -> Callable[..., PyTree]:
    return mesh_lib.island(local, in_specs, out_specs, over=OVER)


def _tied(points: PyTree) -> PyTree:
    """The points, as something of which nothing is known.

    What has no gradient is held to what has, see `chunks.tie`. And of the points that a scan over
    layers keeps the compiler then makes no transposed copy, of all layers at once.
    """
    return jax.lax.optimization_barrier(points)
