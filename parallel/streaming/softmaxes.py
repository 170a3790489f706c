"""Softmaxes over points, which shards and parts of the points merge by log-sum-exp."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from parallel import softmax
from parallel.annotations import Position, Size
from parallel.contraction import product
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
from parallel.walk import Chunking, Places, Walk, floating_leaves


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
        return softmax.finish(merged), copies_of(wide(weights))

    run = island(local, (PLACES, P(), SAMPLES, CLOUD), (SAMPLES, COPIES))
    finished, copies = run(Places.of(points), weights, latents, tied(points))
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

        return all_gradients(walk, weights, lambda start, size: d_made, d_held)

    samples = (SAMPLES,) * 3
    run = island(local, (PLACES, P(), SAMPLES, CLOUD, *samples, HELD), GRADIENTS)
    weights, latents, points, *kept = residuals
    arguments = (Places.of(points), weights, latents, tied(points), *kept, d_means)
    return run(*arguments, floating_leaves(d_held))


_softmax.defvjp(_softmax_forward, _softmax_backward)
_softmax_jitted = jax.jit(_softmax, static_argnums=(0, 1))


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

    run = island(local, (PLACES, P(), SAMPLES, CLOUD), SAMPLES)
    return run(Places.of(points), weights, latents, tied(points))
