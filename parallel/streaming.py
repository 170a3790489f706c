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

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from parallel import chunks, softmax
from parallel import mesh as mesh_lib
from parallel.contraction import product
from parallel.mesh import DATA, POINTS
from parallel.precision import accumulation_dtype
from parallel.walk import OVER, Chunking, Places, Walk, all_sum, floating_leaves

__all__ = [
    "GATHERED",
    "Chunking",
    "Places",
    "map_points",
    "pull_back_sums",
    "softmax_over_points",
    "sum_over_points",
]

# What points were summed to, by this name for `jax.checkpoint_policies`.
GATHERED = "gathered"

_SAMPLES = P(DATA)
_CLOUD = P(DATA, POINTS)
_PLACES = Places(P(DATA), P(POINTS))


def sum_over_points(
    function: Callable, chunking: Chunking, weights: Any, latents: Any, points: Any
) -> tuple[Any, Any]:
    """`sum_n function(..., point_n, ...)`, replicated over the points.

    Args:
        function: see the module; returns a tree of arrays `(B, H, ...)`, summed over the chunk.
        chunking: how long chunks are.
        weights: see the module, as are the following.
        latents: `(B, H, ...)`, replicated over the points.
        points: `(B, N, ...)`, split over the mesh axis `points`.

    Returns:
        The sums, in float32 or wider, and `points`. What later reads these points instead adds its
        gradient to the same array.
    """
    return _sum(function, chunking, weights, latents, points)


def softmax_over_points(
    function: Callable, chunking: Chunking, weights: Any, latents: Any, points: Any
) -> tuple[Float[Array, "B H S D"], Any]:
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
        The weighted values in float32 or wider, and `points` as by `sum_over_points`.
    """
    return _softmax(function, chunking, weights, latents, points)


def map_points(
    function: Callable, chunking: Chunking, weights: Any, latents: Any, points: Any
) -> Any:
    """`function(..., point_n, ...)` of every point; arguments as `sum_over_points`.

    Returns:
        A tree of arrays `(B, N, ...)`, laid out as the points.
    """
    return _map(function, chunking, weights, latents, points)


@partial(jax.jit, static_argnums=(0, 1))
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum(function, chunking, weights, latents, points):
    return _sum_forward(function, chunking, weights, latents, points)[0]


def _sum_forward(function, chunking, weights, latents, points):
    def local(places, weights, latents, points, *, axis):
        walk = Walk(function, chunking, places, weights, latents, points)
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, accumulation_dtype(leaf.dtype)), walk.made
        )

        def add(start, size, sums):
            return jax.tree.map(jnp.add, sums, walk.make(start, size))

        return all_sum(walk.fold(add, zeros), mesh_lib.split_axes(POINTS), lead=2)

    run = _island(local, (_PLACES, P(), _SAMPLES, _CLOUD), _SAMPLES)
    sums = checkpoint_name(run(Places.of(points), weights, latents, _tied(points)), GATHERED)
    return (sums, points), (weights, latents, points)


def _sum_backward(function, chunking, residuals, gradients):
    return pull_back_sums(function, chunking, *residuals, *gradients)


def pull_back_sums(
    function: Callable, chunking: Chunking, weights, latents, points, d_sums, d_points
) -> tuple[Any, Any, Any]:
    """Gradients of weights, latents and points, from those of what `sum_over_points` returns.

    For a sum whose gradient is better had from another function than the one that it is made by.
    """

    def local(places, weights, latents, points, d_sums, d_points, *, axis):
        walk = Walk(function, chunking, places, weights, latents, points)
        return walk.gradients(lambda start, size: lambda made: d_sums, d_points)

    run = _island(
        local, (_PLACES, P(), _SAMPLES, _CLOUD, _SAMPLES, _CLOUD), (P(), _SAMPLES, _CLOUD)
    )
    return run(
        Places.of(points), weights, latents, _tied(points), d_sums, floating_leaves(d_points)
    )


_sum.__wrapped__.defvjp(_sum_forward, _sum_backward)


@partial(jax.jit, static_argnums=(0, 1))
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _softmax(function, chunking, weights, latents, points):
    return _softmax_forward(function, chunking, weights, latents, points)[0]


def _softmax_forward(function, chunking, weights, latents, points):
    def local(places, weights, latents, points, *, axis):
        walk = Walk(function, chunking, places, weights, latents, points)
        scores, values = walk.made

        def add(start, size, sums):
            return softmax.accumulate(sums, *walk.make(start, size))

        sums = softmax.start(*scores.shape[:3], values.shape[2], scores.dtype)
        return softmax.finish(softmax.merge(walk.fold(add, sums), axis))

    run = _island(local, (_PLACES, P(), _SAMPLES, _CLOUD), _SAMPLES)
    means, log_sum_exp = checkpoint_name(
        run(Places.of(points), weights, latents, _tied(points)), GATHERED
    )
    return (means, points), (weights, latents, points, means, log_sum_exp)


def _softmax_backward(function, chunking, residuals, gradients):
    d_means, d_points = gradients

    def local(places, weights, latents, points, means, log_sum_exp, d_means, d_points, *, axis):
        walk = Walk(function, chunking, places, weights, latents, points)
        delta = (d_means * means).sum(-1)

        def d_made(made):
            scores, values = made
            shares = softmax.weights(scores, log_sum_exp)
            narrow = d_means.astype(values.dtype)
            d_values = product("bhsd,bhsn->bhdn", narrow, shares.astype(values.dtype))
            d_shares = product("bhsd,bhdn->bhsn", narrow, values)
            return shares * (d_shares - delta[..., None]), d_values

        return walk.gradients(lambda start, size: d_made, d_points)

    samples = (_SAMPLES,) * 3
    run = _island(
        local, (_PLACES, P(), _SAMPLES, _CLOUD, *samples, _CLOUD), (P(), _SAMPLES, _CLOUD)
    )
    weights, latents, points, *kept = residuals
    return run(
        Places.of(points),
        weights,
        latents,
        _tied(points),
        *kept,
        d_means,
        floating_leaves(d_points),
    )


_softmax.__wrapped__.defvjp(_softmax_forward, _softmax_backward)


@partial(jax.jit, static_argnums=(0, 1))
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _map(function, chunking, weights, latents, points):
    return _map_forward(function, chunking, weights, latents, points)[0]


def _map_forward(function, chunking, weights, latents, points):
    def local(places, weights, latents, points, *, axis):
        walk = Walk(function, chunking, places, weights, latents, points)
        outputs = jax.tree.map(
            lambda leaf: jnp.zeros((leaf.shape[0], walk.total, *leaf.shape[2:]), leaf.dtype),
            walk.made,
        )

        def write(start, size, outputs):
            return jax.tree.map(
                lambda out, new: chunks.put(out, new, start, 1), outputs, walk.make(start, size)
            )

        return walk.fold(write, outputs)

    run = _island(local, (_PLACES, P(), _SAMPLES, _CLOUD), _CLOUD)
    return run(Places.of(points), weights, latents, _tied(points)), (weights, latents, points)


def _map_backward(function, chunking, residuals, d_outputs):
    def local(places, weights, latents, points, d_outputs, *, axis):
        walk = Walk(function, chunking, places, weights, latents, points)

        def d_made_of(start, size):
            return lambda made: jax.tree.map(
                lambda leaf: chunks.take(leaf, start, size, 1), d_outputs
            )

        return walk.gradients(d_made_of)

    run = _island(local, (_PLACES, P(), _SAMPLES, _CLOUD, _CLOUD), (P(), _SAMPLES, _CLOUD))
    weights, latents, points = residuals
    return run(Places.of(points), weights, latents, _tied(points), d_outputs)


_map.__wrapped__.defvjp(_map_forward, _map_backward)


def _island(local, in_specs, out_specs):
    return mesh_lib.island(local, in_specs, out_specs, over=OVER)


def _tied(points):
    """The points, as something of which nothing is known.

    What has no gradient is held to what has, see `chunks.tie`. And of the points that a scan over
    layers keeps the compiler then makes no transposed copy, of all layers at once.
    """
    return jax.lax.optimization_barrier(points)
