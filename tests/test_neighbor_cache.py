"""Neighbours that are kept beside a store are those that a model would search for."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from commands import assert_one_line

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

import parallel  # noqa: E402
from experiments.building import build_model, cache_neighbors  # noqa: E402
from experiments.configuration.schema import (  # noqa: E402
    ExperimentConfig,
    FrameConfig,
    GeoTransolverConfig,
)
from experiments.data.batch import Windows  # noqa: E402
from experiments.data.batches import Loader  # noqa: E402
from experiments.data.neighborhoods import nearest_within  # noqa: E402
from experiments.datasets import load_dataset  # noqa: E402
from experiments.meshes import neighbor_cache  # noqa: E402
from experiments.meshes.neighbor_cache import NeighborCache  # noqa: E402
from experiments.meshes.store import write_sample  # noqa: E402
from experiments.training.optimizer import make_optimizer  # noqa: E402
from experiments.training.steps import initial_state, make_step  # noqa: E402

EVERY = slice(None)
BOTH = {"surface": SURFACE, "volume": VOLUME}
LOCAL = dict(streams=BOTH, geometry=["stl_centers", "stl_areas"])


@pytest.fixture
def searches(monkeypatch) -> list:
    """One entry a sample that is searched."""
    done, search = [], neighbor_cache.find_neighborhoods

    def counted(*arguments):
        done.append(arguments[2:])
        return search(*arguments)

    monkeypatch.setattr(neighbor_cache, "find_neighborhoods", counted)
    return done


@pytest.fixture
def small(tmp_path):
    return make_store(tmp_path / "small", samples=4)


def pairs(cache, split, index):
    """Queries, points and kept neighbours of a sample."""
    positions, geometry = split.coordinates(index)
    found = cache.read(split.names[index], Windows((EVERY, EVERY)))
    for points, kept in zip(positions, found, strict=True):
        yield points, geometry, kept.of_points
        yield geometry, points, kept.of_geometry


def assert_of_now(cache, split, index) -> None:
    """What is kept belongs to the coordinates that the store has now."""
    for queries, points, kept in pairs(cache, split, index):
        expected = nearest_within(queries, points, cache.radius, cache.count)
        np.testing.assert_array_equal(kept.indices, expected.indices)
        np.testing.assert_array_equal(kept.distances, expected.distances)


def test_kept_neighbors_are_those_that_a_device_finds(small):
    # Many points at equal distances, some in one place, some with empty slots.
    draw = np.random.default_rng(0)
    arrays = contents(0)
    for name in ("surface_mesh_centers", "volume_mesh_centers", "stl_centers"):
        arrays[name] = draw.integers(0, 4, arrays[name].shape).astype(np.float32)
    write_sample(small, name_of(0), arrays, numbers(0))
    split = split_of(small, **LOCAL)
    cache = NeighborCache(split, 1.5, 6)
    (of_points, _), _ = cache.read(name_of(0), Windows((EVERY, EVERY)))
    near = of_points.distances
    assert ((near[:, 1:] == near[:, :-1]) & np.isfinite(near[:, 1:])).any()
    assert (of_points.indices == -1).any()
    for queries, points, kept in pairs(cache, split, 0):
        expected = parallel.radius_search(queries[None], points[None], 1.5, 6)
        np.testing.assert_array_equal(kept.indices, expected.indices[0])
        np.testing.assert_array_equal(kept.distances, expected.distances[0])


def test_windows_of_kept_neighbors(small):
    split = split_of(small, **LOCAL)
    cache = NeighborCache(split, 5.0, 4)
    windows = Windows((slice(4, 9), slice(60, 100)), slice(18, 30))
    whole = cache.read(name_of(0), Windows((EVERY, EVERY)))
    part = cache.read(name_of(0), windows)
    for mine, all_of_them, window in zip(part, whole, windows.streams, strict=True):
        for name in ("indices", "distances"):
            for of, these in (("of_points", window), ("of_geometry", windows.geometry)):
                expected = getattr(getattr(all_of_them, of), name)[these]
                np.testing.assert_array_equal(getattr(getattr(mine, of), name), expected)


def test_neighbors_are_searched_once_and_again_where_a_sample_was_rewritten(small, searches):
    NeighborCache(split_of(small, **LOCAL), 3.0, 4)
    assert len(searches) == 4
    NeighborCache(split_of(small, **LOCAL), 3.0, 4)
    assert len(searches) == 4
    write_sample(small, name_of(1), contents(7, 33, 73, 23), numbers(1))
    split = split_of(small, **LOCAL)
    cache = NeighborCache(split, 3.0, 4)
    assert len(searches) == 5
    assert_of_now(cache, split, 1)
    # An array alone, as another program might.
    group = zarr.open_group(small / name_of(2))
    group.create_array("stl_centers", data=contents(8)["stl_centers"], overwrite=True)
    group.create_array("stl_areas", data=contents(8)["stl_areas"], overwrite=True)
    split = split_of(small, **LOCAL)
    cache = NeighborCache(split, 3.0, 4)
    assert len(searches) == 6
    assert_of_now(cache, split, 2)


def test_jobs_that_start_at_once_search_once(small, searches):
    splits = [split_of(small, **LOCAL) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        caches = list(pool.map(lambda split: NeighborCache(split, 3.0, 4), splits))
    assert len(searches) == 4
    for cache in caches:
        assert_of_now(cache, splits[0], 3)


def test_a_folder_that_cannot_be_written_is_named(small):
    small.with_name("small.neighbors").write_text("no folder")
    with pytest.raises(ValueError, match=r"or data\.cache_neighbors=false; got File") as error:
        NeighborCache(split_of(small, **LOCAL), 3.0, 4)
    assert_one_line(str(error.value), "small.neighbors")


@pytest.mark.parametrize(
    ("changes", "radius", "count"),
    [
        (dict(), 3.0000001, 4),
        (dict(), 3.0, 5),
        (dict(frame=FrameConfig(length="2.0")), 3.0, 4),
        (dict(frame=FrameConfig(centroid=True)), 3.0, 4),
        (dict(geometry=["surface_mesh_centers"]), 3.0, 4),
        (dict(streams={"volume": VOLUME}), 3.0, 4),
    ],
    ids=["radius", "count", "length", "centroid", "geometry", "streams"],
)
def test_neighbors_of_another_search_are_kept_apart(changes, radius, count, small, searches):
    NeighborCache(split_of(small, **LOCAL), 3.0, 4)
    NeighborCache(split_of(small, **LOCAL | changes), radius, count)
    assert len(searches) == 8


def test_coordinates_may_be_named_by_column(small):
    named = [f"stl_centers.{axis}" for axis in range(3)]
    stream = dataclasses.replace(
        SURFACE, embedding=[f"surface_mesh_centers.{axis}" for axis in range(3)]
    )
    split = split_of(small, streams={"surface": stream}, geometry=named)
    (positions,), geometry = split.coordinates(0)
    np.testing.assert_array_equal(positions, contents(0)["surface_mesh_centers"])
    np.testing.assert_array_equal(geometry, contents(0)["stl_centers"])


def test_a_step_with_kept_neighbors_is_one_without(small):
    data = config_of(small, geometry=["stl_centers"])
    sizes = dict(n_layers=1, n_hidden=16, n_head=2, slice_num=4, n_hidden_local=4)
    model_config = GeoTransolverConfig(
        **sizes, include_local_features=True, radii=[5.0], neighbors_in_radius=[6]
    )
    losses = []
    for kept in (False, True):
        dataset = load_dataset(data)
        if kept:
            cache_neighbors(ExperimentConfig(model=model_config, data=data), dataset)
        model = build_model(model_config, dataset.description, 0)
        config = ExperimentConfig(model=model_config, data=data)
        optimizer = make_optimizer(config.optimizer, 2)
        state = initial_state(model, optimizer, dataset.statistics(), 0, average=False)
        step = make_step(model, optimizer, None, state)
        (batch,) = next(Loader(dataset.splits["train"], 2, 1, 0, 0, None))
        assert (batch.streams[0].neighborhoods is not None) == kept
        state, metrics = step(state, (batch,))
        losses.append((float(metrics.loss), float(metrics.gradient_norm)))
    # The same neighbours in the same order; the programs differ in the last digits.
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
