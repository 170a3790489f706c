"""Features of the neighbours of each query, on points split over the mesh.

Features travel around the ring, and a shard takes from each block those of its queries' neighbours
that lie there; in the gradient the block's gradient travels along and gathers what they give back.
What there is for each neighbour of a query is made for a chunk of queries at a time, except where
it is the result itself.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Integer, PyTree

from parallel import chunks, ring
from parallel import mesh as mesh_lib
from parallel.annotations import AnyArray, Position, Size
from parallel.contraction import product
from parallel.mesh import POINTS
from parallel.precision import accumulation_dtype

_CLOUD = P(None, POINTS)


def gather_neighbors(
    features: Float[AnyArray, "B M C"], indices: Integer[AnyArray, "B Q K"]
) -> Float[Array, "B Q K C"]:
    """The features of each neighbour, zero in an empty slot.

    Args:
        features: features of the points; axis 1 is split over the mesh axis `points`, which must
            divide it. Gradients flow to them, reduced in float32 or wider.
        indices: positions among all points, as from `radius_search`, split likewise; -1 in an
            empty slot.

    Returns:
        The features, laid out as the indices, in their type.

    Raises:
        ValueError: shapes that do not fit, or lengths that the mesh axis does not divide.
    """
    _check("gather_neighbors", features, indices)
    # A narrower type could not count the points.
    return _gather_jitted(features.shape, jnp.asarray(indices, jnp.int32), features)


def project_neighbors(
    features: Float[AnyArray, "B M C"],
    indices: Integer[AnyArray, "B Q K"],
    kernel: Float[AnyArray, "K C F"],
) -> Float[Array, "B Q F"]:
    """A linear layer on the features of all neighbours of a query, empty slots being zero.

    `sum_k gather_neighbors(features, indices)[..., k, :] @ kernel[k]`, of which the gathered
    features exist for a chunk of queries at a time, forward and backward. A shard multiplies for
    each block that passes by, so that the work of a query grows with the number of shards.

    Args:
        features: features of the points, as for `gather_neighbors`.
        indices: neighbours, likewise.
        kernel: one matrix a slot, the same on all shards of the points.

    Returns:
        The layer's output, laid out as the indices, in the type of the features and kernel.
        Reductions are in float32 or wider.

    Raises:
        ValueError: shapes that do not fit, or lengths that the mesh axis does not divide.
    """
    _check("project_neighbors", features, indices)
    if kernel.ndim != 3 or kernel.shape[:2] != (indices.shape[-1], features.shape[-1]):
        raise ValueError(
            "project_neighbors: expected kernel (K, C, F) = "
            f"({indices.shape[-1]}, {features.shape[-1]}, F), got {kernel.shape}"
        )
    return _project_jitted(features, jnp.asarray(indices, jnp.int32), kernel)


def _check(name: str, features: AnyArray, indices: AnyArray) -> None:
    shapes = f"features {features.shape}, indices {indices.dtype} {indices.shape}"
    if (
        not features.ndim == indices.ndim == 3
        or features.shape[0] != indices.shape[0]
        or not jnp.issubdtype(indices.dtype, jnp.integer)
    ):
        raise ValueError(
            f"{name}: expected features (B, M, C) and integer indices (B, Q, K), got {shapes}"
        )
    shards = mesh_lib.axis_size(POINTS)
    if features.shape[1] % shards or indices.shape[1] % shards:
        raise ValueError(
            f"{name}: expected lengths that divide by the {shards} shards of mesh axis "
            f"{POINTS!r}, got {shapes}"
        )


# Gather ------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(shape: tuple[int, ...], indices: Array, features: Array) -> Array:
    return _gather_forward(shape, indices, features)[0]


def _gather_forward(shape: tuple[int, ...], indices: Array, features: Array) -> tuple[Array, Array]:
    def local(indices: Array, features: Array, *, axis: str | None) -> PyTree:
        def fold(owner: Position, features: Array, gathered: Array) -> PyTree:
            found = _take(features, _places(indices, owner, features.shape[1]))
            return features, gathered + found

        zeros = jnp.zeros((*indices.shape, shape[-1]), features.dtype)
        return ring.around(fold, features, zeros, axis)[1]

    run = mesh_lib.island(local, in_specs=(_CLOUD, _CLOUD), out_specs=_CLOUD)
    return run(chunks.tie(indices, features), features), indices


def _gather_backward(
    shape: tuple[int, ...], indices: Array, d_gathered: Array
) -> tuple[None, Array]:
    batch, total, width = shape

    def local(indices: Array, d_gathered: Array, *, axis: str | None) -> PyTree:
        length = total if axis is None else total // jax.lax.axis_size(axis)
        dtype = accumulation_dtype(d_gathered.dtype)

        def fold(owner: Position, d_features: Array, carry: PyTree) -> PyTree:
            places = _places(indices, owner, length)
            return _give(d_features, places, d_gathered.astype(dtype)), carry

        d_features, _ = ring.around(fold, jnp.zeros((batch, length, width), dtype), (), axis)
        return d_features.astype(d_gathered.dtype)

    run = mesh_lib.island(local, in_specs=(_CLOUD, _CLOUD), out_specs=_CLOUD)
    return None, run(indices, d_gathered)


_gather.defvjp(_gather_forward, _gather_backward)
_gather_jitted = jax.jit(_gather, static_argnums=0)


# Project -----------------------------------------------------------------------------------------


@jax.custom_vjp
def _project(features: Array, indices: Array, kernel: Array) -> Array:
    return _project_forward(features, indices, kernel)[0]


def _project_forward(features: Array, indices: Array, kernel: Array) -> tuple[Array, PyTree]:
    dtype = accumulation_dtype(features.dtype, kernel.dtype)

    def local(features: Array, indices: Array, kernel: Array, *, axis: str | None) -> PyTree:
        batch, queries, _ = indices.shape
        length = _chunk_length(indices, kernel)

        def fold(owner: Position, features: Array, output: Array) -> PyTree:
            def add(start: Position, size: Size, output: Array) -> PyTree:
                places = _places(chunks.take(indices, start, size, 1), owner, features.shape[1])
                projected = product("bqkc,kcf->bqf", _take(features, places), kernel)
                return chunks.put(output, chunks.take(output, start, size, 1) + projected, start, 1)

            return features, chunks.for_chunks(queries, length, add, output)

        zeros = jnp.zeros((batch, queries, kernel.shape[-1]), dtype)
        _, output = ring.around(fold, features, zeros, axis)
        return output.astype(jnp.result_type(features, kernel))

    run = mesh_lib.island(local, in_specs=(_CLOUD, _CLOUD, P()), out_specs=_CLOUD)
    output = run(features, chunks.tie(indices, features), kernel)
    return output, (features, indices, kernel)


def _project_backward(residuals: PyTree, d_output: Array) -> tuple[Array, None, Array]:
    def local(
        features: Array, indices: Array, kernel: Array, d_output: Array, *, axis: str | None
    ) -> PyTree:
        batch, queries, _ = indices.shape
        dtype = accumulation_dtype(features.dtype, kernel.dtype)
        length = _chunk_length(indices, kernel)

        def fold(owner: Position, block: PyTree, d_kernel: Array) -> PyTree:
            features, d_features = block

            def add(start: Position, size: Size, gradients: tuple[Array, Array]) -> PyTree:
                d_features, d_kernel = gradients
                places = _places(chunks.take(indices, start, size, 1), owner, features.shape[1])
                d_chunk = chunks.take(d_output, start, size, 1)
                d_kernel += product("bqkc,bqf->bkcf", _take(features, places), d_chunk)
                d_gathered = product("bqf,kcf->bqkc", d_chunk, kernel)
                return _give(d_features, places, d_gathered), d_kernel

            d_features, d_kernel = chunks.for_chunks(queries, length, add, (d_features, d_kernel))
            return (features, d_features), d_kernel

        # Each sample has a kernel gradient of its own: were they summed in the loop, the mesh axis
        # of samples would be reduced over for every chunk.
        block = features, jnp.zeros(features.shape, dtype)
        d_kernel = jnp.zeros((batch, *kernel.shape), dtype)
        (_, d_features), d_kernel = ring.around(fold, block, d_kernel, axis)
        d_kernel = d_kernel.sum(0)
        if axis is not None:
            d_kernel = jax.lax.psum(d_kernel, axis)
        return d_features.astype(features.dtype), d_kernel.astype(kernel.dtype)

    run = mesh_lib.island(local, in_specs=(_CLOUD, _CLOUD, P(), _CLOUD), out_specs=(_CLOUD, P()))
    d_features, d_kernel = run(*residuals, d_output)
    return d_features, None, d_kernel


_project.defvjp(_project_forward, _project_backward)
_project_jitted = jax.jit(_project)


def _chunk_length(indices: Array, kernel: Array) -> int:
    """Queries whose neighbours' features, and the gradient of these, exist at once."""
    batch, queries, _ = indices.shape
    slots, width, _ = kernel.shape
    return chunks.chunk_length(queries, batch, 1, slots * width)


# One block ---------------------------------------------------------------------------------------


def _places(indices: Array, owner: Position, length: int) -> Array:
    """Places of the neighbours in their owner's block; `length` for those that are elsewhere."""
    places = indices - owner * length
    return jnp.where((places >= 0) & (places < length), places, length)


def _take(features: Array, places: Array) -> Array:
    """Rows `(B, Q, K, C)` of a block `(B, M, C)`; zero where a place is beyond it."""
    take = jax.vmap(lambda rows, i: rows.at[i].get(mode="fill", fill_value=0))
    return take(features, places)


def _give(features: Array, places: Array, rows: Array) -> Array:
    """A block with rows added at their places; those beyond it are dropped."""
    return jax.vmap(lambda block, i, new: block.at[i].add(new, mode="drop"))(features, places, rows)
