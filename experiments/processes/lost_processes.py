"""How one of several processes ends when it fails, or when another one is lost.

Each would wait for the others for ever. So they tell each other why they fail, within a time, and
end by themselves; those that do not tell are lost, and are named.
"""

import os
import sys
import time
from typing import NoReturn

import jax

from experiments.messages import one_line
from experiments.processes.coordination import service_client, told_in

# Exit code of a process that lost another: what went wrong is not here, and to start again helps.
LOST_PEER = 75
# Seconds in which processes that fail together tell each other, and those that the first, where
# they meet, stays longer.
_ROLL_CALL, _LINGER = 12.0, 5.0


class _Ending:
    """With which code, and how late, this process is to end without waiting for the others."""

    code: int | None = None
    linger: float = 0.0


def end_without_waiting() -> None:
    """Ends this process at once if it has failed, and does nothing if it has not."""
    if _Ending.code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_Ending.linger)
        os._exit(_Ending.code)


def fail(error: BaseException) -> NoReturn:
    """Raises an error in one of several processes, or what it comes from."""
    mine, count = jax.process_index(), jax.process_count()
    expected = isinstance(error, ValueError | OSError)
    reason = one_line(error)
    _Ending.code = 2 if expected else 1
    told = _roll_call(mine, count, reason if expected else f"{type(error).__name__}: {reason}")
    broken = isinstance(error, jax.errors.JaxRuntimeError)
    # An error of its own stands where it came up; of a broken exchange only others know more.
    if broken and (told is None or len(told) < count):
        _Ending.code = LOST_PEER
        lost = "0, where all meet," if told is None else _listed(set(range(count)) - told.keys())
        raise ConnectionError(
            f"process {mine} of {count}: lost process {lost}; start again to go on from the last "
            f"checkpoint ({reason})"
        ) from error
    if told and mine and expected and told.get(0) == reason:
        raise SystemExit(2) from error
    raise error


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _roll_call(mine: int, count: int, reason: str) -> dict[int, str] | None:
    """What the processes that fail have to say, by their numbers.

    Returns:
        The reasons of those that told in time, or `None` if the first, where they meet, is gone.
    """
    client, folder = service_client(), "flare_jax/ended/"
    end = time.monotonic() + _ROLL_CALL
    try:
        client.key_value_set(f"{folder}{mine}", reason)
        while True:
            told = told_in(client, folder)
            if len(told) == count or time.monotonic() > end:
                break
            time.sleep(0.05)
    except jax.errors.JaxRuntimeError:
        return None
    if mine == 0:
        # The others may have come later, and still be reading.
        _Ending.linger = _LINGER if len(told) < count else 0.5
    return told
