"""The device mesh has the sizes and the order that were asked for, and bad sizes are named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, on_mesh, on_meshes
from jax.sharding import AxisType, PartitionSpec

import parallel
from parallel import mesh as mesh_lib


@on_meshes
def test_sizes_are_those_asked_for(mesh):
    made = parallel.make_mesh(**mesh)
    assert made.axis_names == ("data", "points", "heads")
    assert dict(made.shape) == dict(data=1, points=1, heads=1) | mesh
    assert set(made.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (dict(points=-1), (1, 8, 1)),
        (dict(data=2, points=-1), (2, 4, 1)),
        (dict(data=-1, points=2, heads=2), (2, 2, 2)),
        (dict(points=4, heads=-1), (1, 4, 2)),
        (dict(data=8, points=-1), (8, 1, 1)),
        (dict(data=np.int64(2), points=np.int32(-1)), (2, 4, 1)),
    ],
)
def test_minus_one_takes_all_devices_left(axes, expected):
    assert parallel.make_mesh(**axes).devices.shape == expected


def test_default_is_one_device():
    mesh = parallel.make_mesh()
    assert mesh.devices.tolist() == [[[jax.devices()[0]]]]


def test_heads_are_next_to_each_other_then_points():
    devices = parallel.make_mesh(data=2, points=2, heads=2).devices
    assert devices.flatten().tolist() == jax.devices()


def test_first_devices_are_taken_where_more_exist():
    assert parallel.make_mesh(points=3).devices.flatten().tolist() == jax.devices()[:3]


def test_mesh_is_made_of_the_devices_handed_in():
    chosen = [jax.devices()[i] for i in (6, 3, 5, 0)]
    assert parallel.make_mesh(points=-1, heads=2, devices=chosen).devices.shape == (1, 2, 2)
    assert parallel.make_mesh(points=4, devices=chosen).devices.flatten().tolist() == chosen
    assert parallel.make_mesh(points=2, devices=chosen).devices.flatten().tolist() == chosen[:2]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (dict(points=16), "mesh data=1 x points=16 x heads=1 needs 16 devices, .* only 8"),
        (dict(data=3, points=4), "needs 12 devices"),
        (dict(data=3, points=-1), "'points' = -1: 8 devices do not divide .* data=3 x points=-1"),
        (dict(data=16, points=-1), "'points' = -1: 8 devices do not divide"),
        (dict(data=-1, points=-1), "only one axis may be -1, got data, points"),
        (dict(points=0), "'points': expected a positive integer or -1 .* got 0"),
        (dict(heads=-2), "'heads': expected a positive integer or -1 .* got -2"),
        (dict(data=True), "'data': expected a positive integer or -1 .* got True"),
        (dict(points=2.0), "'points': expected a positive integer or -1 .* got 2.0"),
        (dict(points="2"), "'points': expected a positive integer or -1 .* got '2'"),
        (dict(points=None), "'points': expected a positive integer or -1 .* got None"),
        (dict(points=-1, devices=[]), "expected at least one device, got an empty list"),
        (dict(points=2, devices=[]), "expected at least one device, got an empty list"),
    ],
)
@pytest.mark.usefixtures("unchecked_calls")
def test_bad_size_is_named(axes, message):
    with pytest.raises(ValueError, match=message) as error:
        parallel.make_mesh(**axes)
    assert "\n" not in str(error.value)


def test_without_a_mesh_every_axis_has_size_one():
    assert [mesh_lib.axis_size(axis) for axis in mesh_lib.AXES] == [1, 1, 1]
    assert mesh_lib.sharding("data", "points") is None
    array = np.ones((2, 8))
    assert mesh_lib.constrain(array, "data", "points") is array


def test_sizes_are_read_from_the_context():
    with on_mesh(dict(data=2, points=4)):
        assert [mesh_lib.axis_size(axis) for axis in mesh_lib.AXES] == [2, 4, 1]
        # Also where a program is traced.
        assert jax.jit(lambda: mesh_lib.axis_size("points"))() == 4
    assert mesh_lib.axis_size("points") == 1


def test_axis_that_the_mesh_lacks_has_size_one_and_is_dropped():
    mesh = jax.make_mesh((8,), ("points",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert mesh_lib.axis_size("data") == 1
        assert mesh_lib.axis_size("points") == 8
        assert mesh_lib.spec("data", "points", None) == PartitionSpec(None, "points", None)
        assert mesh_lib.sharding("heads", "points").spec == PartitionSpec(None, "points")
        array = jax.jit(lambda x: mesh_lib.constrain(x, "data", "points"))(np.ones((3, 8)))
        assert array.addressable_shards[0].data.shape == (3, 1)


def test_explicit_axis_is_named():
    mesh = jax.make_mesh((8,), ("points",), axis_types=(AxisType.Explicit,))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match="'points': expected type Auto, got Explicit"),
    ):
        mesh_lib.axis_size("points")


def test_island_runs_on_each_shard_or_on_the_whole():
    def local_sum(x, *, axis):
        total = x.sum(1)
        return total if axis is None else jax.lax.psum(total, axis)

    def call(x):
        return mesh_lib.island(local_sum, (PartitionSpec(None, "points"),), PartitionSpec())(x)

    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    for axes in [None, dict(data=8), *MESHES.values()]:
        with on_mesh(axes):
            np.testing.assert_array_equal(jax.jit(call)(x), x.sum(1))


def test_array_of_one_device_is_copied_to_all_and_others_stay():
    array = jax.device_put(np.ones(4), jax.devices()[3])
    assert mesh_lib.replicate_unsharded(array) is array
    with on_mesh(dict(points=8)):
        copied = mesh_lib.replicate_unsharded(array)
        assert copied.sharding.is_fully_replicated
        assert len(copied.addressable_shards) == 8
        assert mesh_lib.replicate_unsharded(copied) is copied
        # Also where a program is traced that closes over it.
        total = jax.jit(lambda x: (x * mesh_lib.replicate_unsharded(array)).sum())
        assert total(np.ones(4)) == 4
        assert jax.grad(lambda x: x * jnp.sum(mesh_lib.replicate_unsharded(array)))(1.0) == 4
        numpy_array = np.ones(4)
        assert mesh_lib.replicate_unsharded(numpy_array) is numpy_array
        assert mesh_lib.replicate_unsharded(None) is None
