"""How the commands meet their user: errors in one line, and a run by its folder."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from experiments.configuration.hydra_arguments import require_values


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
