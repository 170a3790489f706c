"""The commands: what a run leaves in its folder, and how bad input ends."""

import json
import math
import shutil
import signal

import matplotlib.pyplot as plt
import pytest
from commands import TINY, assert_one_line, call, compose, printed_metrics, start, wait

from experiments import evaluate, train
from experiments.configuration import configs
from experiments.configuration.sweeps import swept
from experiments.datasets import load_dataset
from experiments.training.logs import RunLog, read_log

STEPS = 4
RUN = [
    *TINY,
    f"train.steps={STEPS}",
    "train.checkpoint_every=2",
    "train.batch_size=4",
    "mesh.points=2",
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def sweep(cache, tmp_path_factory):
    """The folder of a sweep over the depth, on 2 devices, and what the command printed."""
    place = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        # Where a sweep goes by itself is of the configuration, too.
        patch.chdir(place)
        result = call(train.main, "-m", *RUN, f"data.cache_dir={cache}", "model.n_layers=1,2")
    assert result.code == 0, result.err
    return place / "runs" / "darcy_flare_sweep", result


@pytest.fixture(scope="module")
def run(sweep):
    """The folder of one run."""
    return sweep[0] / "model.n_layers-1"


def summary_of(folder) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_sweep_makes_one_run_for_each_value(sweep):
    folder, result = sweep
    jobs = sorted(path for path in folder.iterdir() if path.is_dir())
    assert [path.name for path in jobs] == ["model.n_layers-1", "model.n_layers-2"]
    for layers in (1, 2):
        job = folder / f"model.n_layers-{layers}"
        assert configs.load(job).model.n_layers == layers
        assert f"runs/{folder.name}/{job.name}: test relative L2" in result.out
    parameters = [summary_of(path)["parameters"] for path in jobs]
    assert parameters[0] < parameters[1]


@pytest.mark.parametrize(
    ("overrides", "arguments", "name"),
    [
        (["a=1", "b=2"], ["-m", "a=1,2", "b=2"], "a-1"),
        (["a=1", "b=x", "c=3"], ["a=1,2", "c=3", "b=x,y", "--multirun"], "a-1_b-x"),
        (["a=3"], ["a=range(1,5)"], "a-3"),
        (["+a=/data/x"], ["+a=/data/x,/data/y"], "a-_data_x"),
        (["a=1"], ["-m", "a=1"], "single"),
    ],
)
def test_job_of_a_sweep_is_named_by_what_is_swept(overrides, arguments, name):
    assert swept(overrides, arguments) == name


def test_run_leaves_its_files_and_nothing_else(run):
    assert {path.name for path in run.iterdir()} == {
        "config.yaml",
        "dataset.json",
        ".lock",
        "summary.json",
        "predictions.png",
        "log.jsonl",
        "tensorboard",
        "checkpoints",
    }
    (events,) = (run / "tensorboard").iterdir()
    assert events.name.startswith("events.out.tfevents.")
    assert events.stat().st_size > 500
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"2", "4"}


def test_saved_config_is_that_of_the_command_line(run, cache):
    expected = compose(*RUN, f"data.cache_dir={cache}")
    assert configs.load(run) == expected


def test_summary_tells_the_error_the_time_the_versions_and_the_mesh(run):
    summary = summary_of(run)
    assert 0 < summary["test_relative_l2"] < 2
    assert summary["test_samples"] == 6
    assert summary["steps"] == STEPS
    assert summary["best_checkpoint"] in (2, 4)
    assert summary["training_seconds"] > 0
    assert summary["device_mesh"] == "data=1 x points=2 x heads=1 (2 cpu devices)"
    assert {"python", "jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy"} < set(
        summary["versions"]
    )


def test_picture_is_a_png_of_three_samples(run):
    picture = plt.imread(run / "predictions.png", format="png")
    height, width, _ = picture.shape
    assert height > 500
    assert width > 1000
    assert picture.std() > 0.05


def test_log_has_every_step_and_every_validation(run):
    rows = read_log(run)
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "validation_relative_l2" in row] == [2, 4]
    for row in steps:
        assert set(row) == {"step", "loss", "gradient_norm", "learning_rate"}
        assert all(math.isfinite(value) for value in row.values())


def test_training_ends_with_one_line_that_tells_the_error(sweep, run):
    (line,) = [line for line in sweep[1].out.splitlines() if f"/{run.name}: test" in line]
    assert f"test relative L2 {summary_of(run)['test_relative_l2']:.4f} on 6 samples" in line
    assert "summary.json" in line


def test_evaluation_prints_the_test_error_of_the_summary(run):
    result = call(evaluate.main, run)
    assert result.code == 0, result.err
    assert result.err == ""
    metrics = printed_metrics(result.out)
    assert metrics["test_relative_l2"] == f"{summary_of(run)['test_relative_l2']:.6f}"
    assert metrics["test_samples"] == "6"
    assert metrics["step"] == str(STEPS)
    assert metrics["device_mesh"] == summary_of(run)["device_mesh"]
    errors = [float(metrics[f"test_relative_l2{name}"]) for name in ("", "_median", "_max")]
    assert max(errors) == errors[2]


def test_evaluation_on_another_mesh_of_another_process_gives_the_same_error(run):
    mesh = ["mesh.data=2", "mesh.points=2", "mesh.cpu_devices=4"]
    process = start("-m", "experiments.evaluate", run, *mesh)
    result = wait(process)
    assert result.code == 0, result.err
    metrics = printed_metrics(result.out)
    assert metrics["device_mesh"] == "data=2 x points=2 x heads=1 (4 cpu devices)"
    # Printed with 6 decimals.
    expected = summary_of(run)["test_relative_l2"]
    assert float(metrics["test_relative_l2"]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_best_checkpoint_can_be_evaluated(run):
    metrics = evaluate.evaluate(run, [], "best")
    assert metrics["step"] == summary_of(run)["best_checkpoint"]


def test_finished_run_started_again_trains_nothing(run, cache):
    log, before = (run / "log.jsonl").read_bytes(), summary_of(run)
    saved = {path: path.stat().st_mtime_ns for path in (run / "checkpoints").rglob("*")}
    result = call(train.main, *RUN, f"data.cache_dir={cache}", f"hydra.run.dir={run}")
    assert result.code == 0, result.err
    assert f"already trained for {STEPS} steps" in result.out
    assert (run / "log.jsonl").read_bytes() == log
    assert {p: p.stat().st_mtime_ns for p in (run / "checkpoints").rglob("*")} == saved
    assert summary_of(run) == before


def test_signal_at_a_checkpoint_step_does_not_skip_its_validation(
    run, cache, tmp_path, monkeypatch
):
    """A run that goes on would not come back to that step, and its log would lack a row."""
    advance = RunLog.advance

    def advance_and_raise(log):
        advance(log)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(RunLog, "advance", advance_and_raise)
    arguments = [*RUN, f"data.cache_dir={cache}", f"hydra.run.dir={tmp_path}"]
    result = call(train.main, *arguments, "train.checkpoint_every=1")
    assert result.code == 128 + signal.SIGTERM
    assert f"{tmp_path}: stopped by SIGTERM at step 1; start again to go on" in result.out
    loss, validation = read_log(tmp_path)
    assert loss == read_log(run)[0]
    assert validation.keys() == {"step", "validation_relative_l2"}
    assert not (tmp_path / "summary.json").exists()


def assert_refused(result, *parts) -> None:
    assert result.code == 2, result.err
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert_one_line(result.err, *parts)


def test_evaluation_without_a_run_is_one_line(tmp_path):
    folder = tmp_path / "nothing"
    assert_refused(call(evaluate.main, folder), f"{folder}: expected a run's folder with config")
    assert not folder.exists()


def test_evaluation_before_the_first_checkpoint_is_one_line(tmp_path, cache):
    config = compose(*RUN, f"data.cache_dir={cache}")
    configs.save(config, tmp_path)
    load_dataset(config.data).description.save(tmp_path)
    assert_refused(call(evaluate.main, tmp_path), f"{tmp_path}: has no checkpoint yet")


def test_evaluation_on_other_data_than_in_training_is_one_line(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    description = json.loads((copy / "dataset.json").read_text())
    description["streams"][0]["fields"] = ["speed"]
    (copy / "dataset.json").write_text(json.dumps(description))
    problem = "expected data as it was trained on; got points.fields pressure instead of speed"
    assert_refused(call(evaluate.main, copy), f"{copy}: {problem}")


def test_evaluation_with_a_mistyped_override_is_one_line(run):
    assert_refused(call(evaluate.main, run, "mesh.point=2"), "did you mean 'mesh.points'?")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mesh.points=64", "needs 64 devices, but there are only 8 (cpu)"),
        ("mesh.points=3 mesh.data=-1", "8 devices do not divide by the other axes"),
        ("mesh.data=-1 mesh.points=-1", "only one axis may be -1, got data, points"),
        ("mesh.points=0", "mesh axis 'points': expected a positive integer or -1"),
        ("mesh.cpu_devices=2", "mesh.cpu_devices: expected 8, as this process started with; got 2"),
        ("mesh.cpu_devices=0", "mesh.cpu_devices: expected at least 1; got 0"),
    ],
)
def test_impossible_mesh_is_one_line_and_leaves_no_folder(tmp_path, cache, override, message):
    folder = tmp_path / "run"
    arguments = [*RUN, f"data.cache_dir={cache}", f"hydra.run.dir={folder}"]
    assert_refused(call(train.main, *arguments, *override.split()), message)
    assert not (folder / configs.CONFIG_FILE).exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batch_size=17", "train.batch_size: expected at most the 16 training samples"),
        ("mesh.data=8 mesh.points=1", "a batch of 4 samples does not divide"),
        ("model.n_head=3", "n_head: expected a divisor of n_hidden=16; got 3"),
        ("model.act=tahn", "act"),
        ("model.dropout=1", "dropout: expected a rate in [0, 1); got 1.0"),
        ("model.remat=all", "remat: expected one of none, attention, block; got 'all'"),
        ("data.resolution=3", "resolution: expected an integer of at least 4, got 3"),
        ("data.mat_train=x.mat", "expected both or none of mat_train and mat_test; got one"),
        ("data.mat_train=x.mat data.mat_test=y.mat", "x.mat"),
    ],
)
def test_experiment_that_does_not_fit_together_is_one_line(tmp_path, cache, override, message):
    arguments = [*RUN, f"data.cache_dir={cache}", f"hydra.run.dir={tmp_path}"]
    assert_refused(call(train.main, *arguments, *override.split()), message)


def test_diverged_run_is_one_line_and_keeps_its_last_finite_state(tmp_path, cache):
    arguments = [*RUN, f"data.cache_dir={cache}", f"hydra.run.dir={tmp_path / 'run'}"]
    result = call(train.main, *arguments, "optimizer.learning_rate=1e30")
    assert result.code == 2
    # The bar of the training stands before it.
    line = result.err.rpartition("error: ")[2]
    assert_one_line(line, "a finite", "got others at step ")
    bad = int(line.partition("got others at step ")[2].partition(" ")[0])
    saved = [int(path.name) for path in (tmp_path / "run" / "checkpoints").glob("[0-9]*")]
    assert saved == ([bad - 1] if bad > 1 else [])


@pytest.mark.parametrize(
    ("key", "text"), [("hydra.run.dir", "hydra.run.dir: "), ("data.cache_dir", "cache_dir: ")]
)
def test_folder_that_cannot_be_made_is_one_line(key, text, tmp_path, cache):
    (tmp_path / "file").touch()
    folders = {"hydra.run.dir": tmp_path / "run", "data.cache_dir": cache}
    folders[key] = tmp_path / "file" / "folder"
    result = call(train.main, *RUN, *(f"{name}={path}" for name, path in folders.items()))
    assert_refused(result, f"{text}expected a folder that can be made; got", "file/folder")


def test_truncated_cache_is_one_line_for_both_commands(run, tmp_path, cache):
    (file,) = cache.glob("*.npz")
    damaged = tmp_path / file.name
    damaged.write_bytes(file.read_bytes()[:1000])
    override = f"data.cache_dir={tmp_path}"
    message = f"{damaged}", "truncated", "delete it to make it again"
    assert_refused(call(train.main, *RUN, override, f"hydra.run.dir={tmp_path / 'run'}"), *message)
    assert_refused(call(evaluate.main, run, override), *message)
