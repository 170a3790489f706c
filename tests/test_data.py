"""Statistics, loaders, and the placing of batches."""

import json

import numpy as np
import pytest
import two_processes
from commands import assert_one_line, reports_of
from conftest import on_mesh

import parallel
from experiments.configuration.schema import DarcyConfig, DataConfig
from experiments.data.batch import Statistics
from experiments.data.batches import Loader, evaluation_batch_size, whole_batches
from experiments.data.dataset import Dataset
from experiments.data.description import Description, StreamDescription
from experiments.data.in_memory import GridSplit
from experiments.data.placement import Placement
from experiments.datasets import load_dataset

SAMPLES, POINTS = 12, 5


def numbered(samples=SAMPLES, points=POINTS) -> GridSplit:
    """A split in which every value tells its sample and its point."""
    fx = np.arange(samples * points, dtype=np.float32).reshape(samples, points, 1)
    embedding = np.linspace(0, 1, points, dtype=np.float32)[:, None]
    return GridSplit(fx, embedding, np.concatenate([fx, -fx], axis=-1))


def sample_numbers(batches, points=POINTS) -> list[int]:
    """Which samples the batches of `numbered` hold."""
    return [
        int(value) // points
        for batch in batches
        for value in np.asarray(batch.streams[0].fx)[:, 0, 0]
    ]


def loader(split=None, batch_size=4, accumulate=1, seed=0, threads=1) -> Loader:
    return Loader(split or numbered(), batch_size, accumulate, seed, threads, None)


def take(loader, steps) -> list[int]:
    return [number for _ in range(steps) for number in sample_numbers(next(loader))]


def random_split(samples, seed, *, offset=0.0) -> GridSplit:
    generator = np.random.default_rng(seed)

    def draw(*shape):
        return (offset + generator.standard_normal(shape)).astype(np.float32)

    return GridSplit(draw(samples, 7, 2), draw(7, 3), draw(samples, 7, 1))


def of_split(split: GridSplit) -> Statistics:
    stream = StreamDescription("points", split.embedding.shape[-1], split.fx.shape[-1], ("u",))
    return Dataset({"train": split}, Description((stream,))).statistics()


def test_statistics_are_those_of_all_points_of_all_samples():
    train = random_split(5, seed=0)
    (statistics,) = of_split(train).streams
    for name in ("fx", "embedding", "target"):
        values = getattr(train, name).astype(np.float64).reshape(-1, getattr(train, name).shape[-1])
        mean, deviation = getattr(statistics, name)
        assert mean.dtype == deviation.dtype == np.float32
        # One rounding to float32.
        np.testing.assert_allclose(mean, values.mean(0), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(deviation, values.std(0), rtol=1e-6)


def test_statistics_are_those_of_the_training_split_alone():
    stream = StreamDescription("points", 3, 2, ("u",))
    splits = {"train": random_split(5, seed=0), "test": random_split(3, seed=2, offset=-100.0)}
    statistics = Dataset(splits, Description((stream,))).statistics()
    assert (abs(statistics.streams[0].fx.mean) < 1).all()


def test_statistics_survive_a_large_offset():
    statistics = of_split(random_split(50, seed=0, offset=1000.0))
    np.testing.assert_allclose(statistics.streams[0].fx.deviation, 1.0, rtol=0.1)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e6, 1e-20])
def test_constant_channel_is_shifted_but_not_scaled(value):
    split = random_split(5, seed=0)
    split.fx[..., 1] = value
    scale = of_split(split).streams[0].fx
    assert scale.mean[1] == np.float32(value)
    assert scale.deviation[1] == 1
    assert scale.deviation[0] != 1


def test_darcy_data_set_has_its_splits_and_its_grid(tmp_path):
    config = DarcyConfig(resolution=8, train=5, validation=2, test=3, cache_dir=str(tmp_path))
    dataset = load_dataset(config)
    assert dataset.description.structured_shape == (8, 8)
    assert {name: len(split) for name, split in dataset.splits.items()} == {
        "train": 5,
        "validation": 2,
        "test": 3,
    }
    for split in dataset.splits.values():
        assert split.fx.shape == split.target.shape == (len(split), 64, 1)
        assert split.embedding.shape == (64, 2)


def test_data_set_without_a_loader_is_named():
    with pytest.raises(ValueError, match=r"data\.name: no loader for 'stokes'"):
        load_dataset(DataConfig(name="stokes"))


def test_one_of_two_files_is_not_enough(tmp_path):
    with pytest.raises(ValueError, match="expected both or none of mat_train and mat_test"):
        load_dataset(DarcyConfig(mat_train=str(tmp_path / "a.mat")))


def test_same_seed_gives_the_same_order_whatever_the_threads():
    order = take(loader(seed=3), 9)
    assert order == take(loader(seed=3), 9)
    assert order == take(loader(seed=3, threads=0), 9)
    assert order == take(loader(seed=3, threads=3), 9)


def test_order_is_shuffled_and_depends_on_the_seed():
    first = take(loader(seed=0), 3)
    assert first != sorted(first)
    assert first != take(loader(seed=1), 3)


def test_every_epoch_has_every_sample_once_in_a_new_order():
    order = take(loader(), 12)
    epochs = [tuple(order[start : start + SAMPLES]) for start in range(0, len(order), SAMPLES)]
    assert all(sorted(epoch) == list(range(SAMPLES)) for epoch in epochs)
    assert len(set(epochs)) == len(epochs) == 4


def test_samples_of_a_batch_keep_their_targets_and_positions():
    split = numbered()
    (batch,) = next(loader(split))
    (stream,) = batch.streams
    np.testing.assert_array_equal(stream.target, np.concatenate([stream.fx, -stream.fx], axis=-1))
    for embedding in np.asarray(stream.embedding):
        np.testing.assert_array_equal(embedding, split.embedding)
    assert np.asarray(stream.mask).all()


def test_accumulated_batches_are_those_that_would_come_one_by_one():
    assert take(loader(accumulate=3), 2) == take(loader(), 6)


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_saved_position_continues_exactly(steps, threads):
    running = loader(accumulate=2, threads=threads)
    take(running, steps)
    position = json.loads(json.dumps(running.position))
    expected = take(running, 5)

    resumed = loader(accumulate=2, threads=threads)
    take(resumed, 2)
    resumed.position = position
    assert take(resumed, 5) == expected


def test_reading_the_position_changes_nothing():
    running = loader()
    order = []
    for _ in range(4):
        order += take(running, 1)
        assert running.position == running.position
    assert order == take(loader(), 4)


def test_batches_of_one_sample_are_endless_too():
    order = take(loader(batch_size=1), 2 * SAMPLES)
    assert sorted(order[:SAMPLES]) == sorted(order[SAMPLES:]) == list(range(SAMPLES))


def test_batch_larger_than_the_training_split_is_refused():
    with pytest.raises(ValueError, match="expected at most the 12 training samples; got 13"):
        loader(batch_size=13)


def test_batch_that_does_not_divide_over_data_is_refused():
    with (
        on_mesh(dict(data=4, points=2)),
        pytest.raises(ValueError, match=r"batch of 6 samples does not divide .* 'data' of 4"),
    ):
        loader(batch_size=6)


def test_batches_are_the_same_on_every_mesh():
    expected = take(loader(), 3)
    for axes in (dict(points=8), dict(data=2, points=4), dict(data=4, heads=2)):
        with on_mesh(axes):
            batches = loader()
            (batch,) = next(batches)
            assert batch.streams[0].fx.sharding.spec[:2] == ("data", "points")
            assert np.asarray(batch.streams[0].mask).sum() == 4 * POINTS
            assert sample_numbers([batch]) + take(batches, 2) == expected


@pytest.mark.parametrize("axes", [None, dict(data=2, points=4)], ids=["single", "data2_points4"])
@pytest.mark.parametrize("samples", [4, 5, 11, 12, 3])
def test_evaluation_counts_every_sample_once(samples, axes):
    with on_mesh(axes):
        counted = []
        for batch, indices in whole_batches(numbered(samples), 4, None):
            assert batch.streams[0].fx.shape[0] == 4
            counted += sample_numbers([batch])[: len(indices)]
    assert counted == list(range(samples))


@pytest.mark.parametrize(("batch", "expected"), [(1, 16), (4, 16), (6, 18), (16, 16), (20, 20)])
def test_evaluation_takes_a_multiple_of_the_training_batch(batch, expected):
    assert evaluation_batch_size(batch, 1000) == expected


@pytest.mark.parametrize(("batch", "expected"), [(1, 2), (2, 2), (4, 4)])
def test_evaluation_takes_few_samples_of_many_points(batch, expected):
    assert evaluation_batch_size(batch, 100_000) == expected
    assert evaluation_batch_size(batch, 10_000_000) == batch


def test_rows_of_a_grid_are_padded_whole():
    split = numbered(samples=4, points=15)
    with on_mesh(dict(points=4)):
        (batch, _), *_ = whole_batches(split, 4, (5, 3))
        assert batch.streams[0].fx.shape == (4, 24, 1)
        np.testing.assert_array_equal(batch.streams[0].mask, np.arange(24) < np.full((4, 1), 15))


def test_one_process_holds_every_row():
    with on_mesh(dict(data=4, points=2)):
        assert parallel.local_rows(8) == slice(0, 8)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """The reports of two processes that share a (2, 2, 1) mesh."""
    return reports_of(two_processes.__file__, 2, tmp_path_factory.mktemp("two"))


def test_each_process_reads_only_the_samples_that_its_devices_hold(processes):
    order = loader(two_processes.split())
    batches = [sample_numbers(next(order)) for _ in range(3)]
    assert [process["rows"] for process in processes] == [[0, 2], [2, 4]]
    for process in processes:
        rows = slice(*process["rows"])
        assert process["taken"] == [batch[rows] for batch in batches]


def test_each_process_places_its_rows_where_they_belong(processes):
    order = loader(two_processes.split())
    numbers = sample_numbers(next(order))
    whole = np.zeros((4, 6))
    whole[:, :POINTS] = two_processes.split().fx[numbers, :, 0]
    places = set()
    for process in processes:
        assert process["shape"] == [4, 6, 1]
        for (rows, points), values in process["held"]:
            np.testing.assert_array_equal(whole[slice(*rows), slice(*points)], values)
            places.add((*rows, *points))
    assert places == {(0, 2, 0, 3), (0, 2, 3, 6), (2, 4, 0, 3), (2, 4, 3, 6)}


def test_sums_over_a_batch_of_two_processes_are_those_of_one(processes):
    order = loader(two_processes.split())
    batches = [np.asarray(next(order)[0].streams[0].fx, np.float64) for _ in range(3)]
    for process in processes:
        # Sums of small integers: exact in float32.
        np.testing.assert_array_equal(process["sums"], [batch.sum((1, 2)) for batch in batches])
        assert process["totals"] == [batch.sum() for batch in batches]


def test_two_processes_evaluate_every_sample_once(processes):
    expected = two_processes.split().fx.sum((1, 2))
    for process in processes:
        np.testing.assert_array_equal(np.concatenate(process["evaluated_sums"]), expected)
        assert all(len(taken) == 2 for taken in process["evaluated"])


def test_a_sample_that_one_process_cannot_read_is_skipped_by_both(processes):
    split = two_processes.split()
    taken = np.reshape(take(loader(split), 3), (3, two_processes.BATCH))
    assert two_processes.SPOILED in taken
    # The next sample of the split is in its place.
    taken = np.where(taken == two_processes.SPOILED, two_processes.SPOILED + 1, taken)
    for process in processes:
        np.testing.assert_array_equal(process["without_spoiled"], split.fx[taken, :, 0])
        assert list(process["bad"]) == [str(two_processes.SPOILED)]
        assert_one_line(process["bad"]["3"], "sample 3: expected readable values")


def test_a_file_that_one_process_cannot_read_is_refused_by_both(processes):
    for process in processes:
        assert process["refusal"] == "process 1 of 2: there is no such file"


def test_points_come_to_every_host_a_few_at_a_time(processes):
    for process in processes:
        np.testing.assert_array_equal(process["points"], np.arange(40).reshape(1, 20, 2))


def test_a_checkpoint_that_one_process_cannot_read_is_damaged_for_both(processes):
    for process in processes:
        step, values, problems = process["newest_readable"]
        assert (step, values) == (1, [1.0] * 4)
        (problem,) = problems
        assert_one_line(problem, "checkpoints/2: the checkpoint is damaged: there is no such disk")


def test_a_sample_without_points_is_named():
    class WithOneEmpty(GridSplit):
        def read(self, index, windows, seeds=(0,)):
            sample = super().read(index, windows, seeds)
            if index != 3:
                return sample
            return sample._replace(clouds=tuple(c._replace(length=0) for c in sample.clouds))

    full = numbered()
    split = WithOneEmpty(full.fx, full.embedding, full.target)
    placement = Placement.of(split, 2, None)
    assert placement.read(split, 0, 2).clouds[0].length == POINTS
    with pytest.raises(
        ValueError, match=f"{split.names[3]}: expected at least one point; got none"
    ):
        placement.read(split, 0, 3)
