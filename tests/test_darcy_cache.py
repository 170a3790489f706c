"""Darcy data sets: the samples, their splits, and the cache on disk."""

from pathlib import Path

import numpy as np
import pytest

from experiments.problems import array_cache, darcy, darcy_cache

SPLITS = {"train": 3, "validation": 1, "test": 2}


def load(cache_dir, resolution=8, splits=SPLITS, seed=5, **options):
    return darcy_cache.load_darcy(resolution, splits, seed, cache_dir, progress=False, **options)


def cache_file(cache_dir):
    (path,) = Path(cache_dir).iterdir()
    return path


def assert_one_line(error, *parts):
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message


def test_splits_are_consecutive_disjoint_samples(tmp_path):
    splits = load(tmp_path, splits={"test": 2, "validation": 1, "train": 3})
    assert list(splits) == ["train", "validation", "test"]
    start = 0
    for name, count in SPLITS.items():
        arrays = splits[name]
        assert arrays.permeability.shape == arrays.pressure.shape == (count, 8, 8)
        assert arrays.permeability.dtype == arrays.pressure.dtype == np.float32
        np.testing.assert_array_equal(arrays.coordinates, darcy.cell_centres(8))
        for row in range(count):
            permeability = darcy.sample_permeability(8, 5, start + row)
            np.testing.assert_array_equal(arrays.permeability[row], permeability)
            np.testing.assert_array_equal(
                arrays.pressure[row], darcy.solve_darcy(permeability).astype(np.float32)
            )
        start += count


def test_second_call_reads_the_cache_and_does_not_solve(tmp_path, monkeypatch):
    made = load(tmp_path / "new" / "folder")

    def refuse(_):
        raise AssertionError("solved again")

    monkeypatch.setattr(darcy_cache, "solve_darcy", refuse)
    read = load(tmp_path / "new" / "folder")
    for name in SPLITS:
        np.testing.assert_array_equal(made[name].permeability, read[name].permeability)
        np.testing.assert_array_equal(made[name].pressure, read[name].pressure)
    assert cache_file(tmp_path / "new" / "folder").name == "darcy_r8_seed5_n6.npz"


def test_progress_is_drawn_when_asked(tmp_path, capsys):
    darcy_cache.load_darcy(8, SPLITS, 0, tmp_path)
    assert "6/6" in capsys.readouterr().err


def test_unsolved_sample_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(darcy, "_RESIDUAL_LIMIT", -1.0)
    with pytest.raises(RuntimeError, match=r"sample 0 .*expected a relative residual") as error:
        load(tmp_path)
    assert_one_line(error, "seed 5")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kept_fraction", [0.0, 0.3, 0.99])
def test_truncated_cache_is_named(tmp_path, kept_fraction):
    load(tmp_path)
    path = cache_file(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept_fraction * len(content))])
    with pytest.raises(ValueError, match="truncated or foreign") as error:
        load(tmp_path)
    assert_one_line(error, path, "delete it to make it again")


def test_any_flipped_bit_is_named_or_harmless(tmp_path):
    made = load(tmp_path)
    path = cache_file(tmp_path)
    content = path.read_bytes()
    messages = []
    for position in range(0, len(content), 61):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        try:
            read = load(tmp_path)  # a date in the archive's directory may change unseen
        except ValueError as error:
            messages.append(str(error))
        else:
            for name in SPLITS:
                np.testing.assert_array_equal(made[name].pressure, read[name].pressure)
    assert len(messages) > 40
    for message in messages:
        assert "\n" not in message
        assert str(path) in message
        assert message.endswith("delete it to make it again")


def test_altered_arrays_in_a_sound_archive_are_named(tmp_path):
    load(tmp_path)
    path = cache_file(tmp_path)
    entries = dict(np.load(path))
    entries["pressure"][0, 0, 0] += 1.0
    np.savez(path, **entries)
    with pytest.raises(ValueError, match="SHA-256") as error:
        load(tmp_path)
    assert_one_line(error, path, "delete it to make it again")


def test_cache_of_another_problem_is_named(tmp_path):
    load(tmp_path, seed=5)
    path = cache_file(tmp_path)
    path = path.rename(path.with_name("darcy_r8_seed6_n6.npz"))
    with pytest.raises(ValueError, match=r'"seed": 6.*"seed": 5') as error:
        load(tmp_path, seed=6)
    assert_one_line(error, path, "delete it to make it again")


@pytest.mark.parametrize("kind", ["text", "npy", "npz", "pickle", "folder"])
def test_foreign_cache_is_named(tmp_path, kind):
    path = tmp_path / "darcy_r8_seed5_n6.npz"
    if kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("not an archive")
    elif kind == "npy":
        with path.open("wb") as file:
            np.save(file, np.ones(3))
    elif kind == "npz":
        np.savez(path, other=np.ones(3))
    else:
        np.savez(path, meta=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="Darcy cache") as error:
        load(tmp_path)
    assert_one_line(error, path, "delete it to make it again")


@pytest.mark.parametrize("step", ["savez", "fsync"])
def test_failed_write_leaves_no_cache(tmp_path, monkeypatch, step):
    def fail(file, **_):
        if step == "savez":
            file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(
        *((array_cache.np, "savez") if step == "savez" else (array_cache.os, "fsync")), fail
    )
    with pytest.raises(OSError, match="disk full"):
        load(tmp_path)
    assert not list(tmp_path.iterdir())


def test_second_writer_of_one_cache_replaces_it_whole(tmp_path, monkeypatch):
    savez, nested = np.savez, []

    def write_while_another_writes(file, **entries):
        if not nested:
            nested.append(True)
            load(tmp_path)  # finishes first, under the same name
        savez(file, **entries)

    monkeypatch.setattr(array_cache.np, "savez", write_while_another_writes)
    made = load(tmp_path)
    read = load(tmp_path)
    assert nested
    assert cache_file(tmp_path).name == "darcy_r8_seed5_n6.npz"
    np.testing.assert_array_equal(made["test"].pressure, read["test"].pressure)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"resolution": 3}, "resolution: expected an integer of at least 4, got 3"),
        ({"resolution": 8.0}, "resolution: expected an integer of at least 4, got 8.0"),
        ({"seed": -1}, "seed: expected an integer of at least 0, got -1"),
        ({"splits": {"train": 0}}, "splits['train']: expected an integer of at least 1, got 0"),
        ({"splits": {"train": True}}, "splits['train']: expected an integer"),
        ({"splits": {"train": 1, "tset": 1}}, "got ['train', 'tset']"),
        ({"splits": {}}, "splits: expected some of"),
    ],
)
def test_bad_argument_is_named(tmp_path, options, part):
    with pytest.raises(ValueError, match="expected") as error:
        load(tmp_path, **options)
    assert_one_line(error, part)
    assert not list(tmp_path.iterdir())


def test_cache_folder_that_is_a_file_is_named(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(NotADirectoryError, match="cache_dir: expected a folder") as error:
        load(path)
    assert_one_line(error, path)
