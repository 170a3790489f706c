"""Airfoil data sets: shapes, splits, and the cache on disk."""

import shutil
from dataclasses import fields, replace

import numpy as np
import pytest

from experiments.configuration.schema import AirfoilConfig
from experiments.problems import airfoil_cache, airfoil_flow
from experiments.problems.airfoil import AirfoilArrays
from experiments.problems.airfoil_cache import load_airfoil, sample_of, shape_numbers
from experiments.problems.airfoil_flow import solve_airfoil
from experiments.problems.airfoil_shapes import (
    NacaParameters,
    naca_outline,
    panel_nodes,
    sample_naca,
)

SETTINGS = AirfoilConfig(points=60, surface_points=32, angles=2, seed=5)
SPLITS = {"train": 5, "validation": 2, "test": 3}


def load(cache_dir, splits=SPLITS, **changes):
    return load_airfoil(replace(SETTINGS, **changes), splits, cache_dir, progress=False)


def cache_file(cache_dir):
    (path,) = cache_dir.iterdir()
    return path


def assert_equal(first, second):
    assert list(first) == list(second)
    for name in first:
        for field in fields(AirfoilArrays):
            np.testing.assert_array_equal(
                getattr(first[name], field.name), getattr(second[name], field.name)
            )


def assert_one_line(error, *parts):
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message


def write_shapes(folder, count):
    folder.mkdir()
    for number in range(count):
        outline = naca_outline(NacaParameters(0.06 + 0.01 * number, 0.02, 0.4))[::10]
        lines = [f"NACA {number}", *(f"{x:.6f} {y:.6f}" for x, y in outline)]
        (folder / f"shape{number}.dat").write_text("\n".join(lines))
    return folder


def test_splits_have_their_numbers_of_samples_and_share_no_shape(tmp_path):
    splits = load(tmp_path, {"test": 3, "validation": 2, "train": 5})
    assert list(splits) == ["train", "validation", "test"]
    seen = set()
    for name, count in SPLITS.items():
        arrays = splits[name]
        assert len(arrays) == len(arrays.shape) == count
        shapes = set(arrays.shape.tolist())
        assert len(shapes) == -(-count // 2)
        assert not shapes & seen
        seen |= shapes
        # Not only by name.
        outlines = np.unique(arrays.geometry.reshape(count, -1), axis=0)
        assert len(outlines) == len(shapes)
    assert len(np.unique(np.concatenate([a.geometry for a in splits.values()]), axis=0)) == 6


def test_shape_numbers_are_disjoint():
    numbers = shape_numbers({"train": 11, "validation": 1, "test": 5}, 5)
    assert numbers == {"train": range(3), "validation": range(3, 4), "test": range(4, 5)}


@pytest.mark.parametrize(("split", "index", "number"), [("train", 3, 1), ("test", 2, 5)])
def test_any_sample_can_be_made_alone(tmp_path, split, index, number):
    arrays = load(tmp_path, max_points=90)[split]
    parameters = sample_naca(SETTINGS.seed, number)
    solver = solve_airfoil(panel_nodes(naca_outline(parameters), 32))
    sample = sample_of(replace(SETTINGS, max_points=90), solver, number, index % 2)
    np.testing.assert_array_equal(arrays.positions[arrays.rows(index)], sample.positions)
    np.testing.assert_array_equal(arrays.geometry[index], sample.geometry)
    # The sheet's strength is summed by the machine's linear algebra, in an order of its own.
    np.testing.assert_allclose(arrays.fields[arrays.rows(index)], sample.fields, rtol=1e-5)
    assert arrays.angle_of_attack[index] == sample.angle_of_attack


def test_angles_and_lengths_fill_their_ranges(tmp_path):
    arrays = load(tmp_path, {"train": 60}, max_points=90, min_angle=-2.0, max_angle=4.0)["train"]
    lengths = np.diff(arrays.offsets)
    assert 60 <= lengths.min() < 66
    assert 84 < lengths.max() <= 90
    assert -2.0 <= arrays.angle_of_attack.min() < -1.5
    assert 3.5 < arrays.angle_of_attack.max() <= 4.0
    assert len(np.unique(arrays.angle_of_attack)) == 60
    degrees = np.radians(arrays.angle_of_attack)
    np.testing.assert_allclose(
        arrays.global_embedding[:, 0], np.stack([np.cos(degrees), np.sin(degrees)], -1), rtol=1e-6
    )


def test_all_samples_have_the_same_number_of_points_by_default(tmp_path):
    assert (np.diff(load(tmp_path)["train"].offsets) == 60).all()


def test_seed_changes_shapes_angles_and_points(tmp_path):
    first, second = load(tmp_path)["test"], load(tmp_path, seed=6)["test"]
    assert not set(first.shape.tolist()) & set(second.shape.tolist())
    assert (first.angle_of_attack != second.angle_of_attack).all()
    assert (first.positions[first.rows(0)] != second.positions[second.rows(0)])[40:, :2].all()


def test_second_call_reads_the_cache_and_does_not_solve(tmp_path, monkeypatch):
    made = load(tmp_path / "new" / "folder", max_points=90)

    def refuse(_):
        raise AssertionError("solved again")

    monkeypatch.setattr(airfoil_cache, "solve_airfoil", refuse)
    assert_equal(made, load(tmp_path / "new" / "folder", max_points=90))
    assert cache_file(tmp_path / "new" / "folder").name.startswith("airfoil_naca_")


@pytest.mark.parametrize(
    "changes",
    [
        {"splits": {"train": 6, "validation": 2, "test": 3}},
        {"points": 61},
        {"max_points": 61},
        {"surface_points": 34},
        {"angles": 3},
        {"min_angle": -4.0},
        {"max_angle": 14.0},
        {"seed": 6},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_settings_have_a_cache_of_their_own(tmp_path, changes):
    load(tmp_path)
    load(tmp_path, **changes)
    assert len(list(tmp_path.iterdir())) == 2


def test_equal_numbers_of_another_type_have_the_same_cache(tmp_path):
    load(tmp_path)
    load(tmp_path, min_angle=-5, points=np.int64(60), seed=np.int32(5))
    assert len(list(tmp_path.iterdir())) == 1


def test_progress_is_drawn_when_asked(tmp_path, capsys):
    load_airfoil(SETTINGS, SPLITS, tmp_path)
    assert "10/10" in capsys.readouterr().err


def test_unsolved_shape_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(airfoil_flow, "RESIDUAL_LIMIT", -1.0)
    with pytest.raises(RuntimeError, match=r"airfoil naca 0\.\d+ .*: expected a relative") as error:
        load(tmp_path)
    assert_one_line(error)
    assert not list(tmp_path.iterdir())


def test_any_flipped_bit_is_named_or_harmless(tmp_path):
    made = load(tmp_path)
    path = cache_file(tmp_path)
    content = path.read_bytes()
    messages = []
    for position in range(0, len(content), 307):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        try:
            read = load(tmp_path)  # a date in the archive's directory may change unseen
        except ValueError as error:
            messages.append(str(error))
        else:
            assert_equal(made, read)
    assert len(messages) > 60
    for message in messages:
        assert "\n" not in message
        assert message.startswith(f"airfoil cache {path}: ")
        assert message.endswith("delete it to make it again")


def test_altered_arrays_in_a_sound_archive_are_named(tmp_path):
    load(tmp_path)
    path = cache_file(tmp_path)
    entries = dict(np.load(path))
    entries["fields"][0, 2] += 1.0
    np.savez(path, **entries)
    with pytest.raises(ValueError, match="SHA-256") as error:
        load(tmp_path)
    assert_one_line(error, path, "delete it to make it again")


def test_cache_of_another_problem_is_named(tmp_path):
    load(tmp_path / "one", seed=5)
    load(tmp_path / "two", seed=6)
    path = cache_file(tmp_path / "two")
    shutil.copy(cache_file(tmp_path / "one"), path)
    with pytest.raises(ValueError, match=r'"seed": 6.*"seed": 5') as error:
        load(tmp_path / "two", seed=6)
    assert_one_line(error, path, "delete it to make it again")


def test_files_are_drawn_in_random_order_and_none_is_in_two_splits(tmp_path):
    folder = write_shapes(tmp_path / "shapes", 8)
    drawn = []
    for seed in (0, 1):
        splits = load(tmp_path / "cache", shapes="uiuc", uiuc_dir=str(folder), seed=seed)
        names = [
            name for arrays in splits.values() for name in dict.fromkeys(arrays.shape.tolist())
        ]
        assert len(names) == len(set(names)) == 6
        assert all(name.startswith("shape") for name in names)
        drawn.append(names)
    assert drawn[0] != drawn[1]
    assert drawn[0] != sorted(drawn[0])


def test_cache_follows_the_files_and_not_their_folder(tmp_path, monkeypatch):
    folder = write_shapes(tmp_path / "shapes", 6)
    made = load(tmp_path / "cache", shapes="uiuc", uiuc_dir=str(folder))
    moved = folder.rename(tmp_path / "moved")
    assert_equal(made, load(tmp_path / "cache", shapes="uiuc", uiuc_dir=str(moved)))
    assert len(list((tmp_path / "cache").iterdir())) == 1
    (moved / "shape0.dat").write_text((moved / "shape0.dat").read_text() + "\nA remark.\n")
    load(tmp_path / "cache", shapes="uiuc", uiuc_dir=str(moved))
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_too_few_files_are_named(tmp_path):
    folder = write_shapes(tmp_path / "shapes", 5)
    with pytest.raises(
        ValueError, match=r"expected 6 different shapes .* 2 angles .* got 5"
    ) as error:
        load(tmp_path / "cache", shapes="uiuc", uiuc_dir=str(folder))
    assert_one_line(error, folder)


def test_collection_without_its_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.problems.airfoil_files.find_spec", lambda name: None)
    with pytest.raises(
        FileNotFoundError, match=r"data\.shapes=uiuc: expected the package"
    ) as error:
        load(tmp_path, shapes="uiuc")
    assert_one_line(error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shapes": "round"}, "shapes: expected one of naca, uiuc; got 'round'"),
        ({"uiuc_dir": "x"}, "uiuc_dir: expected none with shapes=naca; got one"),
        ({"surface_points": 30}, "surface_points: expected an integer of at least 32, got 30"),
        ({"surface_points": 33}, "surface_points: expected an even number; got 33"),
        ({"points": 32}, "points: expected an integer of at least 33, got 32"),
        ({"max_points": 59}, "max_points: expected an integer of at least 60, got 59"),
        ({"angles": 0}, "angles: expected an integer of at least 1, got 0"),
        ({"seed": -1}, "seed: expected an integer of at least 0, got -1"),
        ({"min_angle": 20.0}, "min_angle, max_angle: expected ascending angles"),
        ({"max_angle": 90.0}, "min_angle, max_angle: expected ascending angles"),
        ({"max_angle": np.nan}, "min_angle, max_angle: expected ascending angles"),
        ({"splits": {"train": 0}}, "splits['train']: expected an integer of at least 1, got 0"),
        ({"splits": {}}, "splits: expected some of"),
    ],
)
def test_bad_argument_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match="expected") as error:
        load(tmp_path, **changes)
    assert_one_line(error, message)
    assert not list(tmp_path.iterdir())


def test_cache_folder_that_is_a_file_is_named(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(NotADirectoryError, match="cache_dir: expected a folder") as error:
        load(path)
    assert_one_line(error, path)
