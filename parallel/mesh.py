"""The device mesh: its axes, its construction, and how arrays and functions are laid out on it.

This is the one place that knows the names of the mesh axes. Models and training code read the
mesh from the context (`jax.set_mesh`); without one every helper here does nothing, so that the same
lines run on one device.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    use_abstract_mesh,
)
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from parallel.annotations import AnyArray

T = TypeVar("T")
AnArray = TypeVar("AnArray", bound=AnyArray)

DATA = "data"
POINTS = "points"
HEADS = "heads"
AXES = (DATA, POINTS, HEADS)


def make_mesh(
    data: int | np.integer = 1,
    points: int | np.integer = 1,
    heads: int | np.integer = 1,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Makes a device mesh with the axes `data`, `points` and `heads`.

    `data` is the slowest axis and `heads` the fastest, so that on several hosts `heads` and then
    `points` stay inside a host as far as they fit.

    Args:
        data: number of groups that share out the samples of a batch.
        points: number of devices that share out the points of one sample.
        heads: number of devices that share out attention heads and MLP width.
            One of the three may be -1: all devices that are left.
        devices: the devices to use, all of the process group by default. If they are more than the
            axes need, the first ones are taken.

    Returns:
        A `jax.sharding.Mesh` for `jax.set_mesh`. Its axes are of type `Auto`: the compiler
        partitions what is not steered.

    Raises:
        ValueError: a size is neither positive nor -1, two are -1, the devices do not divide, more
            devices are asked for than exist, or there are none.
    """
    devices = list(jax.devices() if devices is None else devices)
    if not devices:
        raise ValueError("mesh: expected at least one device, got an empty list of devices")
    given = {DATA: data, POINTS: points, HEADS: heads}
    for name, size in given.items():
        if (
            isinstance(size, bool)
            or not isinstance(size, int | np.integer)
            or size < -1
            or not size
        ):
            raise ValueError(
                f"mesh axis {name!r}: expected a positive integer or -1 (all devices left), "
                f"got {size!r}"
            )
    sizes = {name: int(size) for name, size in given.items()}
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"mesh: only one axis may be -1, got {', '.join(free)}")
    taken = math.prod(size for size in sizes.values() if size != -1)
    if free:
        if len(devices) % taken:
            raise ValueError(
                f"mesh axis {free[0]!r} = -1: {len(devices)} devices do not divide by the other "
                f"axes, {_describe(sizes)}"
            )
        sizes[free[0]] = len(devices) // taken
    needed = math.prod(sizes.values())
    if needed > len(devices):
        raise ValueError(
            f"mesh {_describe(sizes)} needs {needed} devices, but there are only {len(devices)} "
            f"({devices[0].platform}); ask for fewer, or on a CPU start with "
            f"JAX_NUM_CPU_DEVICES={needed}"
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
        devices=devices[:needed],
    )


def _describe(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name}={size}" for name, size in sizes.items())


def axis_size(axis: str) -> int:
    """Size of a mesh axis in the current context; 1 without a mesh or without that axis.

    Raises:
        ValueError: the axis is of type `Explicit`, which the models do not use.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or axis not in mesh.shape:
        return 1
    if dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis] == AxisType.Explicit:
        raise ValueError(
            f"mesh axis {axis!r}: expected type Auto, got Explicit; make the mesh with "
            "parallel.make_mesh"
        )
    return mesh.shape[axis]


def is_traced() -> bool:
    """Whether the caller is being traced, by `jax.jit` say: there are no concrete devices then."""
    try:
        jax.sharding.get_mesh()
    except ValueError:
        return True
    return False


def platform() -> str:
    """Platform that the current context compiles for: `cpu`, `gpu` or `tpu`."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def tracing_for(platform: str) -> AbstractContextManager:
    """Context of no mesh in which functions are traced for one device of any platform.

    Args:
        platform: as JAX calls it: `cpu`, `cuda`, `rocm` or `tpu`.
    """
    device = AbstractDevice(platform, num_cores=None, platform=platform)
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def spec(*axes: str | None) -> P:
    """A `PartitionSpec` without the axes that the current mesh does not have."""
    mesh = jax.sharding.get_abstract_mesh()
    return P(*(axis if axis in mesh.shape else None for axis in axes))


def sharding(*axes: str | None) -> NamedSharding | None:
    """The `NamedSharding` of `spec(*axes)` on the current mesh; `None` without a mesh.

    Only outside of `jax.jit`: it names concrete devices.
    """
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else NamedSharding(mesh, spec(*axes))


def constrain(array: AnArray, *axes: str | None) -> AnArray:
    """Steers the compiler: `array` is to be laid out over these mesh axes, one a dimension.

    Without a mesh it returns `array` as it is.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return array
    return jax.lax.with_sharding_constraint(array, spec(*axes))


def split_axes(*axes: str) -> tuple[str, ...]:
    """Those of these axes over which the mesh of the context splits anything."""
    return tuple(axis for axis in axes if axis_size(axis) > 1)


def island(
    function: Callable, in_specs: PyTree, out_specs: PyTree, *, over: Sequence[str] = (POINTS,)
) -> Callable:
    """Makes `function` run on each shard of the points, with its own communication.

    `function` takes a keyword `axis`, the name to pass to `jax.lax.psum` and its like, or `None`
    where the points are not split. Only the axes `over` are manual inside; the others stay with the
    compiler.

    Args:
        function: called as `function(*arrays, axis=...)` on the shards.
        in_specs: one tree of `PartitionSpec` an argument, naming no axis but those of `over`.
        out_specs: likewise for the outputs. An output without one of these axes must be the same
            on every shard, that is, reduced.
        over: `points`, or `data` and `points`.

    Returns:
        A function of the whole arrays, which must be called under `jax.jit`.
    """
    axes = split_axes(*over)
    function = partial(function, axis=POINTS if POINTS in axes else None)
    if not axes:
        return function

    def kept(entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if isinstance(entry, tuple):
            return tuple(axis for axis in entry if axis in axes)
        return entry if entry in axes else None

    def split(spec: P) -> P:
        return P(*map(kept, spec))

    is_spec = lambda leaf: isinstance(leaf, P)  # noqa: E731
    return jax.shard_map(
        function,
        in_specs=jax.tree.map(split, in_specs, is_leaf=is_spec),
        out_specs=jax.tree.map(split, out_specs, is_leaf=is_spec),
        axis_names=set(axes),
        # Each island has a backward island of its own: autodiff never sees what is replicated.
        check_vma=False,
    )


def by_heads(function: Callable) -> Callable:
    """Makes `function` of arrays `(B, n, H, D)` run on each shard of the heads, all axes manual.

    For what the compiler's partitioner cannot handle where only some axes are manual, as inside an
    island. The heads must divide over their axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    left = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind != AxisType.Manual
    }
    if not left:
        return function
    heads = P(None, None, HEADS if HEADS in left else None)
    return jax.shard_map(
        function, in_specs=heads, out_specs=heads, axis_names=left, check_vma=False
    )


def replicate_unsharded(array: T) -> T:
    """An array that lies on one device, copied to all devices of the mesh; others as they are.

    A committed single-device array could otherwise not meet sharded weights in one program.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return array
    if isinstance(array.sharding, NamedSharding):
        return array
    return jax.device_put(array, spec())
