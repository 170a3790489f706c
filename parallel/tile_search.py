"""The nearest points of compact tiles of queries, among compact blocks of points.

A tile visits the blocks from the nearest on, a few at a time, and stops where no block can hold a
nearer point than its queries have. Tiles go in lockstep.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import min_dim
from jaxtyping import Array, Float, Int

from parallel import boxes
from parallel.annotations import Position


class Blocks(NamedTuple):
    """Points of one shard in compact blocks; index -1 in a free place of a block.

    A block holds one coordinate after the other, so that a kernel goes along points.
    """

    points: Float[Array, "B N D S"]
    indices: Int[Array, "B N S"]


class Best(NamedTuple):
    """The best neighbours so far, in order; an empty slot is infinitely far."""

    squares: Float[Array, "*T K"]
    indices: Int[Array, "*T K"]


def search_tiles(
    tiles: Array,
    best: Best,
    blocks: Blocks,
    corners: tuple[Array, Array],
    first_block: Position,
    limit: np.floating,
    candidates: int,
) -> Best:
    """The best neighbours of some tiles `(G, T, D)` after all blocks of one sample and shard."""
    at_once = len(tiles)
    real = boxes.finite(tiles)
    lower, upper = boxes.bounds(tiles, real)
    far = boxes.box_square_distances((lower[:, None], upper[:, None]), corners)
    count, size = best.indices.shape[-1], blocks.indices.shape[-1]
    step = min_dim(far.shape[1], -(-max(candidates, count) // size))

    def goes_on(state: tuple[Array, Best]) -> Array:
        far, best = state
        worst = jnp.minimum(best.squares[..., -1], limit)
        worst = jnp.where(real, worst, -1).max(-1)
        return jnp.any(far.min(-1) <= worst)

    def visit(state: tuple[Array, Best]) -> tuple[Array, Best]:
        far, best = state
        distance, visited = _smallest(far, step)
        chosen = first_block + visited
        # The barrier keeps apart what is fetched: merged with its uses, each query fetches anew.
        points, indices = jax.lax.optimization_barrier(
            (blocks.points[chosen], blocks.indices[chosen])
        )
        indices = jnp.where(jnp.isfinite(distance)[..., None], indices, -1)
        indices = indices.reshape(at_once, 1, step * size)
        squares = boxes.square_distances(
            [
                tiles[:, :, axis, None] - points[:, :, axis].reshape(at_once, 1, -1)
                for axis in range(tiles.shape[-1])
            ]
        )
        # A tile that is done waits for the others: what it visits again does not count.
        squares = jnp.where((squares <= limit) & (indices >= 0), squares, jnp.inf)
        far = far.at[jnp.arange(at_once)[:, None], visited].set(jnp.inf)
        return far, _merge(best, squares, indices)

    _, best = jax.lax.while_loop(goes_on, visit, (far, best))
    return _in_order(best)


def _merge(best: Best, squares: Array, indices: Array) -> Best:
    """The best of those so far and of the candidates, whose indices `(G, 1, W)` a tile shares.

    The last is the farthest; the order of the others is `_in_order`'s.
    """
    count = best.indices.shape[-1]
    squares = jnp.concatenate([best.squares, squares], -1)
    indices = jnp.broadcast_to(indices, (*best.indices.shape[:-1], indices.shape[-1]))
    indices = jnp.concatenate([best.indices, indices], -1)
    nearest, chosen = _smallest(squares, count)
    farthest = nearest[..., -1:]

    def by_index(_: Array) -> Array:
        # Of those as far as the farthest the lowest indices: as a number's bits, order is kept.
        # The offset makes even -1 a normal number, since subnormal ones may count as zero.
        key = jax.lax.bitcast_convert_type(indices + 1 + 2**23, jnp.float32)
        key = jnp.where(squares == farthest, key, jnp.inf)
        return _smallest(jnp.where(squares < farthest, 0, key), count)[1]

    # `top_k` prefers the earlier place, not the lower index: that matters only where it cuts
    # between equals, and to select by index costs another pass.
    tied = jnp.sum(squares <= farthest, -1, keepdims=True) > count
    tied = jnp.any(tied & jnp.isfinite(farthest))
    chosen = jax.lax.cond(tied, by_index, lambda chosen: chosen, chosen)
    return Best(*(jnp.take_along_axis(x, chosen, -1) for x in (squares, indices)))


def _smallest(values: Array, count: int) -> tuple[Array, Array]:
    """The smallest values of each row, ascending, and their places."""
    # The barrier keeps a use of some values apart: merged with it, XLA no longer recognizes the
    # selection, and on a CPU sorts each row, twenty times slower. Around both results, though, a
    # barrier crashes the compiler of JAX 0.10.2 on a mesh whose every axis is manual.
    nearness, places = jax.lax.top_k(-values, count)
    return -jax.lax.optimization_barrier(nearness), places


def _in_order(best: Best) -> Best:
    """Sorted by squared distance, then by index; most lists are already."""
    squares, indices = best
    nearer = squares[..., :-1] < squares[..., 1:]
    equal = squares[..., :-1] == squares[..., 1:]
    lower = (indices[..., :-1] <= indices[..., 1:]) | jnp.isinf(squares[..., 1:])
    return jax.lax.cond(
        jnp.all(nearer | (equal & lower)),
        lambda best: best,
        lambda best: Best(*jax.lax.sort(tuple(best), num_keys=2)),
        best,
    )
