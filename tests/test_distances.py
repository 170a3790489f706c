"""Stores without distances get them once, when a run asks for them."""

import numpy as np
import pytest

pyvista = pytest.importorskip("pyvista")
pytest.importorskip("zarr")

from experiments.configuration.schema import StoreConfig, StreamConfig  # noqa: E402
from experiments.data.batch import Windows  # noqa: E402
from experiments.datasets import load_dataset  # noqa: E402
from experiments.meshes import distances  # noqa: E402
from experiments.meshes.store import create_store, write_sample  # noqa: E402

STREAM = StreamConfig(
    embedding=["volume_mesh_centers"],
    fx=["volume_signed_distance", "volume_direction"],
    targets=["volume_fields"],
)


@pytest.fixture
def config(tmp_path) -> StoreConfig:
    """Three spheres of different radius, in the layout that users of PhysicsNeMo have."""
    store = tmp_path / "store"
    create_store(store)
    draw = np.random.default_rng(0)
    for i, radius in enumerate((0.5, 0.7, 0.9)):
        sphere = pyvista.Sphere(radius=radius, theta_resolution=60, phi_resolution=60)
        points = draw.uniform(-2, 2, (200, 3)).astype(np.float32)
        arrays = {
            "volume_mesh_centers": points,
            "volume_fields": points,
            "stl_coordinates": np.asarray(sphere.points, np.float32),
            "stl_faces": sphere.regular_faces.reshape(-1),
        }
        write_sample(store, f"run_{i}", arrays, {"radius": radius})
    return StoreConfig(path=str(store), streams={"volume": STREAM})


def test_distances_are_those_of_the_surface(config):
    dataset = load_dataset(config)
    seen = []
    for split in dataset.splits.values():
        for index, name in enumerate(split.names):
            cloud = split.read(index, Windows((slice(50, 150),))).clouds[0]
            radius = (0.5, 0.7, 0.9)[int(name[-1])]
            length = np.linalg.norm(cloud.embedding, axis=1)
            # A sphere of triangles lies a little inside the round one.
            np.testing.assert_allclose(cloud.fx[:, 0], length - radius, atol=5e-3)
            seen.append(name)
    assert sorted(seen) == ["run_0", "run_1", "run_2"]


def test_distances_are_measured_once(config, monkeypatch, tmp_path):
    load_dataset(config)
    assert sorted(path.name for path in (tmp_path / "store.distances").glob("run_*")) == [
        "run_0",
        "run_1",
        "run_2",
    ]

    def never(*arguments):
        raise AssertionError("measured again")

    monkeypatch.setattr(distances, "signed_distance", never)
    load_dataset(config)


def test_without_an_stl_the_missing_array_is_named(config, tmp_path):
    arrays = {"volume_mesh_centers": np.ones((5, 3)), "volume_fields": np.ones((5, 3))}
    for i in range(3):
        write_sample(tmp_path / "store", f"run_{i}", arrays, {})
    with pytest.raises(ValueError, match=r"'volume_signed_distance' \(of an STL file .*\); has"):
        load_dataset(config)


def test_a_folder_that_cannot_be_written_is_named(config, tmp_path):
    (tmp_path / "store.distances").write_text("a file")
    with pytest.raises(ValueError, match=r"store\.distances: expected [^\n]*$"):
        load_dataset(config)


def test_small_clouds_are_read_once_and_large_ones_each_time(config, monkeypatch):
    from experiments.meshes import dataset
    from experiments.meshes.sample_arrays import StoredSample

    reads, read = [], StoredSample.read

    def counted(self, name, rows=slice(None)):
        reads.append(name)
        return read(self, name, rows)

    monkeypatch.setattr(StoredSample, "read", counted)
    for most, again in ((dataset._READ_ONCE, False), (100, True)):
        monkeypatch.setattr(dataset, "_READ_ONCE", most)
        split = load_dataset(config).splits["train"]
        reads.clear()
        first = split.read(0, Windows((slice(0, 50),)))
        count = len(reads)
        assert count > 0
        second = split.read(0, Windows((slice(0, 50),)), (1, 2))
        np.testing.assert_array_equal(first.clouds[0].fx, second.clouds[0].fx)
        assert (len(reads) > count) == again
        other = split.read(0, Windows((slice(50, 80),)))
        assert len(other.clouds[0].fx) == 30
