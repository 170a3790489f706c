"""Radius search: the nearest points within a radius of each query, on points split over the mesh.

Points are cut into compact blocks and queries into compact tiles. A tile visits the blocks from the
nearest on, and stops where no block can hold a nearer point than its queries have: the search is
exact, adapts to clusters, and needs no bound on how many points a region holds. On a mesh the
blocks of all shards pass by in a ring; a shard keeps one list of the best so far for its queries.

The order of neighbours is that of `(squared distance, index)`, the squared distance being
`((dx * dx) + dy * dy) + dz * dz` with every operation rounded. A point is within the radius if the
rounded root of that is at most the radius.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from parallel import boxes, chunks, ring
from parallel import mesh as mesh_lib
from parallel.mesh import DATA, POINTS
from parallel.softmax import accumulation_dtype

# Most points of a block, and most queries of a tile.
_BLOCK, _TILE = 128, 64
# Candidates that a tile looks at together: enough that selecting among them costs more than what
# is done once a step, few enough that seldom many of them are in vain.
_CANDIDATES = 1024
# Tiles that go in lockstep. An accelerator wants large kernels; on a CPU no tile should wait.
_TILES_AT_ONCE = {"cpu": 1, "gpu": 128, "tpu": 64}


class Neighbors(NamedTuple):
    """Neighbours of each query, nearest first.

    Attributes:
        indices: `(B, Q, K)`, positions among all points; -1 in an empty slot.
        distances: `(B, Q, K)`, infinite in an empty slot.
    """

    indices: Int[Array, "B Q K"]
    distances: Float[Array, "B Q K"]


def radius_search(
    queries: Float[Array, "B Q D"],
    points: Float[Array, "B M D"],
    radius: float,
    count: int,
    point_mask: Bool[Array, "B M"] | None = None,
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
    _check(queries, points, radius, count, point_mask)
    queries, points = jax.lax.stop_gradient((jnp.asarray(queries), jnp.asarray(points)))
    return _search(float(radius), int(count), queries, points, point_mask)


def within(neighbors: Neighbors, radius: float, count: int) -> Neighbors:
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


def _check(queries, points, radius, count, point_mask) -> None:
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


def _check_limits(name: str, radius, count) -> None:
    if not radius > 0:
        raise ValueError(f"{name}: expected a positive radius, got {radius!r}")
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise ValueError(f"{name}: expected a count of at least 1, got {count!r}")


@partial(jax.jit, static_argnums=(0, 1))
def _search(radius: float, count: int, queries, points, point_mask):
    run = partial(_search_shard, radius, count)
    if mesh_lib.axis_size(POINTS) == mesh_lib.axis_size(DATA) == 1:
        return run(queries, points, point_mask, axis=None)
    # Manual over the samples as well: each group of devices then loops as long as its own samples
    # need, and no condition of a loop is exchanged.
    split = len(queries) % mesh_lib.axis_size(DATA) == 0
    layout = mesh_lib.spec(DATA if split else None, POINTS)
    sharded = mesh_lib.axis_size(POINTS) > 1
    run = jax.shard_map(
        partial(run, axis=POINTS if sharded else None),
        in_specs=(layout, layout, layout),
        out_specs=layout,
        axis_names={DATA, POINTS} & set(jax.sharding.get_abstract_mesh().axis_names),
        check_vma=False,
    )
    return run(queries, points, point_mask)


class _Blocks(NamedTuple):
    """Points of one shard in compact blocks; index -1 in a free place of a block."""

    points: Float[Array, "B N S D"]
    indices: Int[Array, "B N S"]


class _Best(NamedTuple):
    """The best neighbours so far, in order; an empty slot is infinitely far."""

    squares: Float[Array, "*T K"]
    indices: Int[Array, "*T K"]


def _search_shard(radius: float, count: int, queries, points, point_mask, *, axis):
    """Neighbours of the queries of one shard."""
    dtype = accumulation_dtype(queries.dtype, points.dtype)
    queries, points = queries.astype(dtype), points.astype(dtype)
    limit = _largest_square(radius, dtype)
    batch, total, width = queries.shape

    tiles = jax.vmap(partial(boxes.compact_groups, longest=_TILE))(queries, _finite(queries))
    _, tile_count, tile = tiles.shape
    at_once = min(tile_count, _TILES_AT_ONCE.get(mesh_lib.platform(), 1))
    groups = tile_count // at_once
    tiled = _rows(queries, tiles.reshape(batch, -1), jnp.nan)
    tiled = tiled.reshape(batch * groups, at_once, tile, width)
    shape = (batch * groups, at_once, tile, count)
    best = _Best(jnp.full(shape, jnp.inf, dtype), jnp.full(shape, -1, jnp.int32))

    def fold(owner, blocks: _Blocks, best: _Best):
        corners = boxes.bounds(blocks.points, blocks.indices >= 0)
        flat = _Blocks(*(array.reshape(-1, *array.shape[2:]) for array in blocks))

        def search(i, best):
            sample = i // groups
            found = _search_tiles(
                tiled[i],
                _Best(*(array[i] for array in best)),
                flat,
                tuple(corner[sample] for corner in corners),
                sample * blocks.indices.shape[1],
                limit,
            )
            return _Best(*(chunks.put(a, f[None], i, 0) for a, f in zip(best, found, strict=True)))

        return blocks, jax.lax.fori_loop(0, len(tiled), search, best)

    _, best = ring.around(fold, _blocks(points, point_mask, axis), best, axis)
    # A query's place among the tiles.
    places = jax.vmap(jnp.argsort)(tiles.reshape(batch, -1))[:, :total]
    squares, indices = (_rows(x.reshape(batch, -1, count), places, 0) for x in best)
    return Neighbors(jnp.where(jnp.isfinite(squares), indices, -1), jnp.sqrt(squares))


def _blocks(points, point_mask, axis) -> _Blocks:
    """The blocks of one shard's points."""
    batch, total, _ = points.shape
    first = 0 if axis is None else jax.lax.axis_index(axis) * total
    valid = _finite(points) if point_mask is None else _finite(points) & point_mask
    order = jax.vmap(partial(boxes.compact_groups, longest=_BLOCK))(points, valid)
    flat = order.reshape(batch, -1)
    real = _rows(valid[..., None], flat, False)
    grouped = jnp.where(real, _rows(points, flat, 0), 0)
    return _Blocks(
        grouped.reshape(*order.shape, -1),
        jnp.where(real.reshape(order.shape), first + order, -1),
    )


def _search_tiles(tiles, best: _Best, blocks: _Blocks, corners, first_block, limit) -> _Best:
    """The best neighbours of some tiles `(G, T, D)` after all blocks of one sample and shard."""
    at_once = len(tiles)
    real = _finite(tiles)
    tile_corners = (corner[:, None] for corner in boxes.bounds(tiles, real))
    far = boxes.box_square_distances(tuple(tile_corners), corners)
    count, size = best.indices.shape[-1], blocks.indices.shape[-1]
    step = min(far.shape[1], -(-max(_CANDIDATES, count) // size))

    def goes_on(state):
        far, best = state
        worst = jnp.minimum(best.squares[..., -1], limit)
        worst = jnp.where(real, worst, -1).max(-1)
        return jnp.any(far.min(-1) <= worst)

    def visit(state):
        far, best = state
        distance, visited = _smallest(far, step)
        chosen = first_block + visited
        points = blocks.points[chosen].reshape(at_once, 1, step * size, -1)
        indices = jnp.where(jnp.isfinite(distance)[..., None], blocks.indices[chosen], -1)
        indices = indices.reshape(at_once, 1, step * size)
        squares = boxes.square_distances(tiles[:, :, None] - points)
        # A tile that is done waits for the others: what it visits again does not count.
        squares = jnp.where((squares <= limit) & (indices >= 0), squares, jnp.inf)
        far = far.at[jnp.arange(at_once)[:, None], visited].set(jnp.inf)
        return far, _merge(best, squares, indices)

    _, best = jax.lax.while_loop(goes_on, visit, (far, best))
    return _in_order(best)


def _merge(best: _Best, squares, indices) -> _Best:
    """The best of those so far and of the candidates, whose indices `(G, 1, W)` a tile shares.

    The last is the farthest; the order of the others is `_in_order`'s.
    """
    count = best.indices.shape[-1]
    squares = jnp.concatenate([best.squares, squares], -1)
    indices = jnp.broadcast_to(indices, (*best.indices.shape[:-1], indices.shape[-1]))
    indices = jnp.concatenate([best.indices, indices], -1)
    nearest, chosen = _smallest(squares, count)
    farthest = nearest[..., -1:]

    def by_index(_):
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
    return _Best(*(jnp.take_along_axis(x, chosen, -1) for x in (squares, indices)))


def _smallest(values, count: int):
    """The smallest values of each row, ascending, and their places."""
    # Without the barrier XLA merges a use of some of them with the selection, no longer recognizes
    # it, and on a CPU sorts all: twenty times slower.
    nearness, places = jax.lax.optimization_barrier(jax.lax.top_k(-values, count))
    return -nearness, places


def _in_order(best: _Best) -> _Best:
    """Sorted by squared distance, then by index; most lists are already."""
    squares, indices = best
    nearer = squares[..., :-1] < squares[..., 1:]
    equal = squares[..., :-1] == squares[..., 1:]
    lower = (indices[..., :-1] <= indices[..., 1:]) | jnp.isinf(squares[..., 1:])
    return jax.lax.cond(
        jnp.all(nearer | (equal & lower)),
        lambda best: best,
        lambda best: _Best(*jax.lax.sort(tuple(best), num_keys=2)),
        best,
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


def _finite(points):
    return jnp.isfinite(points).all(-1)


def _rows(array, places, fill):
    """Rows `places` `(B, P)` of an array `(B, N, C)`; `fill` where there is none."""
    return jax.vmap(lambda rows, i: rows.at[i].get(mode="fill", fill_value=fill))(array, places)
