"""Several processes that run one command together, on one host or many.

Each holds its own devices, and all of these make one mesh. Which processes there are is told by the
environment of a cluster or by the configuration; `start` joins them before JAX looks for devices.
"""

import atexit
import contextlib
import importlib.util
import itertools
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import numpy as np

from experiments.cli import StopSignals, one_line
from experiments.schema import DistributedConfig

# Exit code of a process that lost another: what went wrong is not here, and to start again helps.
LOST_PEER = 75
# Seconds between two looks at the signals of all processes; clusters give half a minute.
_SECONDS_TO_AGREE = 2.0
# Seconds in which processes that fail together tell each other, and those that the first, where
# they meet, stays longer.
_ROLL_CALL, _LINGER = 12.0, 5.0
# A process that died is missed by its heartbeat; one that works has as long as it needs.
_DAY_IN_MS = 24 * 3600 * 1000
_barriers, _rounds = itertools.count(), itertools.count()

_T = TypeVar("_T")


class Cluster(NamedTuple):
    """What the environment says of the processes that were started together.

    Attributes:
        name: of what started them.
        devices: `[]` if all accelerators that a process sees are its own; `None` if JAX shares out
            those of a host among its processes.
    """

    name: str
    devices: list[int] | None


def find_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """The cluster that this process was started in with others; `None` if it was started alone.

    JAX finds out addresses and numbers, but does not tell beforehand whether there is a cluster,
    and would take a single task of SLURM or any pod of Kubernetes for one.

    Args:
        environment: variables, as in `os.environ` once JAX is imported.

    Raises:
        ValueError: JAX cannot find the first process in this environment.
    """
    if "OMPI_COMM_WORLD_SIZE" in environment:
        if environment["OMPI_COMM_WORLD_SIZE"] == "1":
            return None
        if "OMPI_MCA_orte_hnp_uri" not in environment:
            raise ValueError(
                "distributed.coordinator: expected HOST:PORT, since Open MPI 5 does not tell "
                "where its first process is, with distributed.processes=$OMPI_COMM_WORLD_SIZE and "
                "distributed.process=$OMPI_COMM_WORLD_RANK; got null"
            )
        alone = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
        return Cluster("Open MPI", [] if alone else None)
    # Set by `srun`: in a batch script outside of it there is one process whatever was allocated.
    if {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID"} <= environment.keys():
        if "1" in (environment.get("SLURM_NTASKS"), environment.get("SLURM_STEP_NUM_TASKS")):
            return None
        per_host = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
        # SLURM itself has then hidden what belongs to other tasks.
        bound = "SLURM_GPUS_PER_TASK" in environment
        return Cluster("SLURM", [] if bound or re.fullmatch(r"1(\(x\d+\))?", per_host) else None)
    if environment.get("JAX_PLATFORMS") != "cpu" and importlib.util.find_spec("libtpu"):
        hosts = environment.get("TPU_PROCESS_ADDRESSES", environment.get("TPU_WORKER_HOSTNAMES"))
        if hosts is not None:
            slices = int(environment.get("MEGASCALE_NUM_SLICES") or 1)
            return Cluster("Cloud TPU", []) if slices * len(hosts.split(",")) > 1 else None
        # Set by JAX on a host without TPUs; on others the metadata server knows the rest.
        if "TPU_SKIP_MDS_QUERY" not in environment:
            return Cluster("Cloud TPU", [])
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys():
        if importlib.util.find_spec("kubernetes") is None:
            raise ValueError(
                "distributed.detect: expected the package kubernetes (pip install 'jax[k8s]') in "
                "an indexed job, or false to run alone; got true"
            )
        return Cluster("Kubernetes", [])
    return None


def start(config: DistributedConfig) -> None:
    """Joins the other processes, if there are any, before anything touches a device.

    A process that waits longer than `config.timeout` seconds ends with a line on stderr and exit
    code 2.

    Raises:
        ValueError: the port is taken, or the environment of the cluster cannot be read.
    """
    # As in the second job of a sweep.
    if jax.distributed.is_initialized():
        return
    if config.coordinator is not None:
        if config.processes == 1:
            return
        where = f"distributed.coordinator={config.coordinator}"
        arguments: dict[str, Any] = {
            "coordinator_address": config.coordinator,
            "num_processes": config.processes,
            "process_id": config.process,
            "local_device_ids": [],
        }
        host, _, port = config.coordinator.rpartition(":")
        if config.process == 0:
            _require_free(int(port))
        if host in ("localhost", "127.0.0.1"):
            # By default it would be reached from outside.
            arguments["coordinator_bind_address"] = config.coordinator
    else:
        cluster = find_cluster(os.environ) if config.detect else None
        if cluster is None:
            return
        where, arguments = cluster.name, {"local_device_ids": cluster.devices}
        if "JAX_LOCAL_DEVICE_IDS" in os.environ:
            arguments = {}
    # JAX would take SIGTERM for itself, and a process that waits for others could not be ended.
    # `Agreement` has them stop together.
    jax.config.update("jax_enable_preemption_service", False)
    with _patience(config, where):
        try:
            jax.distributed.initialize(
                **arguments,
                # JAX would end the process with a stack trace.
                initialization_timeout=config.timeout + 60,
                heartbeat_timeout_seconds=config.heartbeat_timeout,
            )
        # Clusters are asked by many means, each with errors of its own.
        except Exception as error:
            raise ValueError(
                f"{where}: expected to find the other processes; got {one_line(error)}; "
                "distributed.detect=false runs alone"
            ) from error
    # Runs before the handler of JAX, in which a process waits for all others to end as well.
    atexit.register(_end_without_waiting)


def _require_free(port: int) -> None:
    """Refuses a port that another program listens at, where JAX would wait for it to answer."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"distributed.coordinator: expected a free port; got {port} ({error.strerror})"
            ) from error


@contextlib.contextmanager
def _patience(config: DistributedConfig, where: str) -> Iterator[None]:
    """Ends the process when the others have not come in time: JAX cannot be interrupted."""

    def give_up() -> None:
        heard = "nobody answered there" if config.process else "not all of the others came"
        print(
            f"error: {where}: expected {config.processes or 'all'} processes within "
            f"distributed.timeout={config.timeout} s; {heard}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(2)

    timer = threading.Timer(config.timeout, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _client() -> Any:
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
    client = _client()
    if client is not None:
        client.wait_at_barrier(f"{name}/{next(_barriers)}", timeout_in_ms=_DAY_IN_MS)


def first_then_others(load: Callable[[], _T]) -> _T:
    """Has the first process load what it may have to make before the others load it.

    All make it where they do not share the folder that it is kept in.

    Raises:
        ValueError: the first could not load it.
    """
    client = _client()
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
    client = _client()
    if client is None:
        return {} if own is None else {0: own}
    folder = f"flare_jax/problems/{next(_rounds)}/"
    if own is not None:
        client.key_value_set(f"{folder}{jax.process_index()}", own)
    # Passed again and again: the first process would keep barriers of different names for ever.
    client.wait_at_barrier("flare_jax/problems", timeout_in_ms=_DAY_IN_MS)
    return _told(client, folder)


def _told(client: Any, folder: str) -> dict[int, str]:
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
        if _client() is None:
            raise
        error = bad
    told = problems_of_all(None if error is None else one_line(error))
    if told:
        number, count = min(told), jax.process_count()
        where = "" if len(told) == count else f"process {number} of {count}: "
        raise ValueError(f"{where}{told[number]}") from error
    return loaded


def require_alone(command: str) -> None:
    """Refuses a command of one process where a cluster has started several.

    Raises:
        ValueError: this is one of several.
    """
    try:
        cluster = find_cluster(os.environ)
        name = None if cluster is None else cluster.name
    except ValueError:
        # There are several, which could not find each other.
        name = "a cluster"
    if name is not None:
        raise ValueError(f"{command}: expected one process alone; got one of several of {name}")


class _Ending:
    """With which code, and how late, this process is to end without waiting for the others."""

    code: int | None = None
    linger: float = 0.0


def _end_without_waiting() -> None:
    if _Ending.code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_Ending.linger)
        os._exit(_Ending.code)


@contextlib.contextmanager
def together(config: DistributedConfig) -> Iterator[None]:
    """Context of what all processes do together, which they join first.

    A process that fails in it ends by itself: the others would wait for it for ever, and it for
    them.

    Raises:
        ValueError: see `start`.
        ConnectionError: another process has ended; names it.
        SystemExit: the first process has failed by the same error, and tells of it.
    """
    start(config)
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized():
            raise
        _fail(error)


def _fail(error: BaseException) -> NoReturn:
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
    client, folder = _client(), "flare_jax/ended/"
    end = time.monotonic() + _ROLL_CALL
    try:
        client.key_value_set(f"{folder}{mine}", reason)
        while True:
            told = _told(client, folder)
            if len(told) == count or time.monotonic() > end:
                break
            time.sleep(0.05)
    except jax.errors.JaxRuntimeError:
        return None
    if mine == 0:
        # The others may have come later, and still be reading.
        _Ending.linger = _LINGER if len(told) < count else 0.5
    return told


class Agreement:
    """Has all processes stop at one step, whichever of them a signal reaches, and when.

    The signals of all are put together by an exchange between the hosts, which waits for the
    devices. It takes place where the loss is read or a checkpoint is due, when the host waits
    anyway, and in between as often as two seconds go by, but not at every step (unless one takes
    that long, when the wait does not count): a cluster that takes its hosts back gives half a
    minute or more. When that is, in steps, is agreed on in the same exchange.
    """

    def __init__(self, signals: StopSignals, step: int) -> None:
        """Begins at a step.

        Args:
            signals: of this process.
            step: the last step that was taken.
        """
        self._signals = signals
        self._step, self._next, self._time = step, step, time.monotonic()

    def received(self, step: int, *, waits: bool) -> int | None:
        """The signal by which all processes are to stop at a step, or `None`.

        Args:
            step: the step that was just taken; all processes call this at every step.
            waits: whether the host waits for this step anyway.
        """
        if not jax.distributed.is_initialized():
            return self._signals.received
        if not waits and step < self._next:
            return None
        from jax.experimental import multihost_utils

        now = time.monotonic()
        seconds = (now - self._time) / (step - self._step)
        # A few steps say little of the next: at most twice as many go by as did before.
        most = min(10_000, 2 * (step - self._step))
        steps = min(most, max(1, math.floor(_SECONDS_TO_AGREE / max(seconds, 1e-6))))
        own = np.array([self._signals.received or 0, steps], np.int32)
        signal, steps = multihost_utils.process_allgather(own).max(0).tolist()
        self._step, self._next, self._time = step, step + steps, now
        return signal or None
