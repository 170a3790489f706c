"""Darcy flow: the solver, the random medium, the cache and the published files."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.io

from experiments import darcy

SPLITS = {"train": 3, "validation": 1, "test": 2}


def relative_error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def load(cache_dir, resolution=8, splits=SPLITS, seed=5, **options):
    return darcy.load_darcy(resolution, splits, seed, cache_dir, progress=False, **options)


def cache_file(cache_dir):
    (path,) = Path(cache_dir).iterdir()
    return path


def assert_one_line(error, *parts):
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message


# Solver ------------------------------------------------------------------------------------------


def layered_solution(resolution, left, right, terms=60):
    """Pressure for permeability `left` where x < 1/2 and `right` elsewhere, a sine series in y.

    Each mode solves `a (X'' - w^2 X) = -f` in both halves, with X and a X' continuous between.
    """
    x = y = (np.arange(resolution) + 0.5) / resolution
    total = np.zeros((resolution, resolution))
    for k in range(1, 2 * terms, 2):
        w, f = np.pi * k, 4.0 / (np.pi * k)
        decay = np.exp(-w / 2)
        # X = f/(a w^2) + A exp(-w x) + B exp(-w (1/2 - x)) on the left, likewise on the right
        # with x - 1/2 and 1 - x: exponents that stay negative.
        conditions = np.array(
            [
                [1.0, decay, 0.0, 0.0],
                [0.0, 0.0, decay, 1.0],
                [decay, 1.0, -1.0, -decay],
                [-left * decay, left, right, -right * decay],
            ]
        )
        particular = f / w**2 / np.array([left, right])
        constants = np.linalg.solve(
            conditions, [-particular[0], -particular[1], particular[1] - particular[0], 0.0]
        )
        in_left = x < 0.5
        x_left, x_right = x[in_left], x[~in_left]
        profile = np.concatenate(
            [
                particular[0]
                + constants[0] * np.exp(-w * x_left)
                + constants[1] * np.exp(-w * (0.5 - x_left)),
                particular[1]
                + constants[2] * np.exp(-w * (x_right - 0.5))
                + constants[3] * np.exp(-w * (1.0 - x_right)),
            ]
        )
        total += np.outer(profile, np.sin(w * y))
    return total


def layered_permeability(resolution, left, right):
    return np.repeat([left, right], resolution // 2)[:, None] * np.ones(resolution)


@pytest.mark.parametrize(("left", "right"), [(1.0, 1.0), (12.0, 3.0)])
def test_error_falls_with_the_square_of_the_spacing(left, right):
    errors = [
        relative_error(
            darcy.solve_darcy(layered_permeability(r, left, right)),
            layered_solution(r, left, right),
        )
        for r in (16, 32, 64)
    ]
    assert errors[-1] < 2e-3
    for coarse, fine in pairwise(errors):
        # Second order asymptotically; arithmetic face means would give a ratio near 2.
        assert 3.6 < coarse / fine < 4.4


def test_series_solution_has_the_known_peak():
    # -Laplace u = 1 on the unit square: u(1/2, 1/2) = 0.0736713...; guards the reference itself.
    assert layered_solution(101, 1.0, 1.0)[50, 50] == pytest.approx(0.0736713, abs=1e-6)


def test_layers_act_along_either_axis():
    permeability = layered_permeability(12, 12.0, 3.0)
    across = darcy.solve_darcy(permeability.T)
    np.testing.assert_allclose(across, darcy.solve_darcy(permeability).T, rtol=1e-12)


def test_every_cell_balances_its_flux():
    resolution = 6
    permeability = np.random.default_rng(0).uniform(1.0, 20.0, (resolution, resolution))
    pressure = darcy.solve_darcy(permeability)
    spacing = 1.0 / resolution
    for i in range(resolution):
        for j in range(resolution):
            outflow = 0.0
            for k, m in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
                if 0 <= k < resolution and 0 <= m < resolution:
                    # Two half cells in series.
                    resistance = spacing / 2 / permeability[i, j] + spacing / 2 / permeability[k, m]
                    outflow += spacing * (pressure[i, j] - pressure[k, m]) / resistance
                else:
                    outflow += spacing * pressure[i, j] * permeability[i, j] / (spacing / 2)
            assert outflow == pytest.approx(spacing**2, rel=1e-11)


def test_flux_through_the_boundary_equals_the_forcing():
    permeability = darcy.sample_permeability(24, seed=1, index=0)
    flux = 2.0 * permeability * darcy.solve_darcy(permeability)
    boundary = flux[0].sum() + flux[-1].sum() + flux[:, 0].sum() + flux[:, -1].sum()
    assert boundary == pytest.approx(1.0, rel=1e-11)


def test_pressure_scales_inversely_with_permeability():
    permeability = darcy.sample_permeability(16, seed=1, index=0)
    np.testing.assert_allclose(
        darcy.solve_darcy(1e3 * permeability), darcy.solve_darcy(permeability) / 1e3, rtol=1e-12
    )


@pytest.mark.parametrize(
    "permeability",
    [np.ones(16), np.ones((4, 5)), np.ones((3, 3)), np.zeros((4, 4)), np.full((4, 4), np.nan)],
    ids=["flat", "oblong", "small", "zero", "nan"],
)
def test_bad_permeability_is_named(permeability):
    with pytest.raises(ValueError, match="permeability: expected") as error:
        darcy.solve_darcy(permeability)
    assert_one_line(error, "got")


def test_unsolved_sample_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(darcy, "_RESIDUAL_LIMIT", -1.0)
    with pytest.raises(RuntimeError, match=r"sample 0 .*expected a relative residual") as error:
        load(tmp_path)
    assert_one_line(error, "seed 5")
    assert not list(tmp_path.iterdir())


# Random medium -----------------------------------------------------------------------------------


def test_permeability_takes_two_values():
    assert set(np.unique(darcy.sample_permeability(32, 0, 0))) == {3.0, 12.0}


@pytest.mark.parametrize("index", range(4))
def test_sample_is_one_function_on_every_grid(index):
    # The centres of every third cell of the fine grid are those of the coarse grid.
    coarse = darcy.sample_permeability(21, seed=7, index=index)
    fine = darcy.sample_permeability(63, seed=7, index=index)
    np.testing.assert_array_equal(coarse, fine[1::3, 1::3])


def test_pressure_converges_to_one_limit_as_the_grid_is_refined():
    coarse = darcy.solve_darcy(darcy.sample_permeability(43, seed=7, index=1))
    fine = darcy.solve_darcy(darcy.sample_permeability(129, seed=7, index=1))
    assert relative_error(coarse, fine[1::3, 1::3]) < 0.03


def test_mean_permeability_is_halfway_between_the_two_values():
    means = [darcy.sample_permeability(16, 0, index).mean() for index in range(100)]
    # The field is symmetric about zero, so the expected mean is 7.5; four standard errors.
    assert abs(np.mean(means) - 7.5) < 4 * np.std(means) / np.sqrt(len(means))


def test_samples_differ_by_seed_and_index_and_are_reproducible():
    first = darcy.sample_permeability(16, 3, 4)
    np.testing.assert_array_equal(first, darcy.sample_permeability(16, 3, 4))
    assert (first != darcy.sample_permeability(16, 4, 4)).any()
    assert (first != darcy.sample_permeability(16, 3, 5)).any()
    assert (first != darcy.sample_permeability(16, 4, 3)).any()


def test_cell_centres_follow_the_arrays():
    np.testing.assert_allclose(
        darcy.cell_centres(4)[:5],
        [[0.125, 0.125], [0.125, 0.375], [0.125, 0.625], [0.125, 0.875], [0.375, 0.125]],
    )
    assert darcy.cell_centres(4).shape == (16, 2)
    assert darcy.cell_centres(4).dtype == np.float32


# Data set and cache ------------------------------------------------------------------------------


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

    monkeypatch.setattr(darcy, "solve_darcy", refuse)
    read = load(tmp_path / "new" / "folder")
    for name in SPLITS:
        np.testing.assert_array_equal(made[name].permeability, read[name].permeability)
        np.testing.assert_array_equal(made[name].pressure, read[name].pressure)
    assert cache_file(tmp_path / "new" / "folder").name == "darcy_r8_seed5_n6.npz"


def test_progress_is_drawn_when_asked(tmp_path, capsys):
    darcy.load_darcy(8, SPLITS, 0, tmp_path)
    assert "6/6" in capsys.readouterr().err


def test_workers_make_the_same_samples_and_never_import_the_script(tmp_path):
    # A script without a main guard: spawned workers that imported it would start it over.
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from experiments import darcy\n"
        "assert 'jax' not in sys.modules\n"
        "Path(sys.argv[1]).touch(exist_ok=False)\n"
        "darcy._CELLS_PER_WORKER = 1\n"
        f"darcy.load_darcy(8, {SPLITS}, 5, Path(sys.argv[2]), processes=2, progress=False)\n"
    )
    root = Path(darcy.__file__).parents[1]
    subprocess.run(
        [sys.executable, script, tmp_path / "started", tmp_path / "workers"],
        check=True,
        env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        timeout=60,
    )
    by_workers, in_process = load(tmp_path / "workers"), load(tmp_path / "here")
    for name in SPLITS:
        np.testing.assert_array_equal(by_workers[name].pressure, in_process[name].pressure)


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

    monkeypatch.setattr(*((darcy.np, "savez") if step == "savez" else (darcy.os, "fsync")), fail)
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

    monkeypatch.setattr(darcy.np, "savez", write_while_another_writes)
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
        ({"processes": 0}, "processes: expected an integer of at least 1, got 0"),
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


def test_bad_sample_index_is_named():
    with pytest.raises(ValueError, match="index: expected an integer of at least 0, got -1"):
        darcy.sample_permeability(8, 0, -1)


def test_cache_folder_that_is_a_file_is_named(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(NotADirectoryError, match="cache_dir: expected a folder") as error:
        load(path)
    assert_one_line(error, path)


# Published files ---------------------------------------------------------------------------------


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
    splits = darcy.load_darcy_mat(
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
    return darcy.load_darcy_mat(
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
