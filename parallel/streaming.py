"""Sums over points, and maps of points, that are computed in chunks and again for the gradient.

What a function makes for a chunk of points, however wide, is gone before the next chunk, forward
and backward. Only the points themselves, the sums and the parameters are kept. On a mesh each shard
goes through its own points; sums, and gradients of parameters, meet in one packed all-reduce.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from parallel import chunks
from parallel import mesh as mesh_lib
from parallel.mesh import POINTS
from parallel.softmax import accumulation_dtype

_CLOUD = P(None, POINTS)


def sum_over_points(
    function: Callable, parameters: Any, points: Any, *, heads: int, width: int
) -> Any:
    """`sum_n function(parameters, point_n)`, replicated over the points.

    Args:
        function: called as `function(parameters, chunk, positions)` on a chunk of points
            `(B, n, ...)`, whose places among all points are `positions`, `(n,)`; returns a tree of
            arrays `(B, H, ...)`, summed over the chunk. It must be hashable: a function of a
            module, or a `functools.partial` of one with hashable arguments.
        parameters: a tree of arrays with two leading axes, `(B or 1, H or 1, ...)`; the function
            gets them broadcast to `(B, H, ...)`. Gradients flow to those of floating type.
        points: a tree of arrays `(B, N, ...)`, split over the mesh axis `points`. Gradients flow to
            those of floating type.
        heads: H.
        width: numbers that the function makes for a point and head; sets the length of chunks.

    Returns:
        The sums, in float32 or wider.
    """
    return _sum(function, (heads, width), parameters, points)


def map_points(function: Callable, parameters: Any, points: Any, *, heads: int, width: int) -> Any:
    """`function(parameters, point_n)` of every point; arguments as `sum_over_points`.

    Returns:
        A tree of arrays `(B, N, ...)`, laid out as the points.
    """
    return _map(function, (heads, width), parameters, points)


@partial(jax.jit, static_argnums=(0, 1))
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum(function, static, parameters, points):
    return _sum_forward(function, static, parameters, points)[0]


def _sum_forward(function, static, parameters, points):
    def local(parameters, points, *, axis):
        walk = _Walk(function, static, parameters, points, axis)
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, accumulation_dtype(leaf.dtype)), walk.made
        )

        def add(start, size, sums):
            return jax.tree.map(jnp.add, sums, walk.make(start, size))

        return _all_sum(walk.fold(add, zeros), axis)

    run = mesh_lib.island(local, in_specs=(P(), _CLOUD), out_specs=P())
    # See `chunks.tie`: what has no gradient is held to what has.
    return run(parameters, jax.lax.optimization_barrier(points)), (parameters, points)


def _sum_backward(function, static, residuals, d_sums):
    def local(parameters, points, d_sums, *, axis):
        walk = _Walk(function, static, parameters, points, axis)
        d_parameters, d_points = walk.gradients(lambda start, size: d_sums, parameters)
        return _all_sum(d_parameters, axis), d_points

    run = mesh_lib.island(local, in_specs=(P(), _CLOUD, P()), out_specs=(P(), _CLOUD))
    return run(*residuals, d_sums)


_sum.__wrapped__.defvjp(_sum_forward, _sum_backward)


@partial(jax.jit, static_argnums=(0, 1))
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _map(function, static, parameters, points):
    return _map_forward(function, static, parameters, points)[0]


def _map_forward(function, static, parameters, points):
    def local(parameters, points, *, axis):
        walk = _Walk(function, static, parameters, points, axis)
        outputs = jax.tree.map(
            lambda leaf: jnp.zeros((leaf.shape[0], walk.total, *leaf.shape[2:]), leaf.dtype),
            walk.made,
        )

        def write(start, size, outputs):
            return jax.tree.map(
                lambda out, new: chunks.put(out, new, start, 1), outputs, walk.make(start, size)
            )

        return walk.fold(write, outputs)

    run = mesh_lib.island(local, in_specs=(P(), _CLOUD), out_specs=_CLOUD)
    # As in `_sum_forward`.
    return run(parameters, jax.lax.optimization_barrier(points)), (parameters, points)


def _map_backward(function, static, residuals, d_outputs):
    def local(parameters, points, d_outputs, *, axis):
        walk = _Walk(function, static, parameters, points, axis)

        def d_made_of(start, size):
            return jax.tree.map(lambda leaf: chunks.take(leaf, start, size, 1), d_outputs)

        d_parameters, d_points = walk.gradients(d_made_of, parameters)
        return _all_sum(d_parameters, axis), d_points

    run = mesh_lib.island(local, in_specs=(P(), _CLOUD, _CLOUD), out_specs=(P(), _CLOUD))
    return run(*residuals, d_outputs)


_map.__wrapped__.defvjp(_map_forward, _map_backward)


class _Walk:
    """A function on the chunks of one shard's points.

    Attributes:
        parameters: parameters broadcast to every sample and head. Broadcast, each sample and head
            gathers a gradient of its own; were they summed in the loop, the mesh axes of samples
            and heads would be reduced over for every chunk.
        total: points of the shard.
    """

    def __init__(self, function, static, parameters, points, axis: str | None):
        heads, width = static
        batch, self.total = jax.tree.leaves(points)[0].shape[:2]
        self._function, self._points = function, points
        self._length = chunks.chunk_length(self.total, batch, heads, width)
        self._first = 0 if axis is None else jax.lax.axis_index(axis) * self.total
        self.parameters = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (batch, heads, *leaf.shape[2:])), parameters
        )

    def fold(self, body: Callable, carry):
        """Folds `carry = body(start, size, carry)` over the chunks."""
        return chunks.for_chunks(self.total, self._length, body, carry)

    def make(self, start, size: int):
        """What the function makes of a chunk."""
        return self._call(self.parameters, self._chunk(start, size), start, size)

    @property
    def made(self):
        """Shapes and types of what the function makes of a chunk."""
        return jax.eval_shape(lambda: self.make(0, self._length))

    def pull_back(self, start, size: int, d_made, carry):
        """Adds a chunk's part to the gradients of parameters, and writes those of its points."""
        d_parameters, d_points = carry
        chunk = self._chunk(start, size)

        def of_floating(parameters, values):
            return self._call(
                _merge(parameters, self.parameters), _merge(values, chunk), start, size
            )

        made, pull = jax.vjp(of_floating, _floating(self.parameters), _floating(chunk))
        d_made = jax.tree.map(lambda d, leaf: d.astype(leaf.dtype), d_made, made)
        d_parameters_chunk, d_chunk = pull(d_made)
        d_parameters = jax.tree.map(
            lambda d, new: d + new.astype(d.dtype), d_parameters, d_parameters_chunk
        )
        return d_parameters, jax.tree.map(
            lambda d, new: chunks.put(d, new, start, 1), d_points, d_chunk
        )

    def gradients(self, d_made_of: Callable, parameters):
        """Gradients of parameters and points, given those of what is made of a chunk."""
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, accumulation_dtype(leaf.dtype)),
            _floating(self.parameters),
        )

        def body(start, size, carry):
            return self.pull_back(start, size, d_made_of(start, size), carry)

        carry = (zeros, jax.tree.map(jnp.zeros_like, _floating(self._points)))
        d_parameters, d_points = self.fold(body, carry)

        def unbroadcast(gradient, parameter):
            axes = [axis for axis in (0, 1) if parameter.shape[axis] != gradient.shape[axis]]
            return gradient.sum(axes, keepdims=True).astype(parameter.dtype)

        return jax.tree.map(unbroadcast, d_parameters, _floating(parameters)), d_points

    def _call(self, parameters, chunk, start, size: int):
        return self._function(parameters, chunk, self._first + start + jnp.arange(size))

    def _chunk(self, start, size: int):
        return jax.tree.map(lambda leaf: chunks.take(leaf, start, size, 1), self._points)


def _floating(tree):
    """A tree with `None` for the leaves that have no gradient."""
    return jax.tree.map(
        lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else None, tree
    )


def _merge(floating, tree):
    """`tree` with its floating leaves replaced."""
    return jax.tree.map(
        lambda new, old: old if new is None else new, floating, tree, is_leaf=lambda x: x is None
    )


def _all_sum(tree, axis: str | None):
    """The sum over the shards of all leaves `(B, H, ...)`: those of like `(B, H)` travel packed."""
    if axis is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[tuple, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault((leaf.shape[:2], leaf.dtype), []).append(i)
    for (lead, _), members in groups.items():
        flat = [leaves[i].reshape(*lead, -1) for i in members]
        ends = list(itertools.accumulate(part.shape[-1] for part in flat))
        packed = jax.lax.psum(jnp.concatenate(flat, axis=-1), axis)
        for i, part in zip(members, jnp.split(packed, ends[:-1], axis=-1), strict=True):
            leaves[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, leaves)
