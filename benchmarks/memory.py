"""Memory of a process, and of a compiled program."""

import resource
import sys
from typing import Any

import jax


def memory_of(compiled: jax.stages.Compiled) -> Any:
    """What a device holds while a compiled program runs, in bytes by kind.

    Raises:
        RuntimeError: this platform does not say.
    """
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError("memory: expected figures of the compiled program; got none")
    return memory


def peak_mib() -> float:
    """Largest resident memory of this process so far."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
