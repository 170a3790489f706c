"""Points are padded, placed and brought back, and no row is lost, moved or held twice."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import on_any_mesh, on_mesh, on_meshes
from jax.sharding import PartitionSpec

import parallel
from parallel.placement import place


def cloud(batch: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((batch, *shape)).astype(np.float32)


def spec_of(array: jax.Array) -> PartitionSpec:
    """The spec with a place for every dimension, which JAX drops at the end."""
    spec = array.sharding.spec
    return PartitionSpec(*spec, *[None] * (array.ndim - len(spec)))


def shards(axes: dict[str, int] | None) -> int:
    return (axes or {}).get("points", 1)


# Clouds ------------------------------------------------------------------------------------------


@on_any_mesh
@pytest.mark.parametrize("points", [97, 1000, 3])
def test_cloud_comes_back_as_it_was(mesh, points):
    x = cloud(2, points, 5)
    with on_mesh(mesh):
        sharded, mask = parallel.shard_points(x)
        padded = math.ceil(points / shards(mesh)) * shards(mesh)
        assert sharded.shape == (2, padded, 5)
        assert mask.shape == (2, padded)
        assert mask.dtype == bool
        np.testing.assert_array_equal(
            mask, np.broadcast_to(np.arange(padded) < points, (2, padded))
        )
        np.testing.assert_array_equal(np.asarray(sharded)[:, points:], 0)
        back = parallel.unshard_points(sharded, num_points=points)
    assert isinstance(back, np.ndarray)
    np.testing.assert_array_equal(back, x)


@on_any_mesh
def test_samples_of_different_length_come_back_each(mesh):
    samples = [cloud(length, 4) for length in (13, 97, 1, 50)]
    with on_mesh(mesh):
        sharded, mask = parallel.shard_points(samples)
        assert sharded.shape[1] % shards(mesh) == 0
        assert sharded.shape[1] - 97 < shards(mesh)
        mask = np.asarray(mask)
        lengths = np.array([13, 97, 1, 50])
        np.testing.assert_array_equal(mask, np.arange(mask.shape[1]) < lengths[:, None])
        np.testing.assert_array_equal(np.asarray(sharded)[~mask], 0)
        back = parallel.unshard_points(sharded, num_points=[13, 97, 1, 50])
        counted = parallel.unshard_points(sharded, num_points=lengths)
    for sample, one, other in zip(samples, back, counted, strict=True):
        np.testing.assert_array_equal(one, sample)
        np.testing.assert_array_equal(other, sample)


@on_meshes
@pytest.mark.parametrize("points", [96, 97])
def test_each_device_holds_only_its_slice(mesh, points):
    x = cloud(4, points, 3)
    with on_mesh(mesh):
        sharded, mask = parallel.shard_points(x)
    padded = np.pad(x, [(0, 0), (0, -points % shards(mesh)), (0, 0)])
    assert spec_of(sharded) == PartitionSpec("data", "points", None)
    assert spec_of(mask) == PartitionSpec("data", "points")
    shape = (4 // mesh.get("data", 1), padded.shape[1] // shards(mesh), 3)
    assert len(sharded.addressable_shards) == 8
    for shard in sharded.addressable_shards:
        assert shard.data.shape == shape
        np.testing.assert_array_equal(shard.data, padded[shard.index])
    for shard in mask.addressable_shards:
        assert shard.data.shape == shape[:2]


@on_meshes
def test_array_that_is_sharded_already_stays_equal(mesh):
    x = cloud(2, 64, 3)
    with on_mesh(mesh):
        once, _ = parallel.shard_points(x)
        twice, mask = parallel.shard_points(once)
    assert twice.sharding == once.sharding
    assert np.asarray(mask).all()
    np.testing.assert_array_equal(twice, x)


@on_any_mesh
def test_batches_of_any_samples_can_have_one_length(mesh):
    with on_mesh(mesh):
        shapes = set()
        for lengths in ((13, 97), (5, 7), (101, 101)):
            samples = [cloud(n, 3) for n in lengths]
            sharded, mask = parallel.shard_points(samples, length=101)
            np.testing.assert_array_equal(np.asarray(mask).sum(1), lengths)
            for sample, row, real in zip(
                samples, np.asarray(sharded), np.asarray(mask), strict=True
            ):
                np.testing.assert_array_equal(row[real], sample)
                np.testing.assert_array_equal(row[~real], 0)
            shapes.add(sharded.shape)
    assert shapes == {(2, math.ceil(101 / shards(mesh)) * shards(mesh), 3)}


@on_meshes
def test_tokens_of_a_batch_are_whole_on_every_shard_of_the_points(mesh):
    x = cloud(4, 3, 5)
    with on_mesh(mesh):
        placed = place(x, split_points=False)
    assert spec_of(placed) == PartitionSpec("data", None, None)
    np.testing.assert_array_equal(placed, x)


@on_any_mesh
def test_jax_array_is_padded_and_placed_like_a_numpy_array(mesh):
    x = cloud(2, 97, 3)
    with on_mesh(mesh):
        expected, expected_mask = parallel.shard_points(x)
        actual, mask = parallel.shard_points(jnp.asarray(x))
        assert actual.sharding == expected.sharding
        assert mask.sharding == expected_mask.sharding
    np.testing.assert_array_equal(actual, expected)


@on_any_mesh
def test_constant_of_a_compiled_program_is_placed(mesh):
    x = cloud(2, 97, 3)
    with on_mesh(mesh):
        expected, expected_mask = parallel.shard_points(x)
        actual, mask = jax.jit(lambda: parallel.shard_points(x))()
    assert actual.sharding.is_equivalent_to(expected.sharding, 3)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(mask, expected_mask)


@on_any_mesh
def test_samples_inside_a_compiled_program_are_padded_and_placed(mesh):
    samples = [cloud(length, 4) for length in (13, 97)]
    with on_mesh(mesh):
        expected, expected_mask = parallel.shard_points(samples)
        actual, mask = jax.jit(lambda *samples: parallel.shard_points(list(samples)))(*samples)
    assert actual.sharding.is_equivalent_to(expected.sharding, 3)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(mask, expected_mask)


@on_any_mesh
def test_works_inside_a_compiled_program(mesh):
    x = cloud(2, 97, 3)
    with on_mesh(mesh):
        expected, expected_mask = parallel.shard_points(x)
        actual, mask = jax.jit(parallel.shard_points)(x)
    assert actual.sharding.is_equivalent_to(expected.sharding, 3)
    assert mask.sharding.is_equivalent_to(expected_mask.sharding, 2)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(mask, expected_mask)


@on_any_mesh
def test_works_inside_a_gradient(mesh):
    x = jnp.asarray(cloud(2, 9, 3))
    with on_mesh(mesh):

        def loss(x):
            sharded, mask = parallel.shard_points(x)
            return jnp.where(mask[..., None], sharded, jnp.nan).sum(where=mask[..., None])

        gradient = jax.grad(loss)(x)
    np.testing.assert_array_equal(gradient, 1)


@on_any_mesh
def test_float64_becomes_float32_unless_asked_for(mesh):
    x = np.ones((2, 9, 1))
    with on_mesh(mesh):
        assert parallel.shard_points(x)[0].dtype == np.float32
        assert parallel.shard_points(list(x))[0].dtype == np.float32
        with jax.enable_x64(True):
            assert parallel.shard_points(x)[0].dtype == np.float64


@on_any_mesh
def test_one_process_holds_all_rows(mesh):
    with on_mesh(mesh):
        assert parallel.local_rows(6) == slice(0, 6)
    with (
        on_mesh(dict(data=4)),
        pytest.raises(ValueError, match="batch of 6 samples does not divide"),
    ):
        parallel.local_rows(6)


# Grids -------------------------------------------------------------------------------------------

grids = pytest.mark.parametrize("grid", [(9, 7), (5, 4, 3), (3, 2), (8, 1)])


def assert_same_rows(spatial, flat):
    np.testing.assert_array_equal(np.asarray(spatial).reshape(flat.shape), flat)


@on_any_mesh
@grids
def test_flat_and_spatial_grids_stay_aligned(mesh, grid):
    spatial = cloud(2, *grid, 4)
    flat = spatial.reshape(2, -1, 4)
    rows = math.ceil(grid[0] / shards(mesh)) * shards(mesh)
    with on_mesh(mesh):
        sharded, mask = parallel.shard_points(spatial, structured_shape=grid)
        sharded_flat, mask_flat = parallel.shard_points(flat, structured_shape=list(grid))
        assert sharded.shape == (2, rows, *grid[1:], 4)
        assert mask.shape == (2, rows, *grid[1:])
        assert sharded_flat.shape == (2, rows * math.prod(grid[1:]), 4)
        assert_same_rows(sharded, sharded_flat)
        assert_same_rows(mask, mask_flat)
        assert np.asarray(mask_flat).sum() == 2 * math.prod(grid)
        for one, other in zip(
            sharded.addressable_shards, sharded_flat.addressable_shards, strict=True
        ):
            assert_same_rows(one.data, other.data)

        back = parallel.unshard_points(sharded, structured_shape=grid)
        back_flat = parallel.unshard_points(sharded_flat, structured_shape=list(grid))
    np.testing.assert_array_equal(back, spatial)
    np.testing.assert_array_equal(back_flat, flat)


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (np.ones((4, 3)), {}, r"array \(B, N, C\) or a list .* got shape \(4, 3\)"),
        (np.ones(3), {}, r"got shape \(3,\)"),
        (np.ones((2, 0, 3)), {}, r"a sample without points, got shape \(2, 0, 3\)"),
        (np.ones((0, 4, 3)), {}, r"a sample without points, got shape \(0, 4, 3\)"),
        ([], {}, "at least one sample, got an empty list"),
        ([np.ones(3)], {}, r"sample 0: expected \(N_i, C\), got \(3,\)"),
        ([np.ones((4, 3)), np.ones((1, 4, 3))], {}, r"sample 1: expected \(N_i, C\)"),
        ([np.ones((4, 3)), np.ones((4, 2))], {}, r"sample 1: .* width \(3,\) of sample 0, got"),
        ([np.ones((4, 3)), np.ones((0, 3))], {}, r"sample 1 has no points, got \(0, 3\)"),
        (
            np.ones((2, 12, 3)),
            dict(structured_shape=(3, 5)),
            r"structured_shape \(3, 5\) expects \(B, 15, C\) or \(B, 3, 5, C\), got .*\(2, 12, 3\)",
        ),
        (np.ones((2, 5, 3, 3)), dict(structured_shape=(3, 5)), r"got shape \(2, 5, 3, 3\)"),
        (np.ones((2, 3, 5, 3)), dict(structured_shape=(3, 5, 2)), r"got shape \(2, 3, 5, 3\)"),
        (np.ones((2, 6, 3)), dict(structured_shape=(-3, -2)), r"2 or 3 positive .* \(-3, -2\)"),
        (np.ones((2, 6, 3)), dict(structured_shape=()), r"2 or 3 positive integers; got \(\)"),
        (np.ones((2, 6, 3)), dict(structured_shape=6), "2 or 3 positive integers; got 6"),
        (np.ones((2, 6, 3)), dict(structured_shape=(2.5, 3)), "2 or 3 positive integers; got"),
        (np.ones((2, 6, 3)), dict(length=5), "length: expected at least the 6 points .* got 5"),
        (np.ones((2, 6, 3)), dict(length=8.0), "length: expected at least the 6 .* got 8.0"),
        (
            np.ones((2, 6, 3)),
            dict(length=8, structured_shape=(2, 3)),
            "length: expected .* of a cloud; got 8",
        ),
        ("points", {}, "expected numbers, got type <U6"),
        (["points"], {}, "sample 0: expected numbers, got type <U6"),
        (np.ones((2, 4, 3), object), {}, "expected numbers, got type object"),
        ((np.ones((4, 3)) for _ in range(2)), {}, "expected numbers, got type object"),
        ([[[1.0, 2.0], [3.0]]], {}, "sample 0: expected an array, got"),
    ],
)
@pytest.mark.parametrize("mesh", [None, dict(points=8)], ids=["single", "points8"])
@pytest.mark.usefixtures("unchecked_calls")
def test_bad_points_are_named(x, options, message, mesh):
    with on_mesh(mesh), pytest.raises(ValueError, match=message) as error:
        parallel.shard_points(x, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("x", [np.ones((3, 8, 1)), [np.ones((8, 1))] * 3], ids=["array", "list"])
def test_batch_that_does_not_divide_is_named(x):
    with (
        on_mesh(dict(data=2, points=4)),
        pytest.raises(ValueError, match=r"batch of 3 samples .* 'data' of 2; use a multiple of 2"),
    ):
        parallel.shard_points(x)


@pytest.mark.parametrize(
    ("y", "options", "message"),
    [
        (np.ones((8, 3)), dict(num_points=4), r"expected \(B, N, C\), got shape \(8, 3\)"),
        (np.ones((2, 8, 3)), {}, "expected num_points=, the real number of points; got None"),
        (np.ones((2, 8, 3)), dict(num_points=9), "asked for 9 points, the array has 8"),
        (np.ones((2, 8, 3)), dict(num_points=0), "expected positive integers, got 0"),
        (np.ones((2, 8, 3)), dict(num_points=-1), "expected positive integers, got -1"),
        (np.ones((2, 8, 3)), dict(num_points=5.0), "expected positive integers, got 5.0"),
        (np.ones((2, 8, 3)), dict(num_points=True), "expected positive integers, got True"),
        (np.ones((2, 8, 3)), dict(num_points="5"), "expected positive integers, got '5'"),
        (np.ones((2, 8, 3)), dict(num_points=[5, 6.5]), r"positive integers, got \[5, 6.5\]"),
        (np.ones((2, 8, 3)), dict(structured_shape=8), "expected 2 or 3 positive .*; got 8"),
        (np.ones((2, 8, 3)), dict(num_points=[8, 9]), "asked for 9 points, the array has 8"),
        (np.ones((2, 8, 3)), dict(num_points=[8]), "one num_points for each of 2 samples, got 1"),
        (np.ones((2, 8, 3)), dict(structured_shape=(3, 3)), "asked for 9 points, .* has 8"),
        (np.ones((2, 2, 3, 1)), dict(structured_shape=(3, 3)), "asked for 3 points, .* has 2"),
    ],
)
@pytest.mark.usefixtures("unchecked_calls")
def test_bad_request_is_named(y, options, message):
    with pytest.raises(ValueError, match=message) as error:
        parallel.unshard_points(y, **options)
    assert "\n" not in str(error.value)


def test_number_of_points_may_be_an_array():
    y = cloud(2, 8, 3)
    for count in (np.array(5), jnp.array(5), np.int64(5)):
        np.testing.assert_array_equal(parallel.unshard_points(y, num_points=count), y[:, :5])
    for counts in (np.array([5, 6]), jnp.array([5, 6]), (5, np.int32(6))):
        first, second = parallel.unshard_points(y, num_points=counts)
        np.testing.assert_array_equal(first, y[0, :5])
        np.testing.assert_array_equal(second, y[1, :6])
