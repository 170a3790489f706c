"""What the machines of `benchmarks.topologies` can do, by their makers' public figures."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One device and its links.

    Attributes:
        name: what it is.
        memory: bytes.
        narrow_flops: operations a second of bfloat16 matrix products, dense.
        wide_flops: those of float32 products as JAX does them by default.
        bandwidth: bytes a second between the device and its memory.
        link: bytes a second that a device sends to others near it.
        near: devices that are near each other.
        far_link: bytes a second that it sends to those that are not.
        latency: seconds that a collective takes at least.
    """

    name: str
    memory: float
    narrow_flops: float
    wide_flops: float
    bandwidth: float
    link: float
    near: int
    far_link: float
    latency: float


_GIB = 2**30
# Float32 products are TensorFloat-32 on a GPU and bfloat16 on a TPU by default.
MACHINES = {
    "h200": Machine("H200 SXM", 140.4 * _GIB, 989e12, 495e12, 4.8e12, 450e9, 8, 50e9, 2e-5),
    "tpu:v4": Machine("TPU v4", 32 * _GIB, 275e12, 275e12, 1.2e12, 300e9, 4096, 300e9, 1e-5),
    "tpu:v5e": Machine("TPU v5e", 16 * _GIB, 197e12, 197e12, 0.82e12, 200e9, 256, 200e9, 1e-5),
    "tpu:v5p": Machine("TPU v5p", 95 * _GIB, 459e12, 459e12, 2.76e12, 600e9, 8960, 600e9, 1e-5),
    "tpu:v6e": Machine("TPU v6e", 32 * _GIB, 918e12, 918e12, 1.64e12, 448e9, 256, 448e9, 1e-5),
}


def machine_of(target: str) -> Machine:
    """The machine of a target such as `h200:8` or `tpu:v5e:8x8`.

    Raises:
        ValueError: there are no figures for it.
    """
    name = target.rsplit(":", 1)[0]
    if name not in MACHINES:
        raise ValueError(
            f"target: expected one of {', '.join(f'{name}:...' for name in MACHINES)}; "
            f"got {target!r}"
        )
    return MACHINES[name]
