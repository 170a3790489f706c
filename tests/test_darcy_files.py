"""Darcy data sets: the published MATLAB files."""

import h5py
import numpy as np
import pytest
import scipy.io

from experiments.problems.darcy_files import load_darcy_mat


def assert_one_line(error, *parts):
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message


def write_mat(path, version, **variables):
    if version == "v5":
        scipy.io.savemat(path, variables)
    else:
        with h5py.File(path, "w", userblock_size=512) as file:  # MATLAB writes its header there
            for name, values in variables.items():
                file[name] = values.T
    return path


def published(count, points=13, seed=0):
    values = np.random.default_rng(seed).uniform(1.0, 2.0, (2, count, points, points))
    return {"coeff": values[0], "sol": values[1]}


@pytest.mark.parametrize("version", ["v5", "v7.3"])
@pytest.mark.parametrize(
    ("points", "resolution", "stride"), [(13, 5, 3), (13, 13, 1), (421, 85, 5)]
)
def test_published_files_are_thinned_and_split(tmp_path, version, points, resolution, stride):
    first, second = published(3, points, seed=1), published(2, points, seed=2)
    splits = load_darcy_mat(
        write_mat(tmp_path / "train.mat", version, **first),
        write_mat(tmp_path / "test.mat", version, **second),
        resolution,
        {"train": 2, "validation": 1, "test": 1},
    )
    for name, source, rows in (
        ("train", first, slice(0, 2)),
        ("validation", first, slice(2, 3)),
        ("test", second, slice(0, 1)),
    ):
        for field, variable in (("permeability", "coeff"), ("pressure", "sol")):
            expected = source[variable][rows, ::stride, ::stride].astype(np.float32)
            np.testing.assert_array_equal(getattr(splits[name], field), expected)
    coordinates = splits["train"].coordinates.reshape(resolution, resolution, 2)
    assert coordinates.dtype == np.float32
    np.testing.assert_allclose(coordinates[:, 0, 0], np.linspace(0, 1, resolution), rtol=1e-6)
    np.testing.assert_allclose(coordinates[0, :, 1], np.linspace(0, 1, resolution), rtol=1e-6)


def load_mat(train_file, resolution=5, **splits):
    return load_darcy_mat(
        train_file, train_file.with_name("absent.mat"), resolution, splits or {"train": 2}
    )


def test_missing_file_is_named_only_when_needed(tmp_path):
    path = write_mat(tmp_path / "train.mat", "v5", **published(2))
    assert set(load_mat(path, train=1, validation=1)) == {"train", "validation"}
    with pytest.raises(FileNotFoundError, match="expected a MATLAB file") as error:
        load_mat(path, train=1, test=1)
    assert_one_line(error, tmp_path / "absent.mat")


@pytest.mark.parametrize("version", ["v5", "v7.3"])
@pytest.mark.parametrize(
    ("change", "resolution", "parts"),
    [
        (lambda v: v.pop("sol"), 5, ["expected a variable 'sol'", "['coeff']"]),
        (lambda v: v.update(sol=v["sol"][:, :, 1:]), 5, ["'sol'", "(2, 13, 12)"]),
        (lambda v: v.update(coeff=v["coeff"][0]), 5, ["'coeff'", "(13, 13)"]),
        (lambda v: v.update(sol=v["sol"][:, 1:, 1:]), 5, ["'sol'", "(2, 12, 12)"]),
        (lambda v: v.update(coeff=v["coeff"][:1]), 5, ["at least 2 samples, got 1"]),
        (lambda v: np.put(v["sol"], -1, np.nan), 5, ["'sol'", "finite", "sample 1"]),
        (lambda v: np.put(v["coeff"], 0, 1e300), 5, ["'coeff'", "finite", "sample 0"]),
        (lambda v: None, 6, ["one of [4, 5, 7, 13], got 6"]),
        (lambda v: None, 25, ["one of [4, 5, 7, 13], got 25"]),
        (lambda v: None, 3, ["resolution: expected an integer of at least 4, got 3"]),
    ],
)
def test_bad_published_file_is_named(tmp_path, version, change, resolution, parts):
    variables = published(2)
    change(variables)
    path = write_mat(tmp_path / "train.mat", version, **variables)
    with pytest.raises(ValueError, match="expected") as error:
        load_mat(path, resolution)
    assert_one_line(error, *parts, *([] if resolution == 3 else [path]))


@pytest.mark.parametrize("version", ["v5", "v7.3"])
@pytest.mark.parametrize("kept_fraction", [0.0, 0.02, 0.3, 0.9])
def test_truncated_published_file_is_named(tmp_path, version, kept_fraction):
    path = write_mat(tmp_path / "train.mat", version, **published(2))
    content = path.read_bytes()
    path.write_bytes(content[: int(kept_fraction * len(content))])
    with pytest.raises(ValueError, match="expected a") as error:
        load_mat(path)
    assert_one_line(error, path)


def test_foreign_published_file_is_named(tmp_path):
    path = tmp_path / "train.mat"
    path.write_text("<html>not found</html>" * 20)
    with pytest.raises(ValueError, match="expected a readable MATLAB") as error:
        load_mat(path)
    assert_one_line(error, path)
