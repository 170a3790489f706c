"""Stores of samples: whole or not there, read in parts, foreign ones read as they are."""

import errno
import json

import numpy as np
import pytest

zarr = pytest.importorskip("zarr")

from experiments.meshes import store as stores  # noqa: E402
from experiments.meshes.sample_arrays import StoredSample  # noqa: E402
from experiments.meshes.store import Store, create_store, write_sample  # noqa: E402


@pytest.fixture
def arrays():
    draw = np.random.default_rng(0).standard_normal
    return {
        "volume_mesh_centers": draw((30_000, 3)).astype(np.float32),
        "volume_fields": draw((30_000, 5)).astype(np.float32),
        "stl_faces": np.arange(30),
    }


@pytest.fixture
def path(tmp_path, arrays):
    path = tmp_path / "store"
    create_store(path)
    write_sample(path, "run_1", arrays, {"air_density": 1.2})
    return path


def test_sample_comes_back_as_written(path, arrays):
    sample = Store(path).sample("run_1")
    assert sample.names == tuple(sorted(arrays))
    for name, values in arrays.items():
        assert sample.shape(name) == values.shape
        np.testing.assert_array_equal(sample.read(name), values)
    assert sample.number("air_density") == 1.2


def test_rows_are_read_by_slice_and_by_number(path, arrays):
    sample = Store(path).sample("run_1")
    values = arrays["volume_fields"]
    rows = slice(9_000, 9_100)
    np.testing.assert_array_equal(sample.read("volume_fields", rows), values[rows])
    rows = np.random.default_rng(1).permutation(len(values))[:500]
    np.testing.assert_array_equal(sample.read_rows("volume_fields", rows), values[rows])


def test_a_sample_is_replaced_whole(path, arrays):
    write_sample(path, "run_1", {"stl_faces": np.arange(3)}, {})
    assert Store(path).sample("run_1").names == ("stl_faces",)
    assert Store(path).names == ("run_1",)
    assert sorted(child.name for child in path.iterdir()) == ["run_1", "zarr.json"]


@pytest.mark.parametrize("when", ["first", "again"])
def test_a_full_disk_leaves_the_store_as_it_was(when, path, arrays, monkeypatch):
    def full(group, name, values):
        raise OSError(errno.ENOSPC, "No space left on device")

    name = "run_1" if when == "again" else "run_2"
    monkeypatch.setattr(stores, "_write_array", full)
    with pytest.raises(OSError, match="No space left"):
        write_sample(path, name, arrays, {})
    assert Store(path).names == ("run_1",)
    assert len(StoredSample(path / "run_1").names) == 3
    assert not [child for child in path.iterdir() if child.name.startswith(".")]


def test_what_an_interrupted_writer_left_is_not_read_and_goes(path, arrays):
    left = path / f".partial-run_2-{'0' * 32}"
    (path / "run_1").rename(left)
    with pytest.raises(ValueError, match="expected a store with one group a sample; got none"):
        Store(path)
    write_sample(path, "run_2", arrays, {})
    assert Store(path).names == ("run_2",)
    assert not left.exists()


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_folder_of_foreign_groups_is_a_store(zarr_format, tmp_path):
    for name in ("a", "b"):
        group = zarr.open_group(tmp_path / f"{name}.zarr", mode="w", zarr_format=zarr_format)
        group.create_array("surface_fields", data=np.ones((7, 4), np.float32))
        group.create_array("stream_velocity", data=np.array([38.9]))
        group.attrs["air_density"] = 1.2
    store = Store(tmp_path)
    assert store.names == ("a", "b")
    for sample in store:
        assert sample.shape("surface_fields") == (7, 4)
        assert (sample.number("stream_velocity"), sample.number("air_density")) == (38.9, 1.2)


# Bad stores --------------------------------------------------------------------------------------


def test_missing_store_sample_array_and_number_are_named(path, tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a store; there is no such folder"):
        Store(tmp_path / "none")
    with pytest.raises(ValueError, match="expected a sample 'run_9'; has 1, from run_1 to run_1"):
        Store(path).sample("run_9")
    sample = Store(path).sample("run_1")
    with pytest.raises(ValueError, match="expected an array 'p'; has stl_faces, volume_fields"):
        sample.read("p")
    with pytest.raises(ValueError, match="expected 'speed' as an array or an attribute; has"):
        sample.number("speed")
    with pytest.raises(ValueError, match="'stl_faces': expected one finite number; got"):
        sample.number("stl_faces")


def test_empty_unfinished_and_damaged_groups_are_named(path):
    zarr.open_group(path / "empty", mode="w")
    with pytest.raises(ValueError, match="empty: expected a group with arrays; got an empty one"):
        Store(path).sample("empty")
    group = zarr.open_group(path / "half", mode="w")
    group.attrs["complete"] = False
    with pytest.raises(ValueError, match="half: expected a whole sample; got one still being"):
        Store(path).sample("half")
    (path / "run_1" / "zarr.json").write_text("{")
    with pytest.raises(ValueError, match="run_1: expected a Zarr group; got") as error:
        Store(path).sample("run_1")
    assert "\n" not in str(error.value)


def test_damaged_values_are_named(path):
    chunks = [file for file in (path / "run_1" / "volume_fields").rglob("*") if file.is_file()]
    damaged = max(chunks, key=lambda file: file.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    with pytest.raises(ValueError, match="array 'volume_fields': expected readable values; got"):
        Store(path).sample("run_1").read("volume_fields")


def test_something_else_is_no_store(tmp_path):
    (tmp_path / "letter.txt").write_text("Dear")
    with pytest.raises(ValueError, match="expected a store or an empty folder; got something else"):
        create_store(tmp_path)
    with pytest.raises(ValueError, match="expected a store or an empty folder; got something else"):
        create_store(tmp_path / "letter.txt")
    assert json.dumps(sorted(child.name for child in tmp_path.iterdir())) == '["letter.txt"]'
