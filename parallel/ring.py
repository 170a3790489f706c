"""A ring: blocks of all shards of a mesh axis pass by every shard, one at a time."""

from collections.abc import Callable

import jax
from jaxtyping import Array, PyTree


def around(fold: Callable, block: PyTree, carry: PyTree, axis: str | None) -> tuple[PyTree, PyTree]:
    """Folds the blocks of all shards, each of which is home again afterwards.

    A block that a fold leaves as it is travels on while the fold still computes.

    Args:
        fold: called as `fold(owner, block, carry)` with the position of the block's owner on the
            axis; returns the block, perhaps changed, and the carry.
        block: a tree of arrays, this shard's own.
        carry: a tree of arrays that stays on this shard.
        axis: the mesh axis inside an island; `None` where the block is the only one.

    Returns:
        `(block, carry)`.
    """
    if axis is None:
        return fold(0, block, carry)
    shards = jax.lax.axis_size(axis)
    ring = [(i, (i + 1) % shards) for i in range(shards)]

    def turn(step: Array, state: PyTree) -> tuple[PyTree, PyTree]:
        owner = (jax.lax.axis_index(axis) - step) % shards
        block, carry = fold(owner, *state)
        return jax.tree.map(lambda array: jax.lax.ppermute(array, axis, ring), block), carry

    return jax.lax.fori_loop(0, shards, turn, (block, carry))
