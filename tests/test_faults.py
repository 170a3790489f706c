"""Faults that a run survives, or ends by with one line and its last good state."""

import contextlib
import errno
import json
import re
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import TINY, assert_one_line, call
from saved import saved_steps

from experiments import evaluate, train
from experiments.data.in_memory import GridSplit
from experiments.fingerprints import fingerprints
from experiments.training.checkpoints import Checkpoints
from experiments.training.faults import only_run_in
from experiments.training.logs import RunLog, read_log

RUN = [*TINY, "train.batch_size=4", "train.checkpoint_every=1", "train.keep=9"]
STEPS = 6


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(cache, tmp_path):
    """Trains in one folder, with these changes."""

    def run(*overrides):
        folder = tmp_path / "run"
        where = [f"data.cache_dir={cache}", f"hydra.run.dir={folder}", f"train.steps={STEPS}"]
        return folder, call(train.main, *RUN, *where, *overrides)

    return run


@pytest.fixture(scope="module")
def sound(cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    where = [f"data.cache_dir={cache}", f"hydra.run.dir={folder}", f"train.steps={STEPS}"]
    result = call(train.main, *RUN, *where)
    assert result.code == 0, result.err
    return folder


def spoil(monkeypatch, spoiled: int, how) -> None:
    """Has one sample of the training split spoiled when it is read."""
    read = GridSplit.read

    def bad(self, index, windows, seeds=(0,)):
        sample = read(self, index, windows, seeds)
        return how(sample) if index == spoiled and len(self) == 16 else sample

    monkeypatch.setattr(GridSplit, "read", bad)


def not_a_number(sample):
    cloud = sample.clouds[0]
    return sample._replace(clouds=(cloud._replace(fx=np.full_like(cloud.fx, np.nan)),))


def unreadable(sample):
    raise ValueError("sample 7: expected readable values; got damaged ones")


def weights_of(folder: Path, step: int) -> dict[str, int]:
    """Fingerprints of the weights of a checkpoint."""
    extra = json.loads((folder / "checkpoints" / str(step) / "extra" / "metadata").read_text())
    prints = extra["fingerprints"]
    return {name: number for name, number in prints.items() if name.startswith(".params")}


# Losses that are not finite ----------------------------------------------------------------------


def test_a_step_that_is_not_finite_ends_the_run_at_its_last_good_state(run, sound, monkeypatch):
    spoil(monkeypatch, 7, not_a_number)
    folder, result = run()
    assert result.code == 2
    line = result.err.rpartition("error: ")[2]
    assert_one_line(line, "expected a finite loss", "samples", "is kept", "on_nonfinite=skip")
    step = int(re.search(r"at step (\d+)", line).group(1))
    assert "7" in re.search(r"samples ([\d, ]+);", line).group(1).split(", ")
    batch = np.load(folder / f"nonfinite_step_{step}.npz")
    assert sum(np.isnan(batch[name]).any() for name in batch.files) == 1
    # Whether or not it was due, the state before it was saved, and can be evaluated.
    if step > 1:
        assert weights_of(folder, step - 1) == weights_of(sound, step - 1)


def test_a_run_goes_on_where_such_steps_may_be_skipped(run, monkeypatch):
    spoil(monkeypatch, 7, not_a_number)
    run()
    folder, result = run("train.on_nonfinite=skip")
    assert result.code == 0, result.err
    assert len(re.findall(r"step \d+ was skipped", result.out)) >= 1
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert np.isfinite(summary["test_relative_l2"])
    for row in map(json.loads, (folder / "log.jsonl").read_text().splitlines()):
        assert all(np.isfinite(value) for value in row.values())


def test_more_skipped_steps_than_allowed_end_the_run(run, monkeypatch):
    spoil(monkeypatch, 7, not_a_number)
    _, result = run("train.on_nonfinite=skip", "train.max_skipped=0")
    assert result.code == 2
    assert_one_line(result.err.rpartition("error: ")[2], "expected a finite loss", "(1 so far)")


# Samples that cannot be read ---------------------------------------------------------------------


def test_a_sample_that_cannot_be_read_ends_the_run_by_name(run, monkeypatch):
    spoil(monkeypatch, 7, unreadable)
    _, result = run()
    assert result.code == 2
    assert_one_line(result.err.rpartition("error: ")[2], "sample 7: expected readable values")


def test_a_sample_that_cannot_be_read_may_be_skipped(run, monkeypatch):
    spoil(monkeypatch, 7, unreadable)
    folder, result = run("train.on_bad_sample=skip")
    assert result.code == 0, result.err
    assert result.out.count("sample 7: expected readable values; got damaged ones") == 1
    assert json.loads((folder / "summary.json").read_text())["steps"] == STEPS


# Folders -----------------------------------------------------------------------------------------


def test_a_second_run_in_a_folder_is_refused(run, tmp_path):
    with only_run_in(tmp_path / "run"):
        folder, result = run()
        assert result.code == 2
        # Behind the progress of data that is made here, if it was not before.
        last = result.err.strip().splitlines()[-1]
        assert "expected a folder that no other run is in; another process" in last
        assert {path.name for path in folder.iterdir()} == {".lock"}
    _, result = run("train.steps=1")
    assert result.code == 0, result.err


# Checkpoints -------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("pattern", "harm"),
    [
        ("state/d/*", flip),
        ("state/d/*", Path.unlink),
        ("state/d/*", truncate),
        ("extra/metadata", truncate),
        ("metrics/metrics", truncate),
    ],
    ids=["flipped", "missing", "truncated", "extra", "metrics"],
)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(
    pattern, harm, sound, run, tmp_path
):
    folder = tmp_path / "run"
    shutil.copytree(sound, folder)
    for path in (folder / "checkpoints" / str(STEPS)).glob(pattern):
        harm(path)
    folder, result = run()
    assert result.code == 0, result.err
    assert f"checkpoints/{STEPS}: the checkpoint is damaged: " in result.out
    assert "going on from step 5 of 6" in result.out
    assert (folder / "checkpoints" / f"damaged-{STEPS}").is_dir()
    assert weights_of(folder, STEPS) == weights_of(sound, STEPS)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_evaluation_uses_the_one_before_a_damaged_checkpoint(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints" / str(STEPS)).glob("state/d/*"):
        flip(path)
    result = call(evaluate.main, tmp_path / "run")
    assert result.code == 0
    assert_one_line(result.err, "the checkpoint is damaged", "the one before it is used")
    assert re.search(r"^step +5$", result.out, flags=re.MULTILINE)


def test_a_fingerprint_tells_one_bit(sound):
    values = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    arrays = {
        "float32": jnp.asarray(values),
        "bfloat16": jnp.asarray(values, jnp.bfloat16),
        "int32": jnp.arange(5),
        "bool": jnp.asarray(values > 0),
        "scalar": jnp.float32(3),
    }
    before = fingerprints(arrays)
    for name, array in arrays.items():
        words = np.array(array).reshape(-1)
        words.view(np.uint8)[-1] ^= 1
        after = fingerprints(arrays | {name: jnp.asarray(words.reshape(array.shape))})
        assert {other for other in before if before[other] != after[other]} == {name}
    swapped = jnp.asarray(values[::-1])
    assert fingerprints({"float32": swapped})["float32"] != before["float32"]


# Full disks --------------------------------------------------------------------------------------


def test_a_run_goes_on_where_a_checkpoint_cannot_be_saved(run, monkeypatch):
    import orbax.checkpoint as ocp

    save = ocp.CheckpointManager.save

    def full_at_4(self, step, *arguments, **options):
        if step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(self, step, *arguments, **options)

    monkeypatch.setattr(ocp.CheckpointManager, "save", full_at_4)
    folder, result = run()
    assert result.code == 0, result.err
    assert "checkpoints/4: could not be saved: [Errno 28] No space left" in result.out
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    assert kept == {"1", "2", "3", "5", "6"}


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(place)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True, check=False).returncode
    ):
        pytest.skip("expected a system where a small disk can be mounted")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_costs_no_earlier_checkpoint(small_disk):
    checkpoints = Checkpoints(small_disk, keep=1)
    small = {"a": jnp.ones(10)}
    large = {"a": jax.random.normal(jax.random.key(0), (200_000,))}
    assert checkpoints.save(1, small, {}, 0.5) == []
    checkpoints.save(2, large, {}, 0.4)
    assert "2: could not be saved" in checkpoints.settle()
    assert checkpoints.latest() == 1
    assert {path.name for path in checkpoints.folder.iterdir()} == {"1"}
    assert checkpoints.save(3, small, {}, 0.3) == []
    assert checkpoints.settle() is None
    assert checkpoints.latest() == 3
    checkpoints.save(4, large, {}, 0.2)
    checkpoints.close()
    assert saved_steps(small_disk) == [3]


def test_a_full_disk_costs_rows_of_the_log_and_nothing_else(small_disk, capsys):
    log = RunLog(small_disk, 0, 1000, 1)
    log.write(1, {"loss": 1.0})
    ballast = (small_disk / "ballast").open("wb", buffering=0)
    with ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(4096))
    # More than buffers hold.
    for step in range(2, 1000):
        log.write(step, {"loss": 1.0, "gradient_norm": 1.0})
    log.close()
    assert capsys.readouterr().out.count("could not be written: No space left on device") == 1
    (small_disk / "ballast").unlink()
    before = read_log(small_disk)
    assert before[0] == {"step": 1, "loss": 1.0}
    assert len(before) < 200
    RunLog(small_disk, 1, 1000, 1).close()
    assert read_log(small_disk) == before[:1]
