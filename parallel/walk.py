"""A walk over the chunks of one shard's points, forward and for the gradient."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.core import min_dim
from jax.experimental.layout import Layout, with_layout_constraint
from jax.export import is_symbolic_dim
from jaxtyping import Array, Int, PyTree

from parallel import chunks
from parallel import mesh as mesh_lib
from parallel.annotations import Position, Size
from parallel.mesh import DATA, POINTS
from parallel.precision import accumulation_dtype

Carry = TypeVar("Carry")

# The axes over which samples and points are split; weights are summed over both.
OVER = (DATA, POINTS)


class Places(NamedTuple):
    """Where points stand in the whole batch, for what is random.

    Split like the points, each shard has its own. A shard that asked for its number instead would
    do so by an instruction that the compiler's partitioner does not always know (JAX 0.10.2).

    Attributes:
        samples: `(B,)`.
        points: `(n,)`.
    """

    samples: Int[Array, " B"]
    points: Int[Array, " n"]

    @classmethod
    def of(cls, points: PyTree) -> "Places":
        """Those of a tree of arrays `(B, N, ...)`."""
        batch, total = jax.tree.leaves(points)[0].shape[:2]
        return cls(jnp.arange(batch), jnp.arange(total))


@dataclass(frozen=True)
class Chunking:
    """How long chunks are.

    Attributes:
        heads: H.
        width: numbers that the function makes for a point and head.
        size: points of a chunk; by default as many as keep these numbers within a budget that
            depends on the platform.
    """

    heads: int
    width: int
    size: int | None = None

    def length(self, points: Size, batch: Size) -> Size:
        """Points of a chunk of one shard, which holds so many points and samples."""
        if self.size is not None:
            return min_dim(self.size, points)
        return chunks.chunk_length(points, batch, self.heads, self.width)


class Walk:
    """A function on the chunks of one shard's points.

    Attributes:
        total: points of the shard.
    """

    def __init__(
        self,
        function: Callable[..., PyTree],
        chunking: Chunking,
        places: Places,
        weights: PyTree,
        latents: PyTree,
        points: PyTree,
    ) -> None:
        batch, self.total = jax.tree.leaves(points)[0].shape[:2]
        self._function, self._places = function, places
        self._weights, self._latents = weights, latents
        self._points = jax.tree.map(_row_after_row, points)
        self._length = chunking.length(self.total, batch)

    def fold(self, body: Callable, carry: Carry) -> Carry:
        """Folds `carry = body(start, size, carry)` over the chunks."""
        return chunks.for_chunks(self.total, self._length, body, carry)

    def make(self, start: Position, size: Size) -> PyTree:
        """What the function makes of a chunk."""
        return self._call(self._weights, self._latents, self._chunk(start, size), start, size)

    @property
    def made(self) -> PyTree:
        """Shapes and types of what the function makes of a chunk."""
        return jax.eval_shape(lambda: self.make(0, self._length))

    def gradients(
        self, d_made_of: Callable, d_weights: PyTree = None, d_points: PyTree = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Gradients of weights, latents and points.

        Args:
            d_made_of: `d_made_of(start, size)(made)` is the gradient of what is made of a chunk.
            d_weights: this shard's part of the gradient of the weights so far, if there is one;
                what comes of its points is added to it.
            d_points: likewise of the points.

        Returns:
            This shard's part of the gradient of the weights, in float32 or wider; that of the
            latents, summed over the shards; and that of the points.
        """
        whole = (self._weights, self._latents)
        summed = floating_leaves(whole)
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, accumulation_dtype(leaf.dtype)), summed
        )
        if d_weights is not None:
            zeros = (jax.tree.map(lambda zero, d: zero + d, zeros[0], d_weights), zeros[1])
        first = d_points is None
        if first:
            d_points = jax.tree.map(jnp.zeros_like, floating_leaves(self._points))

        def body(start: Position, size: Size, carry: PyTree) -> PyTree:
            d_summed, d_points = carry
            chunk = self._chunk(start, size)

            def make(summed: PyTree, floating: PyTree) -> PyTree:
                weights, latents = _merge(summed, whole)
                return self._call(weights, latents, _merge(floating, chunk), start, size)

            made, pull = jax.vjp(make, summed, floating_leaves(chunk))
            d_made = d_made_of(start, size)(made)
            d_made = jax.tree.map(lambda d, leaf: d.astype(leaf.dtype), d_made, made)
            d_summed_chunk, d_chunk = pull(d_made)

            def put(d: Array, new: Array) -> Array:
                return chunks.put(
                    d, new if first else new + chunks.take(d, start, size, 1), start, 1
                )

            d_summed = jax.tree.map(
                lambda d, new: d + new.astype(d.dtype), d_summed, d_summed_chunk
            )
            return d_summed, jax.tree.map(put, d_points, d_chunk)

        (d_weights, d_latents), d_points = self.fold(body, (zeros, d_points))
        d_latents = all_sum(d_latents, mesh_lib.split_axes(POINTS), lead=2)
        return d_weights, narrowed(d_latents, summed[1]), d_points

    def _call(
        self, weights: PyTree, latents: PyTree, chunk: PyTree, start: Position, size: int
    ) -> PyTree:
        places = self._places._replace(points=chunks.take(self._places.points, start, size, 0))
        return self._function(weights, latents, chunk, places)

    def _chunk(self, start: Position, size: int) -> PyTree:
        return jax.tree.map(lambda leaf: chunks.take(leaf, start, size, 1), self._points)


def _row_after_row(points: Array) -> Array:
    """Points laid out one after another.

    Left to itself, XLA's GPU compiler may lay out the points that a scan keeps for the gradient
    channel after channel, as a product that sums over the points has them: it then transposes those
    of all layers at once, and holds them twice. An exported program, of symbolic shapes, has no
    gradient.
    """
    if mesh_lib.platform() != "gpu" or any(map(is_symbolic_dim, points.shape)):
        return points
    return with_layout_constraint(points, Layout(tuple(range(points.ndim))))


def over_shards(d_weights: PyTree, weights: PyTree) -> PyTree:
    """The gradient of weights that all shards share, from each shard's part; packed sums."""
    d_weights = all_sum(d_weights, mesh_lib.split_axes(*OVER), lead=1)
    return narrowed(d_weights, floating_leaves(weights))


def narrowed(gradients: PyTree, tree: PyTree) -> PyTree:
    """Gradients in the types of what they are of."""
    return jax.tree.map(lambda d, leaf: d.astype(leaf.dtype), gradients, tree)


def floating_leaves(tree: PyTree) -> PyTree:
    """A tree with `None` for the leaves that have no gradient."""
    return jax.tree.map(
        lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else None, tree
    )


def _merge(floating: PyTree, tree: PyTree) -> PyTree:
    """`tree` with its floating leaves replaced."""
    return jax.tree.map(
        lambda new, old: old if new is None else new, floating, tree, is_leaf=lambda x: x is None
    )


def all_sum(tree: PyTree, axes: tuple[str, ...], *, lead: int) -> PyTree:
    """The sum over the shards of all leaves; those alike in `lead` axes travel packed."""
    if not axes:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[tuple, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault((leaf.shape[:lead], leaf.dtype), []).append(i)
    for (shape, _), members in groups.items():
        flat = [leaves[i].reshape(*shape, -1) for i in members]
        ends = list(itertools.accumulate(part.shape[-1] for part in flat))
        packed = jax.lax.psum(jnp.concatenate(flat, axis=-1), axes)
        for i, part in zip(members, jnp.split(packed, ends[:-1], axis=-1), strict=True):
            leaves[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, leaves)
