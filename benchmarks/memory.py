"""Memory of a process."""

import resource
import sys


def peak_mib() -> float:
    """Largest resident memory of this process so far."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
