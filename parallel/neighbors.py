"""Radius search: the nearest points within a radius of each query, on points split over the mesh.

Points are cut into compact blocks and queries into compact tiles. A tile visits the blocks from the
nearest on, and stops where no block can hold a nearer point than its queries have: the search is
exact, adapts to clusters, and needs no bound on how many points a region holds. On a mesh the
blocks of all shards pass by in a ring; a shard keeps one list of the best so far for its queries.

The order of neighbours is that of `(squared distance, index)`, the squared distance being
`((dx * dx) + dy * dy) + dz * dz` with every operation rounded; what is smaller than the smallest
normal number may count as zero. A point is within the radius if the
rounded root of that is at most the radius.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import min_dim
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from parallel import boxes, chunks, ring
from parallel import mesh as mesh_lib
from parallel.annotations import AnyArray, Integer, Position
from parallel.mesh import DATA, POINTS
from parallel.precision import accumulation_dtype
from parallel.tile_search import Best, Blocks, search_tiles


class _Sizes(NamedTuple):
    """How a search is cut up.

    Attributes:
        block: most points of a block.
        tile: most queries of a tile.
        candidates: points that a tile looks at together: enough that selecting among them costs
            more than what is done once a step, few enough that seldom many of them are in vain.
        at_once: tiles that go in lockstep.
    """

    block: int
    tile: int
    candidates: int
    at_once: int


# An accelerator wants large kernels. On a CPU no tile should wait for another, and selecting is so
# slow that small blocks, of which fewer points are too far, are worth the more of them.
_SIZES = {
    "cpu": _Sizes(16, 32, 512, 1),
    "gpu": _Sizes(128, 64, 1024, 128),
    "tpu": _Sizes(128, 64, 1024, 64),
}


class Neighbors(NamedTuple):
    """Neighbours of each query, nearest first.

    Attributes:
        indices: `(B, Q, K)`, positions among all points; -1 in an empty slot.
        distances: `(B, Q, K)`, infinite in an empty slot.
    """

    indices: Int[AnyArray, "B Q K"]
    distances: Float[AnyArray, "B Q K"]


def radius_search(
    queries: Float[AnyArray, "B Q D"],
    points: Float[AnyArray, "B M D"],
    radius: float | np.floating,
    count: Integer,
    point_mask: Bool[AnyArray, "B M"] | None = None,
) -> Neighbors:
    """The nearest `count` points within `radius` of each query; equally near ones by lower index.

    No gradient flows through it. Memory is linear in `Q * count + M`.

    Args:
        queries: coordinates, of any number of axes; axis 1 is split over the mesh axis `points`,
            which must divide it. A query that is not finite has no neighbours.
        points: coordinates, split likewise. A point that is not finite is nobody's neighbour.
        radius: largest distance, inclusive; infinite for the nearest points wherever they are.
        count: slots for the neighbours of a query.
        point_mask: True where a point is real; others are never found.

    Returns:
        The neighbours, laid out as the queries. Distances are differences squared, summed and
        rooted, in float32 or wider.

    Raises:
        ValueError: shapes that do not fit, lengths that the mesh axis does not divide, a radius
            that is not positive, or a count below 1.
    """
    for name, array in (("queries", queries), ("points", points)):
        if not isinstance(array, jax.Array | np.ndarray):
            raise ValueError(
                f"radius_search: {name}: expected an array (B, N, D), got {type(array).__name__}"
            )
    _check(queries, points, radius, count, point_mask)
    queries, points = jax.lax.stop_gradient((jnp.asarray(queries), jnp.asarray(points)))
    return _search(float(radius), int(count), queries, points, point_mask)


def within(neighbors: Neighbors, radius: float | np.floating, count: Integer) -> Neighbors:
    """The search for a smaller radius and count, from one for larger ones.

    Args:
        neighbors: what `radius_search` returned.
        radius: at most the radius of that search.
        count: at most its count.

    Returns:
        What `radius_search` with this radius and count returns.

    Raises:
        ValueError: a radius that is not positive, or a count below 1 or above that of the search.
    """
    _check_limits("within", radius, count)
    found = neighbors.indices.shape[-1]
    if count > found:
        raise ValueError(f"within: expected a count of at most {found}, as searched; got {count}")
    indices, distances = neighbors.indices[..., :count], neighbors.distances[..., :count]
    near = distances <= radius
    return Neighbors(jnp.where(near, indices, -1), jnp.where(near, distances, jnp.inf))


def _check(
    queries: AnyArray,
    points: AnyArray,
    radius: float | np.floating,
    count: Integer,
    point_mask: AnyArray | None,
) -> None:
    shapes = f"queries {queries.shape}, points {points.shape}"
    if (
        not queries.ndim == points.ndim == 3
        or queries.shape[::2] != points.shape[::2]
        or 0 in (*queries.shape, *points.shape)
    ):
        raise ValueError(
            f"radius_search: expected queries (B, Q, D) and points (B, M, D), got {shapes}"
        )
    if point_mask is not None and (
        point_mask.shape != points.shape[:2] or point_mask.dtype != bool
    ):
        raise ValueError(
            f"radius_search: expected point_mask bool {points.shape[:2]}, got "
            f"{point_mask.dtype} {point_mask.shape}"
        )
    shards = mesh_lib.axis_size(POINTS)
    if queries.shape[1] % shards or points.shape[1] % shards:
        raise ValueError(
            f"radius_search: expected lengths that divide by the {shards} shards of mesh axis "
            f"{POINTS!r}, got {shapes}"
        )
    _check_limits("radius_search", radius, count)


def _check_limits(name: str, radius: float | np.floating, count: Integer) -> None:
    if not radius > 0:
        raise ValueError(f"{name}: expected a positive radius, got {radius!r}")
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise ValueError(f"{name}: expected a count of at least 1, got {count!r}")


@partial(jax.jit, static_argnums=(0, 1))
def _search(
    radius: float, count: int, queries: Array, points: Array, point_mask: Array | None
) -> Neighbors:
    search = partial(_search_shard, radius, count)
    if mesh_lib.axis_size(POINTS) == mesh_lib.axis_size(DATA) == 1:
        return search(queries, points, point_mask, axis=None)
    # Manual over the samples as well: each group of devices then loops as long as its own samples
    # need, and no condition of a loop is exchanged.
    split = len(queries) % mesh_lib.axis_size(DATA) == 0
    layout = mesh_lib.spec(DATA if split else None, POINTS)
    sharded = mesh_lib.axis_size(POINTS) > 1
    run = jax.shard_map(
        partial(search, axis=POINTS if sharded else None),
        in_specs=(layout, layout, layout),
        out_specs=layout,
        axis_names={DATA, POINTS} & set(jax.sharding.get_abstract_mesh().axis_names),
        check_vma=False,
    )
    return run(queries, points, point_mask)


def _search_shard(
    radius: float,
    count: int,
    queries: Array,
    points: Array,
    point_mask: Array | None,
    *,
    axis: str | None,
) -> Neighbors:
    """Neighbours of the queries of one shard."""
    dtype = accumulation_dtype(queries.dtype, points.dtype)
    queries, points = queries.astype(dtype), points.astype(dtype)
    limit = _largest_square(radius, dtype)
    batch, total, width = queries.shape
    sizes = _SIZES.get(mesh_lib.platform(), _SIZES["gpu"])

    tiles = _groups(queries, boxes.finite(queries), sizes.tile, sizes.at_once)
    _, tile_count, tile = tiles.shape
    at_once = min_dim(tile_count, sizes.at_once)
    groups = tile_count // at_once
    tiled = _rows(queries, tiles.reshape(batch, -1), jnp.nan)
    tiled = tiled.reshape(batch * groups, at_once, tile, width)
    shape = (batch * groups, at_once, tile, count)
    best = Best(jnp.full(shape, jnp.inf, dtype), jnp.full(shape, -1, jnp.int32))

    def fold(owner: Position, blocks: Blocks, best: Best) -> tuple[Blocks, Best]:
        lower, upper = boxes.bounds(blocks.points.swapaxes(2, 3), blocks.indices >= 0)
        flat = Blocks(*(array.reshape(-1, *array.shape[2:]) for array in blocks))

        def search(i: Array, best: Best) -> Best:
            sample = i // groups
            found = search_tiles(
                tiled[i],
                Best(*(array[i] for array in best)),
                flat,
                (lower[sample], upper[sample]),
                sample * blocks.indices.shape[1],
                limit,
                sizes.candidates,
            )
            return Best(*(chunks.put(a, f[None], i, 0) for a, f in zip(best, found, strict=True)))

        return blocks, jax.lax.fori_loop(0, tiled.shape[0], search, best)

    together = -(-max(sizes.candidates, count) // sizes.block)
    blocks = _blocks(points, point_mask, sizes.block, together, axis)
    _, best = ring.around(fold, blocks, best, axis)
    # A query's place among the tiles.
    places = jax.vmap(jnp.argsort)(tiles.reshape(batch, -1))[:, :total]
    squares, indices = (_rows(x.reshape(batch, -1, count), places, 0) for x in best)
    return Neighbors(jnp.where(jnp.isfinite(squares), indices, -1), jnp.sqrt(squares))


def _groups(points: Array, valid: Array, longest: int, multiple: int) -> Array:
    """Compact groups of each sample; where their number is symbolic, a multiple of so many."""
    if is_symbolic_dim(points.shape[1]):
        group = partial(boxes.curve_groups, longest=longest, multiple=multiple)
    else:
        group = partial(boxes.compact_groups, longest=longest)
    return jax.vmap(group)(points, valid)


def _blocks(
    points: Array, point_mask: Array | None, longest: int, multiple: int, axis: str | None
) -> Blocks:
    """The blocks of one shard's points; see `_groups`."""
    batch, total, _ = points.shape
    first = 0 if axis is None else jax.lax.axis_index(axis) * total
    valid = boxes.finite(points) if point_mask is None else boxes.finite(points) & point_mask
    order = _groups(points, valid, longest, multiple)
    flat = order.reshape(batch, -1)
    real = _rows(valid[..., None], flat, False)
    grouped = jnp.where(real, _rows(points, flat, 0), 0)
    return Blocks(
        grouped.reshape(*order.shape, -1).swapaxes(2, 3),
        jnp.where(real.reshape(order.shape), first + order, -1),
    )


def _largest_square(radius: float, dtype: jnp.dtype) -> np.floating:
    """The largest number whose rounded root is at most the radius."""
    largest = np.finfo(dtype).max
    if radius > largest:
        return largest
    radius = dtype.type(radius)
    square = dtype.type(min(float(radius) * float(radius), float(largest)))
    while np.sqrt(square) > radius:
        square = np.nextafter(square, dtype.type(0))
    while square < largest and np.sqrt(np.nextafter(square, largest)) <= radius:
        square = np.nextafter(square, largest)
    return square


def _rows(array: Array, places: Array, fill: float) -> Array:
    """Rows `places` `(B, P)` of an array `(B, N, C)`; `fill` where there is none."""
    return jax.vmap(lambda rows, i: rows.at[i].get(mode="fill", fill_value=fill))(array, places)
