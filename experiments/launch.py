"""`python -m experiments.launch --processes 4 -- train ...`: a command by several processes here.

For trying what runs on several hosts, and for tests: each process gets CPU devices of its own, and
they meet at a free port of this machine. What they print is prefixed by their number.
"""

import argparse
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

from experiments.cli import one_line_errors

# As it was when this began: `one_line_errors` changes it, and the processes call that themselves.
_ENVIRONMENT = dict(os.environ)
COMMANDS = ("train", "evaluate", "report", "predict")
# What a command ends with that was asked to stop: the others were, too, and are saving.
_STOPPED = 128 + signal.SIGTERM
# Seconds in which the others may fail as well, and tell why, before they are ended.
_PAUSE = 1.0


def launch(
    command: Sequence[str], processes: int = 2, devices_per_process: int = 1, grace: float = 30.0
) -> int:
    """Runs a command by several processes on this machine, and waits for them.

    When one fails the others are ended: by SIGTERM, then by SIGKILL. SIGTERM and SIGINT that come
    here are handed on.

    Args:
        command: one of `COMMANDS` and its arguments.
        processes: how many.
        devices_per_process: CPU devices of each.
        grace: seconds that a process has to end.

    Returns:
        The exit code of the first that failed, 128 more than the signal that killed it; 0 if none
        did.

    Raises:
        ValueError: there is no such command, or a number is out of range.
    """
    if not command or command[0] not in COMMANDS:
        got = command[0] if command else "nothing"
        raise ValueError(f"launch: expected -- and one of {', '.join(COMMANDS)}; got {got}")
    for name, value, least in (
        ("--processes", processes, 1),
        ("--devices-per-process", devices_per_process, 1),
        ("--grace", grace, 0),
    ):
        if not value >= least:
            raise ValueError(f"{name}: expected at least {least}; got {value}")
    signals: list[int] = []
    # Before any process is there, so that none is left behind.
    previous = {
        number: signal.signal(number, lambda number, _: signals.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        return _Processes(command, processes, devices_per_process).wait(grace, signals)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Processes:
    """The processes, and what is to be done with them."""

    def __init__(self, command: Sequence[str], count: int, devices: int):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._running, self._readers = [], []
        # Next to the overrides that there are: some commands want all in one place.
        own = [i for i, text in enumerate(command) if "=" in text and not text.startswith("-")]
        place = own[-1] + 1 if own else len(command)
        for number in range(count):
            overrides = [
                f"distributed.coordinator=127.0.0.1:{port}",
                f"distributed.processes={count}",
                f"distributed.process={number}",
                f"mesh.cpu_devices={devices}",
            ]
            arguments = [*command[1:place], *overrides, *command[place:]]
            process = subprocess.Popen(
                [sys.executable, "-m", f"experiments.{command[0]}", *arguments],
                env=_ENVIRONMENT | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                # A terminal would send Ctrl-C to all, and they would get it once more from here.
                start_new_session=True,
            )
            self._running.append(process)
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                reader = threading.Thread(target=_prefix, args=(number, source, target))
                reader.start()
                self._readers.append(reader)

    def wait(self, grace: float, signals: list[int]) -> int:
        """Waits for all, hands signals on and ends the others when one fails."""
        failed, ended_at = None, math.inf
        told = False
        while any(process.poll() is None for process in self._running):
            if signals:
                self._send(signals.pop(0))
            if failed is None:
                failed = self._first_failed()
                if failed is not None:
                    ended_at = time.monotonic()
                    # Those that stop are saving.
                    told = failed == _STOPPED
            elif not told and time.monotonic() > ended_at + _PAUSE:
                told = True
                self._send(signal.SIGTERM)
            elif time.monotonic() > ended_at + grace:
                self._send(signal.SIGKILL)
            time.sleep(0.05)
        for reader in self._readers:
            reader.join()
        return failed or self._first_failed() or 0

    def _first_failed(self) -> int | None:
        codes = [process.poll() for process in self._running]
        for number, code in enumerate(codes):
            if not code:
                continue
            if any(other is None for other in codes):
                how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                print(f"launch: process {number} ended {how}; ending the others", file=sys.stderr)
            return 128 - code if code < 0 else code
        return None

    def _send(self, number: int) -> None:
        for process in self._running:
            if process.poll() is None:
                process.send_signal(number)


def _prefix(number: int, source: IO[str], target: IO[str]) -> None:
    """Hands on what a process prints, line by line; also the steps of a progress bar are lines."""
    with source:
        for line in source:
            # In one piece: other processes print at the same time.
            target.write(f"[{number}] {line.rstrip()}\n")
            target.flush()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.launch",
        description="Runs a command by several processes with CPU devices on this machine.",
        epilog=f"commands: {', '.join(COMMANDS)}",
    )
    parser.add_argument("--processes", type=int, default=2, help="how many (2)")
    parser.add_argument(
        "--devices-per-process", type=int, default=1, help="CPU devices of each (1)"
    )
    parser.add_argument(
        "--grace", type=float, default=30.0, help="seconds to end in, when another fails (30)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- train OVERRIDES, say")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    return launch(command, arguments.processes, arguments.devices_per_process, arguments.grace)


if __name__ == "__main__":
    one_line_errors(main)
