"""Published files of the benchmarks: which samples are read of them, and what is wrong with bad."""

import pickle

import h5py
import numpy as np
import pytest
import scipy.io

from experiments.building import build_model
from experiments.configuration.schema import BenchmarkConfig, FlareConfig, GeoTransolverConfig
from experiments.data.batches import whole_batches
from experiments.datasets import load_dataset
from experiments.prediction import predict
from experiments.problems.benchmark_files import RepeatedRows, load_benchmark

FOLDERS = {
    "elasticity": "elasticity/Meshes",
    "airfoil": "airfoil/naca",
    "pipe": "pipe",
    "plasticity": "plasticity",
}
# As published, but on grids of a few points.
SHAPES = {
    "elasticity": {
        "Random_UnitCell_XY_10.npy": (5, 2, 1210),
        "Random_UnitCell_sigma_10.npy": (5, 1210),
    },
    "airfoil": {
        "NACA_Cylinder_X.npy": (1210, 4, 3),
        "NACA_Cylinder_Y.npy": (1210, 4, 3),
        "NACA_Cylinder_Q.npy": (1210, 5, 4, 3),
    },
    "pipe": {
        "Pipe_X.npy": (1210, 3, 4),
        "Pipe_Y.npy": (1210, 3, 4),
        "Pipe_Q.npy": (1210, 3, 3, 4),
    },
}
PLASTICITY = "plas_N987_T20.mat"
# First sample of the training samples, of those for validation, and of those for testing.
FIRST = {
    "elasticity": (0, 998, 1010),
    "airfoil": (0, 998, 1000),
    "pipe": (0, 998, 1000),
    "plasticity": (0, 898, 907),
}
SIZES = {"train": 3, "validation": 2, "test": 4}

every_data_set = pytest.mark.parametrize("name", FOLDERS)
in_numpy_files = pytest.mark.parametrize("name", SHAPES)


def assert_one_line(error, *parts):
    message = str(error.value)
    assert "\n" not in message
    assert "expected " in message
    for part in parts:
        assert str(part) in message


def random(shape, seed):
    return np.random.default_rng(seed).normal(size=shape)


def plasticity_variables():
    return {"input": random((987, 4), 0), "output": random((987, 4, 3, 2, 4), 1)}


def write_mat(path, version, variables):
    if version == "v5":
        scipy.io.savemat(path, variables)
    else:
        with h5py.File(path, "w", userblock_size=512) as file:  # MATLAB writes its header there
            for name, values in variables.items():
                file[name] = values.T


def write_archive(path):
    with path.open("wb") as file:
        np.savez(file, values=np.zeros(3))


def publish(name, folder, version="v5"):
    """Writes the files of a data set into a folder, and returns their arrays by name."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "plasticity":
        arrays = plasticity_variables()
        write_mat(folder / PLASTICITY, version, arrays)
        return arrays
    arrays = {}
    for seed, (file, shape) in enumerate(SHAPES[name].items()):
        arrays[file] = random(shape, seed)
        np.save(folder / file, arrays[file])
    return arrays


def rows_of(name):
    return {
        split: slice(start, start + SIZES[split])
        for split, start in zip(SIZES, FIRST[name], strict=True)
    }


@every_data_set
@pytest.mark.parametrize("model", ["flare", "geotransolver"])
def test_a_model_predicts_what_is_published(tmp_path, name, model):
    publish(name, tmp_path)
    overrides = dict(problem=name, folder=str(tmp_path), train=3, validation=2, test=4)
    dataset = load_dataset(BenchmarkConfig(**overrides))
    small = dict(n_layers=1, n_hidden=8, n_head=2, slice_num=4)
    config = FlareConfig(**small) if model == "flare" else GeoTransolverConfig(**small)
    made = build_model(config, dataset.description, 0)
    batch, _ = next(whole_batches(dataset.splits["train"], 3, None))
    statistics = dataset.statistics()
    (fields,) = predict(made, statistics, batch)
    assert fields.shape == batch.streams[0].target.shape
    assert np.isfinite(fields).all()
    # Each of its samples counts alike, also where it shares its positions with others.
    first = dataset.splits["train"].embedding
    every = np.concatenate([np.asarray(first[i]) for i in range(len(first))])
    np.testing.assert_allclose(
        statistics.streams[0].embedding.mean, every.mean(0), rtol=1e-5, atol=1e-5
    )


# What is read -------------------------------------------------------------------------------------


def test_elasticity_is_read_with_samples_first(tmp_path):
    positions, stress = publish("elasticity", tmp_path).values()
    splits = load_benchmark("elasticity", tmp_path, SIZES)
    for name, rows in rows_of("elasticity").items():
        arrays = splits[name]
        expected = positions[:, :, rows].transpose(2, 0, 1)
        np.testing.assert_array_equal(arrays.embedding, expected.astype(np.float32))
        expected = stress[:, rows].T[:, :, None]
        np.testing.assert_array_equal(arrays.target, expected.astype(np.float32))
        assert arrays.fx is None
        assert arrays.global_embedding is None
        assert arrays.fields == ("stress",)
        assert arrays.structured_shape is None
        assert len(arrays) == SIZES[name]


@pytest.mark.parametrize(
    ("name", "channel", "field", "grid"),
    [("airfoil", 4, "mach_number", (4, 3)), ("pipe", 0, "velocity_x", (3, 4))],
)
def test_flows_are_read_in_the_order_of_their_grid(tmp_path, name, channel, field, grid):
    x, y, flow = publish(name, tmp_path).values()
    splits = load_benchmark(name, tmp_path, SIZES)
    for split, rows in rows_of(name).items():
        arrays = splits[split]
        on_grid = arrays.embedding.reshape(-1, *grid, 2)
        np.testing.assert_array_equal(on_grid[..., 0], x[rows].astype(np.float32))
        np.testing.assert_array_equal(on_grid[..., 1], y[rows].astype(np.float32))
        on_grid = arrays.target.reshape(-1, *grid)
        np.testing.assert_array_equal(on_grid, flow[rows, channel].astype(np.float32))
        assert arrays.fx is None
        assert arrays.global_embedding is None
        assert arrays.fields == (field,)
        assert arrays.structured_shape == grid


@pytest.mark.parametrize("version", ["v5", "v7.3"])
def test_plasticity_has_one_sample_for_each_time(tmp_path, version):
    variables = publish("plasticity", tmp_path, version)
    splits = load_benchmark("plasticity", tmp_path, SIZES)
    for split, rows in rows_of("plasticity").items():
        arrays = splits[split]
        assert len(arrays) == len(arrays.fx) == len(arrays.embedding) == 2 * SIZES[split]
        for index in range(len(arrays)):
            case, time = divmod(index, 2)
            output = variables["output"][rows][case, :, :, time].astype(np.float32)
            np.testing.assert_array_equal(arrays.target[index].reshape(4, 3, 4), output)
            profile = variables["input"][rows][case].astype(np.float32)
            on_grid = arrays.fx[index].reshape(4, 3)
            np.testing.assert_array_equal(on_grid, np.repeat(profile[:, None], 3, axis=1))
            assert arrays.global_embedding[index] == [[time]]
        on_grid = arrays.embedding[0].reshape(4, 3, 2)
        np.testing.assert_allclose(on_grid[:, 1, 0], np.linspace(0, 1, 4), rtol=1e-6)
        np.testing.assert_allclose(on_grid[2, :, 1], np.linspace(0, 1, 3), rtol=1e-6)
        assert arrays.structured_shape == (4, 3)
        assert len(arrays.fields) == arrays.target.shape[2] == 4


def test_plasticity_repeats_nothing_in_memory(tmp_path):
    publish("plasticity", tmp_path)
    arrays = load_benchmark("plasticity", tmp_path, {"train": 900})["train"]
    assert arrays.fx.shape == (1800, 12, 1)
    assert arrays.fx.rows.shape == (900, 12, 1)
    assert arrays.embedding.shape == (1800, 12, 2)
    assert arrays.embedding.rows.shape == (1, 12, 2)


@pytest.mark.parametrize("index", [5, -1, slice(2, 7), slice(None), np.array([8, 0, 0, 3])])
def test_repeated_rows_behave_as_the_whole_array(index):
    rows = random((3, 4, 2), 0).astype(np.float32)
    repeated, whole = RepeatedRows(rows, 3), np.repeat(rows, 3, axis=0)
    np.testing.assert_array_equal(repeated[index], whole[index])
    assert (repeated.shape, repeated.ndim, repeated.dtype) == (whole.shape, 3, whole.dtype)


@every_data_set
def test_arrays_are_float32_and_hold_on_to_no_file(tmp_path, name):
    publish(name, tmp_path)
    arrays = load_benchmark(name, tmp_path, {"train": 2})["train"]
    for values in (arrays.embedding[:], arrays.target):
        assert values.dtype == np.float32
        assert type(values) is np.ndarray
        assert values.flags.c_contiguous
        assert not isinstance(values.base, np.memmap)


@every_data_set
def test_only_the_splits_asked_for_are_read(tmp_path, name):
    publish(name, tmp_path)
    assert set(load_benchmark(name, tmp_path, {"test": 1, "validation": 1})) == {
        "test",
        "validation",
    }


@every_data_set
def test_files_may_lie_in_the_published_folders(tmp_path, name):
    publish(name, tmp_path / FOLDERS[name])
    inmost = tmp_path / FOLDERS[name]
    for folder in {tmp_path, inmost, inmost.parent}:
        assert len(load_benchmark(name, folder, {"train": 1})) == 1


@every_data_set
def test_all_published_samples_can_be_asked_for(tmp_path, name):
    publish(name, tmp_path)
    trained, tested = (900, 80) if name == "plasticity" else (1000, 200)
    times = 2 if name == "plasticity" else 1
    splits = load_benchmark(
        name, tmp_path, {"train": trained - 100, "validation": 100, "test": tested}
    )
    assert [len(split) for split in splits.values()] == [
        times * (trained - 100),
        times * 100,
        times * tested,
    ]


# What is refused ----------------------------------------------------------------------------------


def test_unknown_data_set_is_named(tmp_path):
    with pytest.raises(ValueError, match="elasticity, airfoil, pipe, plasticity") as error:
        load_benchmark("cylinder", tmp_path, SIZES)
    assert_one_line(error, "'cylinder'")


@every_data_set
@pytest.mark.parametrize(
    ("sizes", "limit"),
    [
        ({"train": 1001}, "trained"),
        ({"train": 990, "validation": 11}, "trained"),
        ({"test": 201}, "tested"),
        ({"train": 0}, "at least 1"),
        ({"training": 1}, "expected some of"),
        ({}, "expected some of"),
    ],
)
def test_more_samples_than_published_are_refused_before_a_file_is_opened(
    tmp_path, name, sizes, limit
):
    limits = {"trained": "at most 1000", "tested": "at most 200"}
    if name == "plasticity":
        limits = {"trained": "at most 900", "tested": "at most 80"}
    with pytest.raises(ValueError, match="expected") as error:
        load_benchmark(name, tmp_path, sizes)
    assert_one_line(error, limits.get(limit, limit))


@every_data_set
def test_missing_file_is_named_with_where_it_was_looked_for(tmp_path, name):
    publish(name, tmp_path / FOLDERS[name])
    last = max((tmp_path / FOLDERS[name]).iterdir())
    last.unlink()
    with pytest.raises(FileNotFoundError) as error:
        load_benchmark(name, tmp_path, SIZES)
    assert_one_line(error, tmp_path, last.name, FOLDERS[name])


@every_data_set
def test_missing_folder_is_named(tmp_path, name):
    with pytest.raises(FileNotFoundError) as error:
        load_benchmark(name, tmp_path / "absent", SIZES)
    assert_one_line(error, tmp_path / "absent")


def files_of(names):
    return [(name, file) for name in names for file in SHAPES[name]]


@pytest.mark.parametrize(("name", "file"), files_of(SHAPES))
@pytest.mark.parametrize(
    "change",
    [
        lambda values: values[..., :-1, :],
        lambda values: values[..., None],
        lambda values: values[0],
        lambda values: values[:0],
        lambda values: values.astype(complex),
        lambda values: values.astype("S8"),
    ],
    ids=["shorter", "more axes", "fewer axes", "empty", "complex", "strings"],
)
def test_array_of_a_wrong_shape_or_kind_is_named(tmp_path, name, file, change):
    arrays = publish(name, tmp_path)
    np.save(tmp_path / file, change(arrays[file]))
    with pytest.raises(ValueError, match="expected") as error:
        load_benchmark(name, tmp_path, SIZES)
    assert_one_line(error, tmp_path, file)


@pytest.mark.parametrize("name", ["airfoil", "pipe"])
def test_missing_channel_is_named(tmp_path, name):
    publish(name, tmp_path)
    path = tmp_path / list(SHAPES[name])[2]
    np.save(path, np.load(path)[:, : 0 if name == "pipe" else 4])
    with pytest.raises(ValueError, match="expected") as error:
        load_benchmark(name, tmp_path, SIZES)
    assert_one_line(error, path)


@in_numpy_files
def test_too_few_samples_are_named(tmp_path, name):
    for file, values in publish(name, tmp_path).items():
        np.save(tmp_path / file, values[..., :1199] if name == "elasticity" else values[:1199])
    with pytest.raises(ValueError, match="expected at least 1200 samples; got 1199") as error:
        load_benchmark(name, tmp_path, SIZES)
    assert_one_line(error, tmp_path / next(iter(SHAPES[name])))


@pytest.mark.parametrize(("name", "file"), files_of(SHAPES))
@pytest.mark.parametrize("bad", [np.nan, -np.inf, 1e300])
def test_value_that_is_not_finite_is_named_where_it_is_read(tmp_path, name, file, bad):
    values = publish(name, tmp_path)[file]
    sample = FIRST[name][1] + 1
    values[(..., sample) if name == "elasticity" else (sample, ...)] = bad
    np.save(tmp_path / file, values)
    load_benchmark(name, tmp_path, {"train": 3, "test": 4})
    with pytest.raises(ValueError, match="expected finite") as error:
        load_benchmark(name, tmp_path, SIZES)
    assert_one_line(error, tmp_path / file, f"sample {sample}")


@pytest.mark.parametrize(("name", "file"), files_of(SHAPES))
@pytest.mark.parametrize("kept_fraction", [0.0, 0.001, 0.3, 0.99])
def test_truncated_file_is_named(tmp_path, name, file, kept_fraction):
    publish(name, tmp_path)
    content = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(content[: int(kept_fraction * len(content))])
    with pytest.raises(ValueError, match="expected a readable") as error:
        load_benchmark(name, tmp_path, SIZES)
    assert_one_line(error, tmp_path / file)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: np.save(path, np.array([{}, None])),
        lambda path: path.write_bytes(pickle.dumps(np.zeros(3))),
        lambda path: path.write_text("<html>\nnot found\n</html>" * 20),
        write_archive,
    ],
    ids=["objects", "pickle", "page", "archive"],
)
def test_pickled_or_foreign_file_is_named(tmp_path, write):
    publish("pipe", tmp_path)
    write(tmp_path / "Pipe_Q.npy")
    with pytest.raises(ValueError, match="expected a readable") as error:
        load_benchmark("pipe", tmp_path, SIZES)
    assert_one_line(error, tmp_path / "Pipe_Q.npy")


@pytest.mark.parametrize("version", ["v5", "v7.3"])
@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda v: v.pop("input"), ["'input'"]),
        (lambda v: v.update(output=v["output"][..., :3]), ["'output'", "(987, 4, 3, 2, 3)"]),
        (lambda v: v.update(output=v["output"][..., 0]), ["'output'", "(987, 4, 3, 2)"]),
        (lambda v: v.update(input=v["input"][:, 1:]), ["'input'", "(987, 3)"]),
        (lambda v: v.update(input=v["input"][1:]), ["'input'", "(986, 4)"]),
        (lambda v: v.update({k: a[:979] for k, a in v.items()}), ["at least 980", "got 979"]),
        (lambda v: np.put(v["input"], 0, np.nan), ["'input'", "finite", "sample 0"]),
        (lambda v: v["output"][898].fill(1e300), ["'output'", "finite", "sample 898"]),
    ],
)
def test_bad_plasticity_file_is_named(tmp_path, version, change, parts):
    variables = plasticity_variables()
    change(variables)
    write_mat(tmp_path / PLASTICITY, version, variables)
    with pytest.raises(ValueError, match="expected") as error:
        load_benchmark("plasticity", tmp_path, SIZES)
    assert_one_line(error, tmp_path / PLASTICITY, *parts)


@pytest.mark.parametrize("version", ["v5", "v7.3"])
@pytest.mark.parametrize("kept_fraction", [0.0, 0.02, 0.3, 0.9])
def test_truncated_plasticity_file_is_named(tmp_path, version, kept_fraction):
    publish("plasticity", tmp_path, version)
    path = tmp_path / PLASTICITY
    content = path.read_bytes()
    path.write_bytes(content[: int(kept_fraction * len(content))])
    with pytest.raises(ValueError, match="expected a") as error:
        load_benchmark("plasticity", tmp_path, SIZES)
    assert_one_line(error, path)
