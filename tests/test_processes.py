"""Several processes train as one does, stop together, and end when one of them is lost."""

import dataclasses
import json
import os
import random
import signal
import stat
import sys
import threading
import time

import numpy as np
import pytest
from commands import assert_one_line, call, compose, free_port, printed_metrics, start, wait
from processes import (
    AIRFOILS,
    DARCY,
    PROCESSES,
    killed,
    last_lines,
    launch,
    start_each,
    wait_for_step,
)
from saved import saved_arrays, saved_steps

from experiments import export, train
from experiments import launch as launcher
from experiments.configuration import configs
from experiments.processes.agreement import Agreement
from experiments.processes.clusters import Cluster, find_cluster
from experiments.processes.lost_processes import LOST_PEER
from experiments.processes.signals import StopSignals
from experiments.training.logs import read_log

STEPS = 30
RUNS = {"flare": DARCY, "geotransolver": AIRFOILS}
# Sizes of the mesh axis; `points` has the other devices.
DATA = (1, 2, 4)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def overrides(model, cache) -> list[str]:
    return [*RUNS[model], f"data.cache_dir={cache}", "mesh.points=-1"]


class Trained:
    """A model trained by four processes and by one, each with eight devices in all."""

    def __init__(self, model, cache, folder):
        run = ["-m", *overrides(model, cache), f"mesh.data={','.join(map(str, DATA))}"]
        # One after another: all meshes by one set of processes.
        self.one, self.four = folder / "one", folder / "four"
        result = call(train.main, *run, f"hydra.sweep.dir={self.one}", "mesh.cpu_devices=8")
        assert result.code == 0, result.err
        self.result = wait(launch(cache, "train", *run, f"hydra.sweep.dir={self.four}"), 800)
        assert self.result.code == 0, last_lines(self.result)

    def folders(self, data):
        return self.one / f"mesh.data-{data}", self.four / f"mesh.data-{data}"


@pytest.fixture(scope="module")
def flare(cache, tmp_path_factory):
    return Trained("flare", cache, tmp_path_factory.mktemp("flare"))


@pytest.fixture(scope="module", params=RUNS)
def trained(request, cache, tmp_path_factory):
    if request.param == "flare":
        return request.getfixturevalue("flare")
    return Trained(request.param, cache, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def whole(flare):
    """The folder of a run of four processes that was left alone."""
    return flare.folders(2)[1]


def losses(folder) -> np.ndarray:
    return np.array([row["loss"] for row in read_log(folder) if "loss" in row])


def assert_weights_agree(actual, expected) -> dict[str, float]:
    """Every weight agrees to 1e-5 of the largest of its array, those without a gradient to 1e-3.

    A softmax does not see the bias of its keys, or, while it is all but uniform, hardly sees them
    and its queries: their gradient is rounding, which Adam, dividing it by its own size, makes to
    steps as large as others.
    """
    differences = {}
    weights = {path: values for path, values in expected.items() if path.startswith(".params")}
    gradients = {
        path: max(np.sqrt(values.max()) for other, values in expected.items()
                  if ".nu[" in other and other.endswith(path.removeprefix(".params")))
        for path in weights
    }  # fmt: skip
    vanishing = {path for path, size in gradients.items() if size < 1e-5 * max(gradients.values())}
    assert all("key']['bias" in path or "latent_queries" in path for path in vanishing)
    for path, values in weights.items():
        differences[path] = np.abs(actual[path] - values).max() / np.abs(values).max()
        assert differences[path] < (1e-3 if path in vanishing else 1e-5), path
    return differences


# Whoever comes first trains all of them.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("data", DATA)
def test_four_processes_train_as_one_does(data, trained):
    one, four = trained.folders(data)
    assert len(losses(one)) == STEPS
    np.testing.assert_allclose(losses(four), losses(one), rtol=1e-5)
    expected, actual = saved_arrays(one, STEPS), saved_arrays(four, STEPS)
    assert actual.keys() == expected.keys()
    assert_weights_agree(actual, expected)
    first, second = (json.loads((f / "summary.json").read_text()) for f in (one, four))
    assert second["test_relative_l2"] == pytest.approx(first["test_relative_l2"], rel=1e-5)
    assert second["device_mesh"] == first["device_mesh"].replace("s)", "s of 4 processes)")


def test_one_process_writes_and_all_print_with_their_number(flare, whole):
    lines = flare.result.out.splitlines()
    assert all(line.startswith(tuple(f"[{i}]" for i in range(PROCESSES))) for line in lines)
    told = [line for line in lines if "parameters on" in line]
    assert len(told) == len(DATA)
    assert told[0].startswith("[0] ")
    assert {path.name for path in whole.iterdir() if path.name[0] != "."} == {
        *("config.yaml", "dataset.json", "log.jsonl", "tensorboard", "checkpoints"),
        *("summary.json", "predictions.png"),
    }
    assert len(list((whole / "tensorboard").iterdir())) == 1
    saved = configs.load(whole).distributed
    assert (saved.coordinator, saved.processes, saved.process) == (None, None, None)


def test_two_processes_evaluate_what_four_trained(whole, cache):
    process = start(
        *("-m", "experiments.launch", "--processes", 2, "--devices-per-process", 4),
        *("--", "evaluate", whole, "--checkpoint", "last", "mesh.points=4", "mesh.data=2"),
    )
    result = wait(process, 200)
    assert result.code == 0, last_lines(result)
    # Not all that is printed: Gloo's threads tell of their connections, and mix their lines.
    lines = [line for line in result.out.splitlines() if "test_" in line]
    assert all(line.startswith("[0] ") for line in lines), lines
    printed = printed_metrics("\n".join(line.removeprefix("[0] ") for line in lines))
    summary = json.loads((whole / "summary.json").read_text())
    assert float(printed["test_relative_l2"]) == pytest.approx(
        summary["test_relative_l2"], rel=1e-4
    )


# Stopped and killed ------------------------------------------------------------------------------


class Interrupted:
    """A run of four processes: one is killed; it goes on, and one gets SIGTERM; one goes on."""

    def __init__(self, cache, folder):
        run = [*overrides("flare", cache), "mesh.data=2"]
        self.folder, self.lost = folder, random.randrange(PROCESSES)
        step = random.randint(10, 19)
        self.killed, self.seconds = killed(cache, run, folder, self.lost, step, saved=10)
        self.killed_with = saved_steps(folder)

        processes = start_each(cache, *run, f"hydra.run.dir={folder}")
        try:
            wait_for_step(processes, folder, 21)
            processes[random.randrange(PROCESSES)].send_signal(signal.SIGTERM)
            self.stopped = [wait(process, 100) for process in processes]
        finally:
            for process in processes:
                process.kill()
        self.stopped_with = saved_steps(folder)
        self.at_twenty = saved_arrays(folder, 20)
        self.log = (folder / "log.jsonl").read_text()
        self.finished = call(train.main, *run, f"hydra.run.dir={folder}", "mesh.cpu_devices=8")


@pytest.fixture(scope="module")
def interrupted(cache, whole, tmp_path_factory):
    return Interrupted(cache, tmp_path_factory.mktemp("interrupted"))


def test_others_end_and_name_a_process_that_was_killed(interrupted):
    assert interrupted.seconds < 60
    for number, result in enumerate(interrupted.killed):
        if number == interrupted.lost:
            assert result.code == -signal.SIGKILL
        elif interrupted.lost and result.code == LOST_PEER:
            assert f"error: process {number} of 4: lost process" in result.err
            assert str(interrupted.lost) in result.err.partition("lost process ")[2]
            assert "Traceback" not in result.err
        else:
            # Where all meet is gone with the first; JAX then ends a process itself, by SIGABRT.
            assert result.code in (LOST_PEER, -signal.SIGABRT), last_lines(result)
            assert "lost process 0" in result.err or "oordination" in result.err


def test_run_that_lost_a_process_goes_on_with_the_same_bits(interrupted, whole):
    out = interrupted.stopped[0].out
    assert f"going on from step {interrupted.killed_with[-1]} of {STEPS}" in out
    expected = saved_arrays(whole, 20)
    assert interrupted.at_twenty.keys() == expected.keys()
    for path, values in expected.items():
        np.testing.assert_array_equal(interrupted.at_twenty[path], values, err_msg=path)
    assert (whole / "log.jsonl").read_text().startswith(interrupted.log)


def test_sigterm_to_one_process_stops_all_at_one_step(interrupted):
    assert [result.code for result in interrupted.stopped] == [143] * PROCESSES
    step = interrupted.stopped_with[-1]
    assert 21 <= step < STEPS
    told = [
        result.out.count(f"stopped by SIGTERM at step {step}") for result in interrupted.stopped
    ]
    assert told == [1, 0, 0, 0]
    assert not any("Traceback" in result.err for result in interrupted.stopped)


def test_run_of_four_processes_goes_on_with_one(interrupted, whole):
    assert interrupted.finished.code == 0, interrupted.finished.err
    assert f"going on from step {interrupted.stopped_with[-1]}" in interrupted.finished.out
    np.testing.assert_allclose(losses(interrupted.folder), losses(whole), rtol=1e-5)


def test_signals_are_put_together_every_two_seconds(monkeypatch):
    now, exchanged = [0.0], []

    def exchange(own):
        exchanged.append(step)
        # The other process is a little slower, and gets a signal at step 400.
        return np.array([own, [signal.SIGTERM if step >= 400 else 0, own[1] - 1]])

    monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("jax.experimental.multihost_utils.process_allgather", exchange)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    agreement, step = Agreement(StopSignals(), 0), 0
    for step in range(1, 1000):
        # The first is compiled.
        now[0] += 5 if step == 1 else 0.02
        stop = agreement.received(step, waits=step == 250)
        if stop:
            break
    # Twice as far each time, until it is as far as two seconds take; then from where all wait.
    assert exchanged == [1, 2, 4, 8, 16, 32, 64, 128, 228, 250, 294, 382, 482]
    assert (stop, step) == (signal.SIGTERM, 482)


# How they are started ----------------------------------------------------------------------------

SLURM = dict(SLURM_JOB_ID="7", SLURM_STEP_NODELIST="node[1-2]", SLURM_PROCID="0", SLURM_LOCALID="0")
MPI = dict(OMPI_MCA_orte_hnp_uri="1.0;tcp://10.0.0.1:5", OMPI_COMM_WORLD_SIZE="4")
POD = dict(KUBERNETES_SERVICE_HOST="10.0.0.1")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (SLURM | {"SLURM_NTASKS": "4"}, Cluster("SLURM", None)),
        (SLURM | {"SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, ("SLURM", [])),
        (SLURM | {"SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, ("SLURM", None)),
        (SLURM | {"SLURM_NTASKS": "4", "SLURM_GPUS_PER_TASK": "1"}, ("SLURM", [])),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        (SLURM | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, None),
        # A batch script outside of `srun`.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),
        (MPI, ("Open MPI", None)),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, ("Open MPI", [])),
        (MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        # A pod of no indexed job.
        (POD, None),
    ],
)
def test_clusters_are_told_by_the_environment(environment, expected):
    assert find_cluster(environment) == expected


def test_tpus_are_told_by_the_environment(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "libtpu")
    hosts = {"TPU_WORKER_HOSTNAMES": "a,b"}
    assert find_cluster(hosts) == ("Cloud TPU", [])
    assert find_cluster({"TPU_WORKER_HOSTNAMES": "a"}) is None
    slices = {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}
    assert find_cluster(slices) == ("Cloud TPU", [])
    assert find_cluster({}) == ("Cloud TPU", [])
    assert find_cluster({"TPU_SKIP_MDS_QUERY": "1"}) is None
    assert find_cluster(hosts | {"JAX_PLATFORMS": "cpu"}) is None


def test_what_a_cluster_lacks_is_named(monkeypatch):
    with pytest.raises(ValueError, match=r"distributed\.coordinator: expected HOST:PORT, since Op"):
        find_cluster({"OMPI_COMM_WORLD_SIZE": "4"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"distributed\.detect: expected the package kubernetes"):
        find_cluster(POD | {"JOB_COMPLETION_INDEX": "0"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["coordinator=a:1"], "distributed: expected all or none of coordinator, processes and"),
        (["processes=2", "process=0"], "got no distributed.coordinator"),
        (["coordinator=a", "processes=2", "process=0"], "expected HOST:PORT; got 'a'"),
        (["coordinator=a:0", "processes=2", "process=0"], "expected HOST:PORT; got 'a:0'"),
        (
            ["coordinator=a:1", "processes=2", "process=2"],
            "expected less than distributed.processes",
        ),
        (
            ["coordinator=a:1", "processes=2", "process=-1"],
            "distributed.process: expected a number",
        ),
        (["coordinator=a:1", "processes=0", "process=0"], "distributed.processes: expected a pos"),
        (["timeout=0"], "distributed.timeout: expected a positive number; got 0"),
    ],
)
def test_bad_numbers_of_processes_are_named(given, message):
    with pytest.raises(ValueError, match="distributed") as error:
        compose(*(f"distributed.{item}" for item in given))
    assert_one_line(str(error.value), message)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        (SLURM | {"SLURM_NTASKS": "4"}, "SLURM"),
        # Which does not tell where its first process is.
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "a cluster"),
    ],
)
def test_one_of_several_processes_does_not_export(environment, name, monkeypatch, tmp_path):
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    result = call(export.main, tmp_path / "run", tmp_path / "program")
    assert result.code == 2
    assert_one_line(
        result.err, f"error: export: expected one process alone; got one of several of {name}"
    )


def test_processes_may_change_between_starts():
    default = compose()
    other = compose(
        "distributed.coordinator=a:1", "distributed.processes=2", "distributed.process=1"
    )
    assert configs.difference(default, other) == []
    assert configs.difference(dataclasses.replace(default), other) == []


def run_alone(number, port, tmp_path, *more):
    return start(
        *("-m", "experiments.train", *DARCY, f"data.cache_dir={tmp_path}", *more),
        *("distributed.processes=2", f"distributed.process={number}", "distributed.timeout=2"),
        *(f"distributed.coordinator=127.0.0.1:{port}", f"hydra.run.dir={tmp_path / 'run'}"),
    )


def test_process_that_nobody_joins_ends_with_one_line(tmp_path):
    waiting = [run_alone(number, free_port(), tmp_path) for number in (0, 1)]
    for process, message in zip(waiting, ("not all of the others", "nobody answered"), strict=True):
        result = wait(process)
        assert result.code == 2
        assert_one_line(result.err, "expected 2 processes within distributed.timeout=2 s", message)


# The launcher ------------------------------------------------------------------------------------


@pytest.fixture
def stub(monkeypatch, tmp_path):
    """Has the launcher start a program of a test instead of Python."""

    def make(text: str):
        program = tmp_path / "program"
        begin = (
            f"#!{sys.executable}\nimport os, signal, sys, time\n"
            "given = dict(text.split('=', 1) for text in sys.argv if '=' in text)\n"
            "number = int(given['distributed.process'])\n"
        )
        program.write_text(begin + text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(launcher.sys, "executable", str(program))

    return make


def test_launcher_prefixes_what_is_printed_and_names_each_process(stub, capsys):
    stub("print(*sys.argv[1:]); print('problem', file=sys.stderr)")
    assert launcher.launch(["train", "-m", "mesh.points=4", "--help"], 3, 2) == 0
    printed = capsys.readouterr()
    (port,) = {line.partition("127.0.0.1:")[2].split()[0] for line in printed.out.splitlines()}
    assert sorted(printed.out.splitlines()) == [
        f"[{i}] -m experiments.train -m mesh.points=4 distributed.coordinator=127.0.0.1:{port} "
        f"distributed.processes=3 distributed.process={i} mesh.cpu_devices=2 --help"
        for i in range(3)
    ]
    assert sorted(printed.err.splitlines()) == [f"[{i}] problem" for i in range(3)]


@pytest.mark.parametrize(("end", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_launcher_ends_all_when_one_fails(end, code, stub, capsys):
    stub(
        "if number == 2: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"if number == 1:\n    time.sleep(0.5)\n    {end}\n"
        "time.sleep(100)"
    )
    since = time.monotonic()
    assert launcher.launch(["train"], 3, grace=1.0) == code
    assert time.monotonic() - since < 20
    assert "launch: process 1 ended" in capsys.readouterr().err


def test_launcher_hands_signals_on(stub, capsys):
    stub(
        "def stop(*_):\n    print('asked'); sys.exit(143)\n"
        "signal.signal(signal.SIGINT, stop)\nprint('ready', flush=True)\ntime.sleep(100)"
    )
    timer = threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    assert launcher.launch(["evaluate", "run"], 2, grace=5.0) == 143
    printed = capsys.readouterr().out
    assert "[0] asked" in printed
    assert "[1] asked" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "launch: expected -- and one of train, evaluate, report, predict; got nothing"),
        (
            ["--", "export"],
            "launch: expected -- and one of train, evaluate, report, predict; got e",
        ),
        (["--processes", "0", "--", "train"], "--processes: expected at least 1; got 0"),
        (["--grace", "nan", "--", "train"], "--grace: expected at least 0; got nan"),
    ],
)
def test_bad_arguments_of_the_launcher_are_one_line(arguments, message):
    result = call(launcher.main, *arguments)
    assert result.code == 2
    assert_one_line(result.err, f"error: {message}")


def test_bad_override_is_told_in_one_line_by_each_process(tmp_path):
    result = wait(
        start(
            *("-m", "experiments.launch", "--", "train", "mesh.points=3"),
            *(*DARCY, f"data.cache_dir={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}"),
        )
    )
    assert result.code == 2
    told = [line for line in result.err.splitlines() if "error:" in line]
    assert len(told) == 1
    assert_one_line(told[0], "needs 3 devices, but there are only 2")
    assert "Traceback" not in result.err
