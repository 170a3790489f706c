"""Several processes of one run, each with CPU devices of its own, for the tests and by hand."""

import signal
import subprocess
import time
from pathlib import Path

from commands import Result, free_port, start, wait
from saved import saved_steps

from experiments.training.logs import read_log

PROCESSES, DEVICES = 4, 2
SMALL = [
    "model.n_layers=1",
    "model.n_hidden=16",
    "model.n_head=2",
    "model.slice_num=4",
    "optimizer=adamw",
    "train.steps=30",
    "train.log_every=1",
]
DARCY = [
    *SMALL,
    *("model=flare", "data.resolution=8", "data.train=16", "data.validation=4", "data.test=6"),
    "train.checkpoint_every=10",
]
AIRFOILS = [
    *SMALL,
    *("model=geotransolver", "data=airfoil", "data.angles=2", "data.surface_points=32"),
    *("data.points=40", "data.max_points=60", "data.train=6", "data.validation=2", "data.test=5"),
    "train.checkpoint_every=30",
]


def fast(cache: Path) -> dict[str, str]:
    """Environment in which compiled programs are kept, for the processes that come next."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(cache / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def launch(
    cache: Path, *arguments, processes: int = PROCESSES, devices: int = DEVICES
) -> subprocess.Popen:
    """Starts a command by `experiments.launch`, on so many processes of so many devices each."""
    return start(
        *("-m", "experiments.launch", "--processes", processes),
        *("--devices-per-process", devices, "--", *arguments),
        **fast(cache),
    )


def start_each(
    cache: Path, *overrides, processes: int = PROCESSES, devices: int = DEVICES
) -> list[subprocess.Popen]:
    """Starts the processes of a training one by one, as hosts do: nobody looks after them."""
    port = free_port()
    return [
        start(
            *("-m", "experiments.train", *overrides, f"mesh.cpu_devices={devices}"),
            f"distributed.coordinator=127.0.0.1:{port}",
            f"distributed.processes={processes}",
            f"distributed.process={number}",
            **fast(cache),
        )
        for number in range(processes)
    ]


def wait_for_step(processes: list[subprocess.Popen], folder: Path, step: int) -> None:
    """Waits until the log of a run has a step."""
    deadline = time.monotonic() + 300
    while max((row["step"] for row in read_log(folder)), default=0) < step:
        ended = [process for process in processes if process.poll() is not None]
        assert not ended, f"ended before step {step}: {ended[0].communicate()}"
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
            told = [process.communicate() for process in processes]
            raise AssertionError(f"no step {step} in 300 s: {told}")
        time.sleep(0.005)


def killed(
    cache: Path, overrides: list[str], folder: Path, number: int, step: int, saved: int = 0
) -> tuple[list[Result], float]:
    """Kills one process of a run at a step, once the checkpoint of step `saved` is whole.

    Returns:
        How each process ended, and the seconds that the last of the others took.
    """
    processes = start_each(cache, *overrides, f"hydra.run.dir={folder}")
    try:
        wait_for_step(processes, folder, step)
        # Checkpoints are written beside the training, which may be several steps ahead of them.
        deadline = time.monotonic() + 60
        while saved and saved not in saved_steps(folder):
            assert time.monotonic() < deadline, f"no checkpoint of step {saved}"
            time.sleep(0.005)
        processes[number].send_signal(signal.SIGKILL)
        since = time.monotonic()
        results = [wait(process, 100) for process in processes]
        return results, time.monotonic() - since
    finally:
        for process in processes:
            process.kill()


def last_lines(result: Result) -> str:
    """The end of what a process printed, for messages."""
    return "\n".join(f"{result.out}\n{result.err}".splitlines()[-20:])
