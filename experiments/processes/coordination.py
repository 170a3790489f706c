"""What the processes of one command tell each other, and where they wait for each other.

It goes through the coordination service of JAX, whose keys and barriers belong to hosts, not to
devices.
"""

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from experiments.messages import one_line

# A process that died is missed by its heartbeat; one that works has as long as it needs.
_DAY_IN_MS = 24 * 3600 * 1000
_barriers, _rounds = itertools.count(), itertools.count()

_T = TypeVar("_T")


def service_client() -> Any:
    """The client of JAX's coordination service; `None` in a process that is alone.

    JAX has no public way to it. Device collectives cannot take its place: they end by an error if
    one process comes to the first of them half a minute after another, and name no process.
    """
    if not jax.distributed.is_initialized():
        return None
    from jax._src import distributed

    return distributed.global_state.client


def wait_for_all(name: str) -> None:
    """Waits until all processes are here, however long one of them takes.

    Args:
        name: of the place, for messages.

    Raises:
        jax.errors.JaxRuntimeError: a process has died.
    """
    client = service_client()
    if client is not None:
        client.wait_at_barrier(f"{name}/{next(_barriers)}", timeout_in_ms=_DAY_IN_MS)


def first_then_others(load: Callable[[], _T]) -> _T:
    """Has the first process load what it may have to make before the others load it.

    All make it where they do not share the folder that it is kept in.

    Raises:
        ValueError: the first could not load it.
    """
    client = service_client()
    if client is None:
        return load()
    key = f"flare_jax/first/{next(_barriers)}"
    if jax.process_index() == 0:
        reason = ""
        try:
            return load()
        except (ValueError, OSError) as error:
            reason = one_line(error)
            raise
        finally:
            client.key_value_set(key, reason)
    reason = client.blocking_key_value_get(key, _DAY_IN_MS)
    if reason:
        raise ValueError(reason)
    return load()


def by_first(do: Callable[[], Any]) -> None:
    """Has the first process do something for all, who wait for it and fail where it does.

    Raises:
        ValueError: the first could not do it.
    """
    first_then_others(lambda: do() if jax.process_index() == 0 else None)


def problems_of_all(own: str | None) -> dict[int, str]:
    """What went wrong in each process, told to all of them, so that they can do the same next.

    All processes call this, and it waits for the last.

    Args:
        own: what went wrong in this one, if anything.

    Returns:
        The problems, by the numbers of the processes that had one.
    """
    client = service_client()
    if client is None:
        return {} if own is None else {0: own}
    folder = f"flare_jax/problems/{next(_rounds)}/"
    if own is not None:
        client.key_value_set(f"{folder}{jax.process_index()}", own)
    # Passed again and again: the first process would keep barriers of different names for ever.
    client.wait_at_barrier("flare_jax/problems", timeout_in_ms=_DAY_IN_MS)
    return told_in(client, folder)


def told_in(client: Any, folder: str) -> dict[int, str]:
    """What processes have put into a folder of the service, by their numbers."""
    return {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(folder)}


def all_or_none(load: Callable[[], _T]) -> _T:
    """Has every process load something that each may find bad: where one does, all fail.

    Raises:
        ValueError: the first of those that could not load it tells why; or, in a process that is
            alone, what `load` raises.
    """
    error = None
    try:
        loaded = load()
    except (ValueError, OSError) as bad:
        if service_client() is None:
            raise
        error = bad
    told = problems_of_all(None if error is None else one_line(error))
    if told:
        number, count = min(told), jax.process_count()
        where = "" if len(told) == count else f"process {number} of {count}: "
        raise ValueError(f"{where}{told[number]}") from error
    return loaded
