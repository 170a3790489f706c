"""Radius search and what is gathered from it: exact, the same on every mesh, never all pairs."""

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import array_shapes, collectives, compile_for, text_of
from conftest import assert_trees_close, on_any_mesh, on_mesh, on_meshes
from jax.sharding import AxisType

import parallel
from parallel import boxes, chunks, neighbors, tile_search
from parallel import mesh as mesh_lib

BATCH, QUERIES, POINTS, RADIUS, COUNT = 2, 48, 80, 0.3, 5
SIZES = neighbors._Sizes(block=4, tile=8, candidates=8, at_once=1)


def set_sizes(monkeypatch, sizes):
    jax.clear_caches()
    monkeypatch.setitem(neighbors._SIZES, "cpu", sizes)


@pytest.fixture(scope="module", autouse=True)
def small_sizes():
    """Small clouds shall have many blocks and tiles, and take several steps."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_sizes(monkeypatch, SIZES)
        yield
    jax.clear_caches()


def brute_force(queries, points, radius, count, mask=None):
    """The definition, from all pairs: in the order of (squared distance, index)."""
    difference = queries[:, :, None] - points[:, None]
    squares = difference[..., 0] * difference[..., 0]
    for axis in range(1, points.shape[-1]):
        squares = squares + difference[..., axis] * difference[..., axis]
    near = np.sqrt(squares) <= points.dtype.type(radius)
    if mask is not None:
        near &= mask[:, None]
    squares = np.where(near, squares, np.inf)
    missing = max(0, count - points.shape[1])
    squares = np.pad(squares, ((0, 0), (0, 0), (0, missing)), constant_values=np.inf)
    indices = np.argsort(squares, axis=-1, kind="stable")[..., :count]
    squares = np.take_along_axis(squares, indices, -1)
    return np.where(np.isfinite(squares), indices, -1), np.sqrt(squares)


def assert_found(actual: parallel.Neighbors, expected) -> None:
    assert actual.indices.dtype == jnp.int32
    np.testing.assert_array_equal(actual.indices, expected[0])
    np.testing.assert_array_equal(actual.distances, expected[1])


# Clouds ------------------------------------------------------------------------------------------


def uniform(draw, *shape):
    return draw.random(shape)


def duplicates(draw, batch, number, width):
    return np.repeat(draw.random((batch, number // 8, width)), 8, axis=1)


def line(draw, *shape):
    return draw.random((*shape[:2], 1)) * np.ones(shape[2])


def grid(draw, *shape):
    return draw.integers(0, 5, shape) / 4


def clusters(draw, *shape):
    centres = draw.random((4, shape[2]))
    return centres[draw.integers(0, 4, shape[:2])] + 1e-3 * draw.standard_normal(shape)


def one_place(draw, *shape):
    return np.full(shape, 0.5)


CLOUDS = [uniform, duplicates, line, grid, clusters, one_place]


def clouds(kind, seed, dtype, queries=QUERIES, points=POINTS, width=3):
    draw = np.random.default_rng(seed)
    cloud = kind(draw, BATCH, points, width).astype(dtype)
    # Some queries are points, some are far from all.
    shift = np.where(np.arange(queries) % 5 == 4, 10, 0)[:, None]
    return (kind(draw, BATCH, queries, width) + shift).astype(dtype), cloud


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", CLOUDS)
def test_it_finds_what_comparing_all_pairs_finds(kind, seed):
    queries, points = clouds(kind, seed, np.float32)
    expected = brute_force(queries, points, RADIUS, COUNT)
    assert (expected[0] >= 0).any()
    assert (expected[0] < 0).any()
    assert_found(parallel.radius_search(queries, points, RADIUS, COUNT), expected)


@pytest.mark.parametrize("kind", CLOUDS)
def test_it_finds_the_same_in_float64(kind, float64):
    queries, points = clouds(kind, 0, float64)
    actual = parallel.radius_search(queries, points, RADIUS, COUNT)
    assert_found(actual, brute_force(queries, points, RADIUS, COUNT))


@pytest.mark.parametrize(
    ("queries", "points", "width", "count"),
    [(1, 80, 3, 5), (48, 1, 3, 5), (1, 1, 1, 1), (7, 3, 2, 9), (13, 31, 2, 1), (9, 80, 4, 80)],
)
def test_clouds_of_any_size_and_width(queries, points, width, count):
    queries, points = clouds(uniform, 0, np.float32, queries, points, width)
    actual = parallel.radius_search(queries, points, 0.5, count)
    assert_found(actual, brute_force(queries, points, 0.5, count))


@pytest.mark.parametrize(
    "sizes",
    [
        neighbors._SIZES["cpu"],
        neighbors._SIZES["gpu"],
        neighbors._Sizes(block=32, tile=8, candidates=32, at_once=4),
    ],
    ids=["cpu", "gpu", "lockstep"],
)
def test_sizes_of_blocks_and_tiles_change_nothing(sizes, monkeypatch):
    set_sizes(monkeypatch, sizes)
    for kind in (uniform, grid):
        queries, points = clouds(kind, 1, np.float32, 300, 4000)
        points[:, :500] += np.float32(0.01)
        actual = parallel.radius_search(queries, points, 0.2, 20)
        assert_found(actual, brute_force(queries, points, 0.2, 20))
    jax.clear_caches()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_radius_is_inclusive_to_the_last_digit(dtype, float64):
    queries = np.zeros((1, 1, 3), dtype)
    draw = np.random.default_rng(0)
    points = draw.random((1, 200, 3)).astype(dtype)
    _, distances = brute_force(queries, points, 10, 200)
    # Several squares round to one root: a bound on squares is not the radius squared.
    for radius in map(float, distances[0, 0, 50::100]):
        assert_found(
            parallel.radius_search(queries, points, radius, 200),
            brute_force(queries, points, radius, 200),
        )


def test_an_infinite_radius_finds_the_nearest_wherever_they_are():
    queries, points = clouds(uniform, 0, np.float32)
    actual = parallel.radius_search(queries, 1e6 * points, np.inf, COUNT)
    assert_found(actual, brute_force(queries, 1e6 * points, np.inf, COUNT))


def test_padding_and_what_is_not_finite_is_never_found_and_finds_nothing():
    queries, points = clouds(grid, 0, np.float32)
    mask = np.arange(POINTS) % 7 != np.array([[1], [2]])
    queries[0, 3, 1], queries[1, 5], queries[1, 6] = np.nan, np.nan, np.inf
    points[0, 2, 0], points[1, 4], points[1, 6] = np.nan, np.nan, -np.inf
    with np.errstate(invalid="ignore"):
        expected = brute_force(queries, points, RADIUS, COUNT, mask)
    assert_found(parallel.radius_search(queries, points, RADIUS, COUNT, mask), expected)
    points[~mask] = np.nan
    assert_found(parallel.radius_search(queries, points, RADIUS, COUNT, mask), expected)
    nothing = parallel.radius_search(queries * np.nan, points, RADIUS, COUNT)
    assert (np.asarray(nothing.indices) == -1).all()
    nothing = parallel.radius_search(queries, points, RADIUS, COUNT, np.zeros_like(mask))
    assert (np.asarray(nothing.indices) == -1).all()


@pytest.mark.parametrize("kind", [uniform, grid])
@on_any_mesh
def test_every_mesh_finds_the_same(mesh, kind):
    queries, points = clouds(kind, 0, np.float32)
    mask = np.arange(POINTS) < np.array(
        [[61], [19]]
    )  # of the second sample most shards are padding
    with on_mesh(mesh):
        actual = parallel.radius_search(queries, points, RADIUS, COUNT, mask)
    assert_found(actual, brute_force(queries, points, RADIUS, COUNT, mask))


@pytest.mark.parametrize("axes", [("points",), ("data",), ("heads", "points")])
def test_a_mesh_may_lack_axes(axes):
    queries, points = clouds(grid, 0, np.float32)
    sizes = (8,) if len(axes) == 1 else (2, 4)
    with jax.set_mesh(jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes))):
        actual = parallel.radius_search(queries, points, RADIUS, COUNT)
    assert_found(actual, brute_force(queries, points, RADIUS, COUNT))


def test_samples_that_do_not_divide_by_their_axis_are_searched_by_all():
    queries, points = (x[:1] for x in clouds(uniform, 0, np.float32))
    with on_mesh(dict(data=2, points=4)):
        actual = parallel.radius_search(queries, points, RADIUS, COUNT)
    assert_found(actual, brute_force(queries, points, RADIUS, COUNT))


@pytest.mark.parametrize("radius", [0.1, 0.25, 0.3])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_one_search_serves_smaller_radii_and_counts(radius, count):
    queries, points = clouds(grid, 2, np.float32)
    found = parallel.radius_search(queries, points, RADIUS, COUNT)
    actual = parallel.within(found, radius, count)
    assert_found(actual, brute_force(queries, points, radius, count))


# Work --------------------------------------------------------------------------------------------


def test_groups_are_compact_and_hold_each_point_once():
    draw = np.random.default_rng(0)
    points = draw.random((1000, 2)).astype(np.float32) * np.array([8, 1], np.float32)
    valid = np.arange(1000) % 10 > 0
    groups = boxes.compact_groups(points, valid, 16)
    assert groups.shape == (64, 16)
    np.testing.assert_array_equal(np.sort(np.ravel(groups))[:1000], np.arange(1000))
    members = np.minimum(groups, 999)
    lower, upper = boxes.bounds(points[members], (groups < 1000) & valid[members])
    sides = np.asarray(upper - lower)[np.isfinite(lower).all(-1)]
    # Of an area of 8 by 1 none is covered twice, and a square has a side of sqrt(8 / 64).
    assert sides.prod(-1).sum() <= 8
    assert np.median(sides.max(-1)) < 0.7


@pytest.mark.parametrize(
    ("radius", "expected"), [(0.5, {-1}), (9.0, {0, 1})], ids=["radius", "full_list"]
)
def test_blocks_too_far_for_the_radius_or_a_full_list_are_not_visited(radius, expected):
    # Three blocks of one point; the box of the last says 5, but its point is where the query is.
    blocks = tile_search.Blocks(jnp.array([[[1.0]], [[-1.0]], [[0.0]]]), jnp.arange(3)[:, None])
    corner = jnp.array([[1.0], [-1.0], [5.0]])
    best = tile_search.Best(jnp.full((1, 1, 2), jnp.inf), jnp.full((1, 1, 2), -1))
    arguments = best, blocks, (corner, corner), 0, np.float32(radius**2), 1
    found = tile_search.search_tiles(jnp.zeros((1, 1, 1)), *arguments)
    assert set(np.ravel(found.indices).tolist()) == expected


# Features ----------------------------------------------------------------------------------------

WIDTH, OUTPUTS = 3, 4


def gathered_densely(features, indices):
    """The definition."""
    batch, queries, slots = indices.shape
    flat = jnp.maximum(indices, 0).reshape(batch, queries * slots, 1)
    rows = jnp.take_along_axis(features, flat, axis=1).reshape(batch, queries, slots, -1)
    return jnp.where(indices[..., None] >= 0, rows, 0)


def projected_densely(features, indices, kernel):
    return jnp.einsum("bqkc,kcf->bqf", gathered_densely(features, indices), kernel)


def feature_arguments():
    draw = np.random.default_rng(0)
    indices = draw.integers(-1, POINTS, (BATCH, QUERIES, COUNT)).astype(np.int32)
    indices[:, 3:9], indices[:, 9] = 7, -1  # many slots share a point, one query has none
    return (
        draw.standard_normal((BATCH, POINTS, WIDTH)),
        indices,
        draw.standard_normal((COUNT, WIDTH, OUTPUTS)),
    )


def features_step(gather, project, features, indices, kernel):
    """Values of both and all gradients."""

    def loss(features, kernel):
        gathered, projected = gather(features, indices), project(features, indices, kernel)
        factor = jnp.cos(jnp.arange(gathered.size)).reshape(gathered.shape)
        return jnp.sum(gathered**2 * factor) + jnp.sum(jnp.sin(projected)), (gathered, projected)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(features, kernel)


OURS = parallel.gather_neighbors, parallel.project_neighbors


@on_any_mesh
def test_features_and_gradients_equal_those_of_all_points_at_once(mesh, float64, monkeypatch):
    dense = partial(features_step, gathered_densely, projected_densely)
    expected = jax.jit(dense)(*feature_arguments())
    monkeypatch.setitem(chunks._SCORES_A_CHUNK, "cpu", 4 * BATCH * COUNT * WIDTH)
    with on_mesh(mesh):
        step = jax.jit(partial(features_step, *OURS))
        actual = step(*feature_arguments())
    assert_trees_close(actual, expected, 1e-12)


@on_any_mesh
def test_gradients_reach_the_points_found_and_nothing_else(mesh, float64):
    queries, points = clouds(uniform, 0, np.float64)
    kernel = feature_arguments()[2]
    mask = np.arange(POINTS) < np.array([[61], [19]])
    indices, _ = brute_force(queries, points, RADIUS, COUNT, mask)

    def loss(project, find, queries, points, kernel):
        found, distances = find(queries, points)
        return jnp.sum(jnp.sin(project(points, found, kernel))) + jnp.sum(distances)

    def gradients(project, find, points):
        step = jax.grad(partial(loss, project, find), argnums=(0, 1, 2))
        return jax.jit(step)(queries, points, kernel)

    def find(queries, points):
        found = parallel.radius_search(queries, points, RADIUS, COUNT, mask)
        return found.indices, jnp.where(jnp.isfinite(found.distances), found.distances, 0)

    expected = gradients(projected_densely, lambda *_: (indices, jnp.zeros(1)), points)
    garbage = np.where(mask[..., None], points, np.nan)
    with on_mesh(mesh):
        d_queries, *actual = gradients(parallel.project_neighbors, find, garbage)
    np.testing.assert_array_equal(d_queries, 0)
    np.testing.assert_array_equal(np.asarray(actual[0])[~mask], 0)
    assert_trees_close(actual, list(expected[1:]), 1e-12)


def test_bfloat16_is_reduced_in_float32():
    points, queries = 8, 4096
    features = jnp.ones((1, points, 1), jnp.bfloat16)
    indices = jnp.zeros((1, queries, 1), jnp.int32)
    kernel = jnp.ones((1, 1, 1), jnp.bfloat16)

    def loss(function, features, *rest):
        return function(features, indices, *rest).astype(jnp.float32).sum()

    gathered = jax.grad(partial(loss, parallel.gather_neighbors))(features)
    projected = jax.grad(partial(loss, parallel.project_neighbors), (0, 1))(features, kernel)
    for gradient in (gathered[0, 0], projected[0][0, 0], projected[1]):
        np.testing.assert_allclose(np.asarray(gradient, np.float32), queries)


# Compiled programs -------------------------------------------------------------------------------


def shape_of(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    """An array of points that is not there, on the mesh of the context."""
    sharding = mesh_lib.sharding("data", "points", *[None] * (len(shape) - 2))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def search(queries, points, mask):
    return parallel.radius_search(queries, points, RADIUS, COUNT, mask)


@on_meshes
def test_only_the_points_of_one_shard_travel(mesh):
    with on_mesh(mesh):
        shards = mesh["points"]
        batch = BATCH // mesh.get("data", 1)
        arguments = shape_of(BATCH, 8 * 59, 3), shape_of(BATCH, 8 * 64, 3)
        text = text_of(search, *arguments, shape_of(BATCH, 8 * 64, dtype=bool))
    found = collectives(text)
    assert {each.kind for each in found} == {"collective-permute"}
    shapes = [shape for each in found for shape in each.shapes]
    local = batch * 8 * 64 // shards
    assert sorted(map(prod, shapes)) == [local, 3 * local]  # indices and coordinates
    assert not [shape for shape in array_shapes(text) if 8 * 59 in shape or 8 * 64 in shape]


@on_meshes
def test_features_travel_in_a_ring_and_the_kernels_gradient_is_one_sum(mesh):
    kernel = jax.ShapeDtypeStruct((COUNT, WIDTH, OUTPUTS), np.float32)

    def gradients(features, indices, kernel):
        project = lambda *args: jnp.sum(parallel.project_neighbors(*args))  # noqa: E731
        return jax.grad(project, argnums=(0, 2))(features, indices, kernel)

    with on_mesh(mesh):
        indices = shape_of(BATCH, 8 * 59, COUNT, dtype=np.int32)
        text = text_of(gradients, shape_of(BATCH, 8 * 61, WIDTH), indices, kernel)
    found = collectives(text)
    block = BATCH // mesh.get("data", 1), 8 * 61 // mesh["points"], WIDTH
    travels = {shape for c in found if c.kind == "collective-permute" for shape in c.shapes}
    assert travels == {block}
    sums = [shape for c in found if c.kind == "all-reduce" for shape in c.shapes]
    assert not [c for c in found if c.kind == "all-reduce" and "while" in c.attributes]
    # Over the points; and over the samples, where these are split.
    assert sums == [kernel.shape] * (2 if mesh.get("data", 1) > 1 else 1)
    assert {c.kind for c in found} == {"collective-permute", "all-reduce"}


def test_memory_of_the_search_is_linear():
    temporary = {}
    for number in (4096, 16384):
        cloud = shape_of(1, number, 3)
        program = compile_for(search, cloud, cloud, shape_of(1, number, dtype=bool))
        temporary[number] = program.memory_analysis().temp_size_in_bytes
        # Boxes of all tiles with all blocks would be number * number / 32.
        assert max(map(prod, array_shapes(program.as_text()))) < number * number / 64
    assert temporary[16384] <= 4.1 * temporary[4096]


def test_candidates_are_selected_and_not_sorted():
    cloud = shape_of(1, 4096, 3)
    text = text_of(search, cloud, cloud, shape_of(1, 4096, dtype=bool))
    rows = f",{SIZES.candidates + COUNT}]"
    naming = [line for line in text.splitlines() if rows in line]
    assert naming
    assert not [line for line in naming if " sort(" in line]


def test_no_array_holds_the_features_of_all_neighbors():
    queries, slots, width = 65536, 16, 5

    def step(features, indices, kernel):
        def loss(features, kernel):
            return jnp.sum(parallel.project_neighbors(features, indices, kernel) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1))(features, kernel)

    indices = shape_of(1, queries, slots, dtype=np.int32)
    kernel = jax.ShapeDtypeStruct((slots, width, 7), np.float32)
    shapes = array_shapes(text_of(step, shape_of(1, 1000, width), indices, kernel))
    assert max(map(prod, shapes)) < queries * slots * width / 2


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(queries=np.ones((4, 3))),
            r"expected queries \(B, Q, D\) and points \(B, M, D\), got",
        ),
        (dict(queries=np.ones((1, 4, 2))), r"got queries \(1, 4, 2\), points \(1, 5, 3\)"),
        (dict(queries=np.ones((2, 4, 3))), r"got queries \(2, 4, 3\), points \(1, 5, 3\)"),
        (dict(points=np.ones((1, 0, 3))), r"got queries \(1, 4, 3\), points \(1, 0, 3\)"),
        (dict(radius=0), "expected a positive radius, got 0"),
        (dict(radius=-1.0), "expected a positive radius, got -1.0"),
        (dict(radius=float("nan")), "expected a positive radius, got nan"),
        (dict(count=0), "expected a count of at least 1, got 0"),
        (dict(count=2.5), "expected a count of at least 1, got 2.5"),
        (dict(point_mask=np.ones((1, 4), bool)), r"expected point_mask bool \(1, 5\), got bool"),
        (dict(point_mask=np.ones((1, 5))), r"expected point_mask bool \(1, 5\), got float64"),
    ],
)
@pytest.mark.usefixtures("unchecked_calls")
def test_a_bad_search_is_named(change, message):
    good = dict(queries=np.ones((1, 4, 3)), points=np.ones((1, 5, 3)), radius=1.0, count=2)
    with pytest.raises(ValueError, match=f"^radius_search: .*{message}.*$"):
        parallel.radius_search(**good | change)


def test_lengths_that_the_mesh_does_not_divide_are_named():
    good, bad = np.ones((1, 8, 3)), np.ones((1, 9, 3))
    indices, bad_indices = np.zeros((1, 8, 1), int), np.zeros((1, 9, 1), int)
    message = "expected lengths that divide by the 8 shards of mesh axis 'points', got"
    with on_mesh(dict(points=8)):
        for arguments in ((good, bad), (bad, good)):
            with pytest.raises(ValueError, match=f"^radius_search: {message}"):
                parallel.radius_search(*arguments, 1.0, 1)
        for arguments in ((good, bad_indices), (bad, indices)):
            with pytest.raises(ValueError, match=f"^gather_neighbors: {message}"):
                parallel.gather_neighbors(*arguments)


@pytest.mark.usefixtures("unchecked_calls")
def test_a_part_that_is_no_part_of_the_search_is_named():
    found = parallel.Neighbors(jnp.zeros((1, 2, 3), int), jnp.zeros((1, 2, 3)))
    with pytest.raises(ValueError, match=r"^within: expected a count of at most 3, .*; got 4$"):
        parallel.within(found, 1.0, 4)
    with pytest.raises(ValueError, match=r"^within: expected a positive radius, got nan$"):
        parallel.within(found, np.nan, 1)
    with pytest.raises(ValueError, match=r"^within: expected a count of at least 1, got 0$"):
        parallel.within(found, 1.0, 0)


@pytest.mark.usefixtures("unchecked_calls")
def test_features_that_do_not_fit_are_named():
    features, indices = np.ones((2, 5, 3)), np.zeros((2, 4, 6), np.int32)
    message = r"expected features \(B, M, C\) and integer indices \(B, Q, K\), got"
    for bad in ((features[0], indices), (features[:1], indices), (features, indices * 1.0)):
        with pytest.raises(ValueError, match=f"^gather_neighbors: {message}"):
            parallel.gather_neighbors(*bad)
        with pytest.raises(ValueError, match=f"^project_neighbors: {message}"):
            parallel.project_neighbors(*bad, np.ones((6, 3, 2)))
    with pytest.raises(
        ValueError, match=r"expected kernel \(K, C, F\) = \(6, 3, F\), got \(3, 6, 2\)$"
    ):
        parallel.project_neighbors(features, indices, np.ones((3, 6, 2)))


def test_indices_of_any_integer_type_are_taken():
    features = jnp.arange(1.0, 301.0).reshape(1, 300, 1)
    for dtype in (np.uint8, np.int16, np.int64):
        indices = np.array([[[1, 100, 127]]], dtype)
        gathered = parallel.gather_neighbors(features, indices)
        np.testing.assert_array_equal(gathered[..., 0], [[[2, 101, 128]]])
        projected = parallel.project_neighbors(features, indices, jnp.ones((3, 1, 1)))
        np.testing.assert_array_equal(projected, [[[231]]])


@pytest.mark.usefixtures("unchecked_calls")
def test_lists_are_refused_by_name():
    with pytest.raises(ValueError, match=r"radius_search: queries: expected an array .* got list"):
        parallel.radius_search([[[0.0]]], jnp.ones((1, 4, 1)), 1.0, 2)
