"""What Hydra would run and no experiment needs: pickled jobs, and classes that a config names."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from experiments.formats.limits import read_text

_RERUN = "--experimental-rerun"
_FOLDERS = ("--config-dir", "--config-path")
_SHORT = ("-cd", "-cp")
# Hydra's name of a class or function that it calls, and that of Python's logging.
_CALLED = ("_target_", "()")


def require_values(arguments: Sequence[str]) -> None:
    """Refuses arguments by which Hydra would unpickle a file, or call what a config names.

    Args:
        arguments: of a command.

    Raises:
        ValueError: one would, or a file of a folder of configurations that it names.
    """
    for argument in arguments:
        # Options may be cut short.
        option = argument.partition("=")[0]
        if len(option) > 2 and _RERUN.startswith(option):
            raise ValueError(f"{argument}: expected a configuration; got a pickled job")
        if _CALLED[0] in argument:
            raise ValueError(f"{argument}: expected values alone; got a class to call")
    for folder in _folders(arguments):
        for path in sorted([*folder.rglob("*.yaml"), *folder.rglob("*.yml")]):
            _require_values_of(path)


def _folders(arguments: Sequence[str]) -> Iterator[Path]:
    """Folders of configurations beside the project's own."""
    for argument, following in zip(arguments, (*arguments, "")[1:], strict=True):
        option, _, value = argument.partition("=")
        if option == "hydra.searchpath":
            yield from map(Path, re.findall(r"file://([^,'\"\]]+)", value))
        elif option in _SHORT or (len(option) > 4 and any(f.startswith(option) for f in _FOLDERS)):
            yield Path(value or following)


def _require_values_of(path: Path) -> None:
    try:
        events = yaml.parse(read_text(path), yaml.SafeLoader)
        names = [event.value for event in events if isinstance(event, yaml.ScalarEvent)]
    except (yaml.YAMLError, UnicodeDecodeError, OSError):
        return  # Hydra says what is wrong
    for name in names:
        if name in _CALLED:
            raise ValueError(f"{path}: expected values alone; got {name!r}, a class to call")
