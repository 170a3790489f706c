"""How the commands meet their user: errors in one line, signals as a request to stop, job names."""

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from experiments.hydra_arguments import require_values


def one_line_errors(command: Callable[[], int | None]) -> None:
    """Runs a command; bad input ends it with one line on stderr and exit code 2.

    Errors that are no plain sentence keep their traceback, and all do where HYDRA_FULL_ERROR=1.
    """
    verbose = os.environ.get("HYDRA_FULL_ERROR") == "1"
    # Hydra would print errors its own way and exit.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        require_values(sys.argv[1:])
        code = command()
    except (ValueError, OSError) as error:
        if verbose or "\n" in str(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(code or 0)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a trained run: its folder, and which of its checkpoints."""
    parser.add_argument("run", type=Path, help="the run's folder, as in runs/darcy_flare")
    parser.add_argument("--checkpoint", choices=("last", "best"), default="last")


class StopSignals:
    """Remembers SIGTERM and SIGINT, so that a loop can end at a step of its choice.

    A second SIGINT interrupts at once.

    Attributes:
        received: number of the signal that came, or `None`.
    """

    def __init__(self) -> None:
        """Nothing has come."""
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        """Starts to listen."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.received = number

    def __exit__(self, *error: object) -> None:
        """Gives the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def swept(overrides: Iterable[str], arguments: list[str]) -> str:
    """Name of a sweep's job: its overrides of what the command line sweeps over.

    Hydra's own `override_dirname` holds all overrides, and so may be too long for a file system,
    and a name with `=` or `,` in it would need quotes in `hydra.run.dir=FOLDER`.
    """
    parser = OverridesParser.create()
    # What is no override is an option of Hydra's.
    given = parser.parse_overrides([text for text in arguments if "=" in text and text[0] != "-"])
    keys = {override.key_or_group for override in given if override.is_sweep_override()}
    own = [text.lstrip("+") for text in overrides]
    name = "_".join(sorted(text for text in own if text.partition("=")[0] in keys))
    return re.sub(r"[^\w.-]", "_", name.replace("=", "-")) or "single"
