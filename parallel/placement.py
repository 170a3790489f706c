"""Batches laid out on the mesh, whole or what one process holds of them, and brought back."""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from parallel import mesh as mesh_lib
from parallel.annotations import AnyArray, Index
from parallel.mesh import DATA, POINTS


def local_rows(batch: int) -> slice:
    """The samples of a batch that the devices of this process hold: all of them on one host.

    Raises:
        ValueError: the batch does not divide over `data`.
    """
    check_batch(batch)
    sharding = mesh_lib.sharding(DATA)
    if sharding is None:
        return slice(0, batch)
    indices: Iterable[Index] = sharding.addressable_devices_indices_map((batch,)).values()
    held = [index[0].indices(batch) for index in indices]
    return slice(min(start for start, _, _ in held), max(stop for _, stop, _ in held))


def local_windows(batch: int, length: int) -> dict[int, slice]:
    """Which points of which samples the devices of this process hold.

    Args:
        batch: samples of the whole batch.
        length: points of a sample as it is padded; a multiple of the `points` axis.

    Returns:
        By the place of a sample in the batch, the least run of points that has all of them.

    Raises:
        ValueError: the batch does not divide over `data`.
    """
    check_batch(batch)
    sharding = mesh_lib.sharding(DATA, POINTS)
    if sharding is None:
        return {row: slice(0, length) for row in range(batch)}
    windows: dict[int, slice] = {}
    indices: Iterable[Index] = sharding.addressable_devices_indices_map((batch, length)).values()
    for rows, points in indices:
        start, stop, _ = points.indices(length)
        for row in range(*rows.indices(batch)):
            had = windows.get(row, slice(start, stop))
            windows[row] = slice(min(start, had.start), max(stop, had.stop))
    return dict(sorted(windows.items()))


def place_windows(
    samples: Mapping[int, Shaped[np.ndarray, "n *C"]],
    windows: Mapping[int, slice],
    batch: int,
    length: int,
    fill: float = 0,
) -> Shaped[Array, "B N *C"]:
    """Places a batch of which this process has only what its devices hold.

    Args:
        samples: the real points of each window, by the place of their sample in the batch.
        windows: of `local_windows`; padding behind the real points of one is made here.
        batch: samples of the whole batch.
        length: points of a sample as it is padded.
        fill: what padding is made of.

    Returns:
        The batch `(B, length, ...)`, laid out over `data` and `points`.
    """
    first = next(iter(samples.values()))
    dtype = jax.dtypes.canonicalize_dtype(first.dtype)

    def part_of(index: Index) -> np.ndarray:
        rows, points = range(*index[0].indices(batch)), index[1].indices(length)
        part = np.full((len(rows), points[1] - points[0], *first.shape[1:]), fill, dtype)
        for i, row in enumerate(rows):
            offset = windows[row].start
            values = samples[row][points[0] - offset : points[1] - offset]
            part[i, : len(values)] = values
        return part

    whole = (slice(None), slice(None))
    sharding = mesh_lib.sharding(DATA, POINTS, *[None] * (first.ndim - 1))
    if sharding is None:
        return jnp.asarray(part_of(whole))
    shape = (batch, length, *first.shape[1:])
    return jax.make_array_from_callback(shape, sharding, part_of)


def place(
    array: np.ndarray | jax.Array,
    batch: int | None = None,
    first_row: int = 0,
    *,
    split_points: bool = True,
) -> jax.Array:
    """Places a batch on the mesh: axis 0 over `data`, axis 1 over `points`. Both must divide.

    Each device is handed its own slice of a NumPy array; no device ever holds the whole. Under
    `jax.jit` the array is steered instead, and a NumPy array is a constant of the program.

    Args:
        array: the samples `first_row` and following of the batch.
        batch: samples of the whole batch, by default those of `array`.
        first_row: place of the first sample of `array` in the batch.
        split_points: whether axis 1 is of points, and not whole on every shard of them.
    """
    axes = (DATA, POINTS if split_points else None, *[None] * (array.ndim - 2))
    if isinstance(array, jax.core.Tracer) or mesh_lib.is_traced():
        return mesh_lib.constrain(jnp.asarray(array), *axes)
    sharding = mesh_lib.sharding(*axes)
    if sharding is None:
        return jnp.asarray(array)
    if isinstance(array, jax.Array):
        return jax.device_put(array, sharding)
    shape = (array.shape[0] if batch is None else batch, *array.shape[1:])
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)

    def slice_of(index: Index) -> np.ndarray:
        rows = index[0].indices(shape[0])
        held = array[rows[0] - first_row : rows[1] - first_row]
        return held[(slice(None), *index[1:])].astype(dtype, copy=False)

    return jax.make_array_from_callback(shape, sharding, slice_of)


def check_batch(batch: int) -> None:
    """Refuses a batch that does not divide over `data`.

    Raises:
        ValueError: it does not.
    """
    groups = mesh_lib.axis_size(DATA)
    if batch % groups:
        raise ValueError(
            f"a batch of {batch} samples does not divide over the mesh axis 'data' of {groups}; "
            f"use a multiple of {groups} samples or a smaller axis"
        )


def to_host(array: AnyArray) -> np.ndarray:
    """An array, whole, as NumPy on every host."""
    replicated = isinstance(array, jax.Array) and array.is_fully_replicated
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or replicated):
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)
