"""Virtual devices of the CPU, on which the partitioner's work can be seen."""

import jax


def use_virtual_devices(count: int) -> None:
    """Makes this process use so many devices of the CPU.

    Nothing may have asked JAX for its devices before: that is why a benchmark calls it in its
    command, where whoever imports the module is left alone.

    Args:
        count: number of devices.

    Raises:
        RuntimeError: JAX has its devices already.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
