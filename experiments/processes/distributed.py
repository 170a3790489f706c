"""Several processes that run one command together, on one host or many.

Each holds its own devices, and all of these make one mesh. Which processes there are is told by the
environment of a cluster or by the configuration; `start` joins them before JAX looks for devices.
"""

import atexit
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax

from experiments.configuration.schema import DistributedConfig
from experiments.messages import one_line
from experiments.processes.clusters import find_cluster
from experiments.processes.lost_processes import end_without_waiting, fail


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
    # `agreement.Agreement` has them stop together.
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
    atexit.register(end_without_waiting)


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
        fail(error)
