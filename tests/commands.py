"""The commands of `experiments`, run inside the tests' process or as processes of their own."""

import contextlib
import dataclasses
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import hydra
import pytest

from experiments.cli import one_line_errors
from experiments.configuration import configs, schema

ROOT = Path(__file__).parents[1]

# Of a run of seconds: every part of an experiment, nothing of a size.
_SIZES = {
    "data": dict(resolution=8, train=16, validation=4, test=6),
    "model": dict(n_layers=1, n_hidden=16, n_head=2, slice_num=4),
}


def tiny(model: str, data: str) -> list[str]:
    """Overrides for a run of seconds: of the sizes, those that this model and data set have."""
    kinds = {"data": schema.DATA[data], "model": schema.MODELS[model]}
    sizes = [
        f"{group}.{name}={size}"
        for group, kind in kinds.items()
        for name, size in _SIZES[group].items()
        if name in {field.name for field in dataclasses.fields(kind)}
    ]
    return [*sizes, "optimizer=adamw", "train.log_every=1"]


TINY = tiny("flare", "darcy")


class Result(NamedTuple):
    """How a command ended: its exit code and what it printed."""

    code: int
    out: str
    err: str


def compose(*overrides: str) -> schema.ExperimentConfig:
    """The configuration that the command line of `experiments.train` would make."""
    configs.register_schemas()
    with hydra.initialize_config_dir(str(configs.CONFIG_DIR), version_base="1.3"):
        return configs.typed(hydra.compose("config", list(overrides)))


def call(main, *arguments) -> Result:
    """Runs a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr("sys.argv", [main.__module__, *map(str, arguments)])
        patch.setenv("HYDRA_FULL_ERROR", "0")
        with pytest.raises(SystemExit) as end:
            one_line_errors(main)
    return Result(end.value.code, out.getvalue(), err.getvalue())


def start(*arguments, **environment: str) -> subprocess.Popen:
    """Starts Python with these arguments; it has the devices that it asks for, not the tests'."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if "host_platform_device_count" not in flag]
    inherited = os.environ | {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait(process: subprocess.Popen, seconds: float = 120) -> Result:
    """Waits for a process; one that takes too long is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"not done after {seconds} s\n{out}\n{err}")
    return Result(process.returncode, out, err)


def free_port() -> int:
    """A port of this machine at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def reports_of(script: str, processes: int, *arguments) -> list[dict]:
    """What the processes of a script print last, as JSON; each is called with a port and its rank.

    Those that are left when one fails are killed.
    """
    port = free_port()
    running = [start(script, port, rank, *arguments) for rank in range(processes)]
    try:
        results = [wait(process) for process in running]
    finally:
        for process in running:
            process.kill()
    for result in results:
        assert result.code == 0, result.err
    return [json.loads(result.out.splitlines()[-1]) for result in results]


def printed_metrics(out: str) -> dict[str, str]:
    """What `experiments.evaluate` printed, up to its table."""
    lines = out.partition("\n\n")[0].splitlines()
    return dict(line.split(maxsplit=1) for line in lines)


def assert_one_line(text: str, *parts: str) -> None:
    """The text is one line that holds each of the parts."""
    assert len(text.strip().splitlines()) == 1, text
    for part in parts:
        assert part in text
