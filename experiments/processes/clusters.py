"""Which processes a cluster has started together, as its environment tells."""

import importlib.util
import os
import re
from collections.abc import Mapping
from typing import NamedTuple


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
