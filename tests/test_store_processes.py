"""Several processes read of a store what their devices hold, and together what one would read."""

from pathlib import Path

import four_processes
import numpy as np
import pytest
from commands import reports_of
from conftest import on_mesh

zarr = pytest.importorskip("zarr")

from experiments.data.placement import Placement  # noqa: E402
from experiments.meshes.store import create_store, write_sample  # noqa: E402

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="what a process reads is counted by Linux alone"
)

PROCESSES = 4
IDS = ["points8", "data2_points4", "data4_points2"]


def write(store: Path, lengths: list[int]) -> str:
    """Samples of random values, which no codec makes smaller by much."""
    create_store(store)
    for i, length in enumerate(lengths):
        draw = np.random.default_rng(i)
        arrays = {
            name: draw.random((length, width), np.float32)
            for name, width in zip(four_processes.ARRAYS, (3, 3, 5), strict=True)
        }
        write_sample(store, f"run_{i}", arrays, {"angle": float(i)})
    return str(store)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    return (
        write(folder / "large", [400_000, 399_000, 398_001, 397_500]),
        write(folder / "small", [50, 60, 70, 41, 42, 43]),
    )


@pytest.fixture(scope="module")
def processes(stores):
    """The reports of four processes of two devices each."""
    return reports_of(four_processes.__file__, PROCESSES, *stores)


@pytest.mark.parametrize("mesh", range(3), ids=IDS)
def test_a_process_reads_its_share_of_the_bytes(mesh, processes, stores):
    files = [
        file
        for sample in Path(stores[0]).glob("run_*")
        for name in four_processes.ARRAYS
        for file in (sample / name).rglob("*")
        if file.is_file()
    ]
    share = sum(file.stat().st_size for file in files) / PROCESSES
    # A window ends within a chunk: 100,000 rows lie in 13 chunks of 8,192, 1.065 times as many.
    # Python's files read on to the end of a buffer of 8 KiB: 4 KiB more for 100 a chunk.
    ratios = [process["read"][mesh] / share for process in processes]
    assert max(ratios) < 1.1, ratios
    # No process is done by reading nothing.
    assert min(ratios) > 0.9, ratios


def test_points_of_a_sample_stay_on_few_hosts(processes):
    for process in processes:
        assert process["groups"] == [
            [[0, 0, 1, 1, 2, 2, 3, 3]],
            [[0, 0, 1, 1], [2, 2, 3, 3]],
            [[0, 0], [1, 1], [2, 2], [3, 3]],
        ]


@pytest.mark.parametrize("mesh", range(3), ids=IDS)
def test_processes_place_what_one_process_places(mesh, processes, stores):
    split = four_processes.split_of(stores[0])
    with on_mesh(four_processes.MESHES[mesh]):
        placement = Placement.of(split, four_processes.BATCH, None)
        samples = {row: placement.read(split, row, row) for row in placement.rows}
        expected = four_processes.held(placement.place(samples))
    found = [process["held"][mesh] for process in processes]
    assert {place: digest for held in found for place, digest in held.items()} == expected
    # Eight parts of each of embedding, target, input, positions and mask, and the tokens.
    assert len(expected) == 5 * 8 + four_processes.MESHES[mesh]["data"]


@pytest.mark.parametrize("size", range(2), ids=["more", "fewer"])
def test_moments_of_all_processes_are_those_of_one(size, processes, stores):
    samples = four_processes.SIZES[size]
    expected = four_processes.as_lists(four_processes.split_of(stores[1], samples).moments())
    for process in processes:
        found = process["moments"][size]
        assert found == processes[0]["moments"][size]
        assert found.keys() == expected.keys()
        for name, parts in expected.items():
            # Sets merge in another order, each time with a rounding in float64.
            for mine, theirs in zip(found[name], parts, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-15)
