"""A run that is stopped and killed ends with the same bits as one that is left alone."""

import json
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from commands import TINY, assert_one_line, call, start, wait
from processes import fast
from saved import saved_arrays, saved_steps

from experiments import train
from experiments.training.logs import read_log

STEPS = 40
# All that a training carries from step to step matters: moments, average, random key, loader.
RUN = [
    *TINY,
    "model.dropout=0.1",
    "optimizer.ema_decay=0.9",
    "optimizer.accumulate=2",
    "train.batch_size=4",
    f"train.steps={STEPS}",
    "train.checkpoint_every=6",
    "mesh.points=2",
]


def launch(cache: Path, folder: Path):
    """Starts the experiment in a folder, on two virtual devices. Programs are compiled once."""
    return start(
        "-m",
        "experiments.train",
        *RUN,
        "mesh.cpu_devices=2",
        f"data.cache_dir={cache}",
        f"hydra.run.dir={folder}",
        **fast(cache),
    )


def last_step(folder: Path) -> int:
    return max((row["step"] for row in read_log(folder)), default=0)


def signal_at(process, folder: Path, step: int, number: signal.Signals) -> None:
    """Sends a signal once the log has a step."""
    deadline = time.monotonic() + 100
    while last_step(folder) < step:
        assert process.poll() is None, f"ended before step {step}: {process.communicate()}"
        assert time.monotonic() < deadline, f"no step {step}"
        time.sleep(0.005)
    process.send_signal(number)


def saved_extra(folder: Path, step: int) -> dict:
    return json.loads((folder / "checkpoints" / str(step) / "extra" / "metadata").read_text())


class Stopped:
    """A run that got SIGTERM at some early step, then kill -9, and then was left alone."""

    def __init__(self, cache: Path, folder: Path):
        self.folder = folder
        process = launch(cache, folder)
        signal_at(process, folder, random.randint(1, 9), signal.SIGTERM)
        self.terminated = wait(process)
        self.stopped_at = saved_steps(folder)[-1]

        process = launch(cache, folder)
        signal_at(process, folder, self.stopped_at + random.randint(4, 12), signal.SIGKILL)
        self.killed = wait(process)
        self.killed_with = saved_steps(folder)

        self.finished = wait(launch(cache, folder))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def whole(cache, tmp_path_factory):
    """The folder of a run without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    result = wait(launch(cache, folder))
    assert result.code == 0, result.err
    return folder


@pytest.fixture(scope="module")
def stopped(cache, whole, tmp_path_factory):
    return Stopped(cache, tmp_path_factory.mktemp("stopped"))


def test_sigterm_ends_a_run_with_143_and_says_how_to_go_on(stopped):
    result = stopped.terminated
    assert result.code == 143, result.err
    assert f"stopped by SIGTERM at step {stopped.stopped_at}; start again to go on" in result.out
    assert "Traceback" not in result.err
    assert 0 < stopped.stopped_at < STEPS


def test_next_start_goes_on_from_the_step_of_the_signal(stopped):
    assert stopped.killed.code == -signal.SIGKILL
    assert f"going on from step {stopped.stopped_at} of {STEPS}" in stopped.killed.out


def test_start_after_a_kill_goes_on_from_the_last_whole_checkpoint(stopped):
    assert stopped.finished.code == 0, stopped.finished.err
    assert f"going on from step {stopped.killed_with[-1]} of {STEPS}" in stopped.finished.out
    assert "Traceback" not in stopped.finished.err


def test_interrupted_run_ends_with_the_same_bits(whole, stopped):
    expected, actual = saved_arrays(whole, STEPS), saved_arrays(stopped.folder, STEPS)
    assert expected.keys() == actual.keys()
    for group in (".params", ".average", ".optimizer", ".key", ".statistics", ".step"):
        assert any(path.startswith(group) for path in expected)
    different = [
        path
        for path in expected
        if not np.array_equal(actual[path], expected[path], equal_nan=True)
    ]
    assert not different, f"stopped at {stopped.stopped_at}, killed with {stopped.killed_with}"
    assert saved_extra(stopped.folder, STEPS)["loader"] == saved_extra(whole, STEPS)["loader"]


def test_interrupted_run_has_the_same_log(whole, stopped):
    expected = (whole / "log.jsonl").read_text()
    assert (stopped.folder / "log.jsonl").read_text() == expected
    rows = read_log(whole)
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, STEPS + 1)]
    validated = [row["step"] for row in rows if "validation_relative_l2" in row]
    assert validated == [*range(6, STEPS, 6), STEPS]


def test_interrupted_run_has_the_same_results(whole, stopped):
    first, second = (
        json.loads((folder / "summary.json").read_text()) for folder in (whole, stopped.folder)
    )
    for summary in (first, second):
        assert summary.pop("training_seconds") > 0
        assert summary.pop("waiting_seconds") >= 0
    assert first == second
    picture = "predictions.png"
    assert (whole / picture).read_bytes() == (stopped.folder / picture).read_bytes()
    assert saved_steps(whole) == saved_steps(stopped.folder)


def test_log_of_a_killed_run_may_end_in_half_a_row(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert read_log(tmp_path) == [{"step": 1, "loss": 0.5}]
    assert read_log(tmp_path / "nothing") == []


def in_process(cache, folder, *overrides):
    return call(train.main, *RUN, f"data.cache_dir={cache}", f"hydra.run.dir={folder}", *overrides)


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("model.slice_num=5", "model.slice_num (4 there, 5 here)"),
        ("optimizer.learning_rate=1", "optimizer.learning_rate (0.002 there, 1.0 here)"),
        ("train.steps=99", "train.steps (40 there, 99 here)"),
    ],
)
def test_another_experiment_in_the_folder_is_refused(whole, cache, override, changed):
    content = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    arguments = [*RUN, f"data.cache_dir={cache}", f"hydra.run.dir={whole}"]
    result = call(train.main, *arguments, override)
    assert result.code == 2
    assert result.out == ""
    assert_one_line(result.err, f"error: {whole}: holds a run with another configuration", changed)
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == content
