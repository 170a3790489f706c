"""Small files of a run, written whole or not at all."""

import contextlib
import fcntl
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Has a file written under a temporary name, then renames it."""
    temporary = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        write(temporary)
        temporary.replace(path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path, refusal: str | None = None) -> Iterator[None]:
    """Keeps other processes that lock the same file out, or waits for them.

    The system lets go of it however this process ends.

    Args:
        path: the file, made if missing and otherwise left as it is.
        refusal: the error where another process has it; without one, it is waited for.

    Raises:
        ValueError: another process has it.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if refusal is None else fcntl.LOCK_NB))
        except BlockingIOError:
            raise ValueError(refusal) from None
        except OSError:
            pass  # a file system without locks
        yield


def write_text(path: Path, text: str) -> None:
    """Writes a text file in UTF-8, its line ends as they are."""
    write_atomically(
        path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline="")
    )


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file."""
    write_text(path, json.dumps(content, indent=2) + "\n")
