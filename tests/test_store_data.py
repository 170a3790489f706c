"""What is read of a store: the arrays that are named, in the frame, in windows, on any mesh."""

import dataclasses

import numpy as np
import pytest
from conftest import on_mesh

zarr = pytest.importorskip("zarr")

from stores import (  # noqa: E402
    SURFACE,
    VOLUME,
    config_of,
    contents,
    make_store,
    name_of,
    numbers,
    split_of,
)

from experiments.configuration.schema import (  # noqa: E402
    FrameConfig,
    FreeStreamConfig,
    StreamConfig,
)
from experiments.data.batch import Windows  # noqa: E402
from experiments.data.batches import Loader, whole_batches  # noqa: E402
from experiments.data.description import Description  # noqa: E402
from experiments.datasets import load_dataset  # noqa: E402
from experiments.meshes.neighbor_cache import NeighborCache  # noqa: E402
from experiments.meshes.rows import Rows  # noqa: E402
from experiments.meshes.sample_arrays import HeldSample  # noqa: E402
from experiments.meshes.store import Store, create_store, write_sample  # noqa: E402
from experiments.meshes.wiring import Wired  # noqa: E402

EVERY = slice(None)
BOTH = {"surface": SURFACE, "volume": VOLUME}
MESHES = {
    "single": None,
    "points8": dict(points=8),
    "data2_points4": dict(data=2, points=4),
    "data4_points2": dict(data=4, points=2),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("stores") / "store")


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("stores") / "shuffled", shuffled=True)


def wired(arrays=None, attributes=None, **changes) -> Wired:
    """A sample in memory as a configuration reads it."""
    held = HeldSample("held", arrays or contents(0), numbers(0) | (attributes or {}))
    return Wired(held, config_of("held", **changes))


def values(sample: Wired, *entries: str) -> np.ndarray:
    return sample.values(entries, Rows.all(sample.length(entries)))


# Entries -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "columns", "names"),
    [
        ("volume_fields", EVERY, ("U_x", "U_y", "U_z", "p", "nut")),
        ("volume_fields.p", [3], ("p",)),
        ("volume_fields.4", [4], ("nut",)),
        ("volume_fields.U", [0, 1, 2], ("U_x", "U_y", "U_z")),
        ("volume_fields.U_y", [1], ("U_y",)),
    ],
)
def test_entry_names_an_array_or_a_column_by_name_number_or_vector(entry, columns, names):
    sample = wired()
    assert sample.columns([entry]) == names
    np.testing.assert_array_equal(values(sample, entry), contents(0)["volume_fields"][:, columns])


def test_columns_without_names_are_called_after_their_array():
    sample = wired(contents(0) | {"volume_scalars": np.ones((70, 2), np.float32)})
    assert sample.columns(["surface_normals"]) == tuple(f"surface_normals_{a}" for a in "xyz")
    assert sample.columns(["volume_scalars"]) == ("volume_scalars_0", "volume_scalars_1")
    assert sample.columns(["volume_signed_distance"]) == ("volume_signed_distance",)


def test_a_name_goes_before_a_number():
    sample = wired(attributes={"surface_field_names": ["1", "0", "a", "b"]})
    assert sample.columns(["surface_fields.0", "surface_fields.1"]) == ("0", "1")
    assert sample.columns(["surface_fields.2"]) == ("a",)


def test_entries_stand_side_by_side_in_their_order():
    sample, arrays = wired(), contents(0)
    found = values(sample, "surface_normals", "surface_areas", "surface_fields.p")
    expected = [arrays["surface_normals"], arrays["surface_areas"][:, None]]
    expected.append(arrays["surface_fields"][:, :1])
    np.testing.assert_array_equal(found, np.concatenate(expected, axis=1))
    assert found.dtype == np.float32


def test_a_window_of_nothing_is_empty():
    # As on the last devices, where a sample is shorter than the longest of its split.
    entries = ["volume_mesh_centers", "volume_fields.p"]
    assert wired().values(entries, Rows.all(70), slice(80, 90)).shape == (0, 4)


def test_numbers_of_the_sample_are_one_token():
    sample = wired(attributes={"wheel": [1.0, 2.0]})
    token = sample.numbers(["stream_velocity", "wheel"])
    assert token.dtype == np.float32
    np.testing.assert_array_equal(token, [[20, 1, 2]])


# Frames and coefficients -------------------------------------------------------------------------


@pytest.mark.parametrize("length", ["chord", "2.0"])
@pytest.mark.parametrize("stl", [True, False], ids=["stl", "surface"])
def test_frame_moves_and_scales_coordinates_and_distances(stl, length):
    arrays = contents(0)
    surface = ("stl_centers", "stl_areas")
    if not stl:
        arrays = {name: array for name, array in arrays.items() if name not in surface}
        surface = ("surface_mesh_centers", "surface_areas")
    sample = wired(arrays, frame=FrameConfig(centroid=True, length=length))
    centers, areas = (contents(0)[name].astype(np.float64) for name in surface)
    origin = np.average(centers, axis=0, weights=areas)
    for name in ("surface_mesh_centers", "volume_mesh_centers"):
        expected = (arrays[name] - origin) / 2.0
        # Coordinates are up to 35: one rounding to float32.
        np.testing.assert_allclose(values(sample, name), expected, rtol=0, atol=2e-6)
    distance = arrays["volume_signed_distance"][:, None]
    np.testing.assert_array_equal(values(sample, "volume_signed_distance"), distance / 2)
    np.testing.assert_array_equal(values(sample, "surface_normals"), arrays["surface_normals"])


def test_without_a_centroid_coordinates_are_only_scaled():
    sample = wired(frame=FrameConfig(length="4.0"))
    expected = contents(0)["surface_mesh_centers"] / 4
    np.testing.assert_array_equal(values(sample, "surface_mesh_centers"), expected)


FLOW = FreeStreamConfig("air_density", "stream_velocity", "100000.0")
KINDS = {"U": "velocity", "p": "pressure"}
DYNAMIC = 0.5 * 1.25 * 20**2


def test_columns_with_a_kind_are_coefficients_and_come_back():
    arrays = contents(0)
    fields = arrays["volume_fields"].astype(np.float64) / 10
    absolute = 1e5 + fields
    sample = wired(arrays | {"volume_fields": absolute}, free_stream=FLOW, coefficients=KINDS)
    found = values(sample, "volume_fields")
    expected = fields.copy()
    expected[:, :3] = absolute[:, :3] / 20
    expected[:, 3] /= DYNAMIC
    expected[:, 4] += 1e5
    # The pressures are coefficients before they are float32, of which 1e5 would cost three digits.
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    back = sample.physical(found, sample.columns(["volume_fields"]))
    np.testing.assert_allclose(back, absolute, rtol=2e-7)


def test_a_kind_is_of_its_column_or_vector_alone():
    names = ["p", "p_total", "tau_x", "tau_magnitude"]
    sample = wired(
        attributes={"surface_field_names": names}, coefficients={"p": "pressure", "tau": "stress"}
    )
    assert [sample.kind(name) for name in names] == ["pressure", None, "stress", None]


# Splits ------------------------------------------------------------------------------------------


def names_of(config) -> dict[str, tuple[str, ...]]:
    return {name: split.names for name, split in load_dataset(config).splits.items()}


def test_splits_are_disjoint_exhaustive_and_of_the_seed(path):
    names = names_of(config_of(path, validation=2, test=1))
    assert {name: len(split) for name, split in names.items()} == {
        "train": 3,
        "validation": 2,
        "test": 1,
    }
    assert sorted(sum(names.values(), ())) == [name_of(i) for i in range(6)]
    assert names == names_of(config_of(path, validation=2, test=1))
    others = [names_of(config_of(path, validation=2, seed=seed)) for seed in range(1, 6)]
    assert any(other != names for other in others)


def test_fewer_training_samples_leave_the_other_splits_as_they_are(path):
    whole, part = names_of(config_of(path)), names_of(config_of(path, train=2))
    assert set(part.pop("train")) < set(whole.pop("train"))
    assert part == whole


def test_splits_come_from_stores_of_their_own(path, tmp_path):
    other = make_store(tmp_path / "other", samples=2)
    names = names_of(config_of(path, test_path=str(other)))
    assert names["test"] == (name_of(0), name_of(1))
    assert (len(names["train"]), len(names["validation"])) == (5, 1)
    names = names_of(config_of(path, test_path=str(other), validation_path=str(other)))
    assert names["validation"] == names["test"]
    assert len(names["train"]) == 6


def test_description_comes_back_from_its_file(path, tmp_path):
    config = config_of(path, streams=BOTH, geometry=["stl_centers"], global_embedding=["chord"])
    description = load_dataset(config).description
    assert description.fields == (
        *(f"surface/{name}" for name in ("p", "tau_x", "tau_y", "tau_z")),
        *(f"volume/{name}" for name in ("U_x", "U_y", "U_z", "p")),
    )
    description.save(tmp_path)
    assert Description.load(tmp_path) == description
    assert description.difference(description) is None


def test_samples_on_cells_and_on_points_are_alike(tmp_path):
    other = tmp_path / "other"
    create_store(other)
    for i, on_cells in enumerate((True, False, True)):
        attributes = numbers(i) | {"surface_on_cells": on_cells}
        write_sample(other, name_of(i), contents(i), attributes)
    assert len(load_dataset(config_of(other)).splits) == 3


def test_a_stream_without_a_name_for_its_fields_numbers_them(path):
    stream = StreamConfig(embedding=["surface_mesh_centers"], targets=["surface_normals"])
    description = load_dataset(config_of(path, streams={"surface": stream})).description
    assert description.fields == tuple(f"surface_normals_{axis}" for axis in "xyz")


# Draws -------------------------------------------------------------------------------------------


def rows_of(split, index=0, seeds=(0, 0), window=EVERY) -> np.ndarray:
    """Numbers of the rows that a window of the first stream of a draw holds."""
    windows = Windows((window, *[EVERY] * (len(split.lengths) - 1)))
    return split.read(index, windows, seeds).clouds[0].embedding[:, 0].astype(int)


@pytest.fixture(params=["plain", "shuffled"])
def drawn(request, path, shuffled):
    """The first 20 of 30, 33, ... rows."""
    return split_of({"plain": path, "shuffled": shuffled}[request.param], resolution=20)


def test_a_draw_is_reproducible_and_has_no_row_twice(drawn):
    for seeds in ((0, 0), (3, 7)):
        rows = rows_of(drawn, seeds=seeds)
        assert len(rows) == len(set(rows)) == 20
        np.testing.assert_array_equal(rows, rows_of(drawn, seeds=seeds))


def test_draws_differ_between_runs_steps_and_samples(drawn):
    draws = [tuple(rows_of(drawn, seeds=seeds)) for seeds in ((0, 0), (0, 1), (0, 2), (1, 0))]
    assert len(set(draws)) == 4
    # All samples have rows 0 to 29.
    first = [rows_of(drawn, index)[0] for index in range(6)]
    assert len(set(first)) > 2


def test_every_row_is_drawn_about_as_often(drawn):
    counts = np.zeros(30)
    for step in range(300):
        counts[rows_of(drawn, seeds=(0, step))] += 1
    # 300 draws of 20 of 30 rows: 200 each, with a deviation of 8.2; 5 of them.
    assert np.abs(counts - 200).max() < 41


def test_a_draw_of_a_shuffled_store_wraps_around(shuffled):
    split = split_of(shuffled, resolution=20)
    draws = [rows_of(split, seeds=(0, step)) for step in range(20)]
    assert any(np.diff(rows).min() < 0 for rows in draws)
    assert all(set(np.diff(rows) % 30) == {1} for rows in draws)


@pytest.mark.parametrize("width", [1, 3, 7, 20, 50])
def test_windows_of_a_draw_put_together_are_the_draw(width, drawn):
    for seeds in ((0, 0), (0, 1), (0, 5)):
        # Past the end there is padding, and nothing to read.
        windows = [slice(start, start + width) for start in range(0, 40, width)]
        parts = [rows_of(drawn, seeds=seeds, window=window) for window in windows]
        np.testing.assert_array_equal(np.concatenate(parts), rows_of(drawn, seeds=seeds))


def test_whole_clouds_keep_their_order_and_length(path):
    split = split_of(path)
    assert split.lengths == (45,)
    assert not split.is_drawn
    for index in range(6):
        assert split.num_points(index) == (30 + 3 * index,)
        np.testing.assert_array_equal(rows_of(split, index), np.arange(30 + 3 * index))


def test_clouds_shorter_than_the_resolution_are_whole(path):
    split = split_of(path, resolution=35)
    assert [split.num_points(index)[0] for index in range(6)] == [30, 33, 35, 35, 35, 35]
    assert split.lengths == (35,)
    np.testing.assert_array_equal(rows_of(split, 1), np.arange(33))
    assert len(rows_of(split, 2)) == 35


def test_all_arrays_of_a_stream_keep_their_rows_together(drawn):
    split = split_of(drawn.stored(0).path.parent, 20, streams={"volume": VOLUME})
    for seeds in ((0, 0), (0, 1)):
        (cloud,) = split.read(0, Windows((slice(5, 15),)), seeds).clouds
        row = cloud.embedding[:, 0]
        assert len(row) == 10
        np.testing.assert_array_equal(cloud.fx[:, 0], row)
        np.testing.assert_array_equal(cloud.positions, cloud.embedding)
        np.testing.assert_array_equal(cloud.target[:, 3], row + 3 / 8)


def test_vertices_of_a_shuffled_stl_are_drawn_one_by_one(tmp_path):
    # Its triangles were shuffled; a run of its vertices would be a patch of the body.
    create_store(tmp_path / "store")
    arrays = contents(0) | {"stl_coordinates": np.arange(3000).reshape(1000, 3) / 3}
    write_sample(tmp_path / "store", "a", arrays, numbers(0) | {"shuffled": ["surface", "stl"]})
    split = split_of(
        tmp_path / "store", geometry=["stl_coordinates"], geometry_resolution=10, validation=1
    )
    drawn = split.whole(0).geometry[:, 0]
    assert len(drawn) == split.geometry_length == 10
    assert np.diff(np.sort(drawn)).max() > 20


class CountBytes:
    """Counts what is fetched of chunks."""

    def __init__(self, patch):
        self.total, get = 0, zarr.storage.LocalStore.get

        async def counted(store, *arguments, **options):
            got = await get(store, *arguments, **options)
            self.total += 0 if got is None else len(got)
            return got

        patch.setattr(zarr.storage.LocalStore, "get", counted)


def test_a_window_of_a_shuffled_draw_reads_its_own_chunks_alone(tmp_path, monkeypatch):
    rows, chunk = 30 * 2**13, 2**13
    draw = np.random.default_rng(0)
    arrays = {
        "volume_mesh_centers": draw.random((rows, 3), np.float32),
        "volume_fields": draw.random((rows, 4), np.float32),
        "volume_signed_distance": draw.random(rows, np.float32),
    }
    create_store(tmp_path / "store")
    attributes = {"volume_field_names": [*"abcd"], "shuffled": ["volume"]}
    write_sample(tmp_path / "store", "a", arrays, attributes)
    stream = dataclasses.replace(VOLUME, targets=["volume_fields"])
    split = split_of(tmp_path / "store", 8 * chunk, streams={"volume": stream})
    counted = CountBytes(monkeypatch)
    for step in range(3):
        counted.total = 0
        (cloud,) = split.read(0, Windows((slice(2 * chunk, 4 * chunk),)), (0, step)).clouds
        assert len(cloud.embedding) == 2 * chunk
        # Two chunks' worth of rows lie in at most three, or four where the run wraps; eight
        # columns of four bytes each. The index of a file has 16 bytes a chunk.
        assert counted.total < 4 * chunk * 8 * 4 + 3 * 600
        assert counted.total < 0.14 * sum(array.nbytes for array in arrays.values())


def test_an_array_that_several_entries_name_is_read_once(path, monkeypatch):
    split = split_of(path, streams={"volume": VOLUME})
    read = []
    monkeypatch.setattr(
        type(split.stored(0)),
        "read",
        lambda sample, name, rows: read.append(name) or contents(0)[name],
    )
    split.whole(0)
    # Coordinates are embedding and positions, fields are two entries.
    assert sorted(read) == ["volume_fields", "volume_mesh_centers", "volume_signed_distance"]


# Batches on meshes -------------------------------------------------------------------------------


def unpadded(batch) -> list[np.ndarray]:
    """All that a batch holds of real points, sample by sample."""
    held, size = [], len(batch.streams[0].embedding)

    def keep(mask, *arrays):
        mask = np.asarray(mask)
        for array in arrays:
            if array is not None:
                host = np.asarray(array)
                held.extend(host[row][mask[row]] for row in range(size))
                # What pads is nothing, or an empty slot.
                assert np.isin(host[~mask], (0, -1, np.inf)).all()

    for stream in batch.streams:
        keep(stream.mask, stream.embedding, stream.target, stream.fx, stream.positions)
        if stream.neighborhoods is not None:
            keep(stream.mask, *stream.neighborhoods.of_points)
            keep(batch.geometry_mask, *stream.neighborhoods.of_geometry)
    if batch.geometry is not None:
        keep(batch.geometry_mask, batch.geometry)
    if batch.global_embedding is not None:
        held.append(np.asarray(batch.global_embedding))
    return held


def batches_on(axes, split) -> list[np.ndarray]:
    with on_mesh(axes):
        loader = Loader(split, 4, 1, 0, 0, None)
        batches = [next(loader)[0] for _ in range(2)]
        batches += [batch for batch, _ in whole_batches(split, 4, None)]
        for batch in batches:
            if axes is not None:
                assert batch.streams[0].embedding.sharding.spec[:2] == ("data", "points")
        return [array for batch in batches for array in unpadded(batch)]


CASES = {
    "whole": dict(),
    "drawn": dict(resolution=21),
    "streams": dict(
        streams=BOTH,
        resolution=40,
        geometry=["stl_centers", "stl_areas"],
        geometry_resolution=18,
        global_embedding=["chord"],
    ),
    "neighbors": dict(streams=BOTH, geometry=["stl_centers"]),
}


@pytest.mark.parametrize("case", CASES)
def test_batches_are_the_same_on_every_mesh(case, shuffled):
    split = split_of(shuffled, **CASES[case])
    if case == "neighbors":
        split.neighbors = NeighborCache(split, 3.0, 4)
    expected = batches_on(None, split)
    assert len(expected) > 0
    for axes in MESHES.values():
        found = batches_on(axes, split)
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)


# Statistics --------------------------------------------------------------------------------------


@pytest.mark.parametrize("resolution", [None, 10])
def test_statistics_are_those_of_all_points_whatever_is_drawn(resolution, path):
    config = config_of(
        path,
        streams=BOTH,
        geometry=["stl_centers"],
        global_embedding=["chord"],
        resolution=resolution,
        geometry_resolution=resolution,
    )
    dataset = load_dataset(config)
    statistics = dataset.statistics()
    samples = [Store(path).sample(name) for name in dataset.splits["train"].names]

    def assert_of(scale, name, columns=EVERY):
        rows = np.concatenate([sample.read(name) for sample in samples]).astype(np.float64)
        rows = rows.reshape(len(rows), -1)[:, columns]
        # One rounding to float32.
        np.testing.assert_allclose(scale.mean, rows.mean(0), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(scale.deviation, rows.std(0), rtol=1e-6)

    surface, volume = statistics.streams
    assert_of(surface.embedding, "surface_mesh_centers")
    assert_of(surface.fx, "surface_normals")
    assert_of(surface.target, "surface_fields")
    assert_of(volume.fx, "volume_signed_distance")
    assert_of(volume.target, "volume_fields", [0, 1, 2, 3])
    assert_of(statistics.geometry, "stl_centers")
    chords = np.array([sample.number("chord") for sample in samples])
    np.testing.assert_allclose(statistics.global_embedding.mean, [chords.mean()], rtol=1e-6)
