"""Point clouds and grids on the mesh: padding, placing, masks, and the way back to the host."""

import math
from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, Shaped

from parallel import mesh as mesh_lib
from parallel.annotations import AnyArray, Integer, Size
from parallel.mesh import POINTS
from parallel.placement import check_batch, place, to_host


def grid_shape(structured_shape: Sequence[Integer]) -> tuple[int, ...]:
    """The shape of a structured grid, as a tuple.

    Raises:
        ValueError: it is not 2 or 3 positive integers.
    """
    wrong = ValueError(
        f"structured_shape: expected 2 or 3 positive integers; got {structured_shape!r}"
    )
    given: Any = structured_shape
    if isinstance(given, str) or np.ndim(given) != 1:
        raise wrong
    sizes = list(given)
    if len(sizes) not in (2, 3) or not all(_is_count(size) for size in sizes):
        raise wrong
    return tuple(int(size) for size in sizes)


def _is_count(value: ArrayLike) -> bool:
    """Whether a value is one positive integer, of Python, NumPy or JAX."""
    value = np.asarray(value)
    return value.ndim == 0 and value.dtype.kind in "iu" and bool(value >= 1)


def padded_size(size: Size) -> Size:
    """The smallest multiple of the `points` axis that holds `size` points, or rows of a grid."""
    shards = mesh_lib.axis_size(POINTS)
    return -(-size // shards) * shards


def shard_points(
    x: Shaped[AnyArray, "B N *C"] | Sequence[Shaped[AnyArray, "_N_i *_C"]],
    structured_shape: Sequence[Integer] | None = None,
    *,
    batch: int | None = None,
    first_row: int = 0,
    length: int | None = None,
) -> tuple[Shaped[Array, "B N_padded *C"], Bool[Array, "B N_padded *_"]]:
    """Pads the points of a batch to a multiple of the `points` axis and places them on the mesh.

    Axis 0 goes over `data`, the points over `points`. Without a mesh nothing is split, and only
    samples of different length are padded.

    Args:
        x: one array `(B, N, C)`, or a list of arrays `(N_i, C)` of different length. With
            `structured_shape` also `(B, *structured_shape, C)`. NumPy or JAX arrays.
        structured_shape: shape of a structured grid, `(H, W)` or `(H, W, D)`. Whole rows (entries
            of the first grid axis) are then padded and split, whether `x` is flat or spatial, so
            that both stay aligned.
        batch: samples of the whole batch, where `x` holds only those that this process needs (see
            `local_rows`); by default `x` is the whole batch.
        first_row: place in the whole batch of the first sample of `x`.
        length: points of a cloud to pad to at least, so that batches of different samples have one
            shape; by default those of the longest sample.

    Returns:
        The padded array and its mask in the layout of the points of `x`: `(B, N_padded)`, or
        `(B, H_padded, W)` for a spatial grid. The mask is True where a row is a real point;
        padding rows are zero.

    Raises:
        ValueError: no numbers, a wrong rank, a grid that does not match, samples of different
            width, an empty sample or one longer than `length`, or a batch that does not divide over
            `data`.
    """
    array, lengths = _stack(x)
    grid = None if structured_shape is None else _check_grid(array, grid_shape(structured_shape))
    batch = array.shape[0] if batch is None else batch
    check_batch(batch)

    if length is not None and (
        grid is not None or not _is_count(length) or length < array.shape[1]
    ):
        raise ValueError(
            f"shard_points: length: expected at least the {array.shape[1]} points of the longest "
            f"sample, of a cloud; got {length!r}"
        )
    if grid is None:
        layout, points_a_row = array.shape[1:2], 1
        rows = array.shape[1] if length is None else int(length)
    elif array.ndim == 3:
        layout, rows, points_a_row = array.shape[1:2], grid[0], math.prod(grid[1:])
    else:
        layout, rows, points_a_row = grid, grid[0], 1
    extra = padded_size(rows) * points_a_row - layout[0]

    mask = np.zeros((array.shape[0], layout[0] + extra, *layout[1:]), dtype=bool)
    for sample, real in enumerate(lengths):
        mask[sample, :real] = True
    return place(pad_axis(array, 1, extra), batch, first_row), place(mask, batch, first_row)


def unshard_points(
    y: Shaped[AnyArray, "B N_padded *C"],
    num_points: Integer | Sequence[Integer] | Int[AnyArray, "*_"] | None = None,
    structured_shape: Sequence[Integer] | None = None,
) -> np.ndarray | list[np.ndarray]:
    """Brings points back to the host and drops the padding that `shard_points` added.

    Args:
        y: an array `(B, N_padded, C)`, or a spatial grid `(B, H_padded, W, C)`.
        num_points: number of real points, one for all samples or one a sample. Needed for clouds;
            a grid has its own.
        structured_shape: the argument that `shard_points` was given.

    Returns:
        A NumPy array `(B, N, C)` or `(B, *structured_shape, C)`; a list of arrays `(N_i, C)` where
        `num_points` is a sequence.

    Raises:
        ValueError: neither argument is given, `num_points` is not made of positive integers, or `y`
            has fewer points than are asked for.
    """
    if np.ndim(y) < 3:
        raise ValueError(f"unshard_points: expected (B, N, C), got shape {np.shape(y)}")
    if structured_shape is not None:
        grid = grid_shape(structured_shape)
        num_points = math.prod(grid) if y.ndim == 3 else grid[0]
    elif num_points is None:
        raise ValueError(
            "unshard_points: expected num_points=, the real number of points; got None"
        )

    given: Any = num_points
    single = np.ndim(given) == 0
    counts = [given] if single else list(given)
    if not single and len(counts) != y.shape[0]:
        raise ValueError(
            f"unshard_points: expected one num_points for each of {y.shape[0]} samples, "
            f"got {len(counts)}"
        )
    for count in counts:
        if not _is_count(count):
            raise ValueError(
                f"unshard_points: num_points: expected positive integers, got {num_points!r}"
            )
        if count > y.shape[1]:
            raise ValueError(
                f"unshard_points: asked for {count} points, the array has {y.shape[1]}: "
                f"shape {tuple(y.shape)}"
            )
    host = to_host(y)
    if single:
        return host[:, : counts[0]]
    return [sample[:count] for sample, count in zip(host, counts, strict=True)]


@overload
def pad_axis(x: jax.Array, axis: int, extra: Size) -> jax.Array: ...
@overload
def pad_axis(x: np.ndarray, axis: int, extra: Size) -> np.ndarray: ...
def pad_axis(x: AnyArray, axis: int, extra: Size) -> AnyArray:
    """Appends `extra` zero entries to one axis; on the host for a NumPy array."""
    if not extra:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, extra)
    return np.pad(x, widths) if isinstance(x, np.ndarray) else jnp.pad(x, widths)


def _stack(x: ArrayLike | Sequence[ArrayLike]) -> tuple[np.ndarray | jax.Array, list[int]]:
    """One array (B, N, ...) and the number of real entries of axis 1 in each sample."""
    if not isinstance(x, list | tuple):
        x = _numbers("", x)
        if x.ndim < 3:
            raise ValueError(
                f"shard_points: expected an array (B, N, C) or a list of arrays (N_i, C), "
                f"got shape {tuple(x.shape)}"
            )
        if 0 in x.shape[:-1]:
            raise ValueError(f"shard_points: a sample without points, got shape {tuple(x.shape)}")
        return x, [x.shape[1]] * x.shape[0]

    samples = [_numbers(f"sample {i}: ", sample) for i, sample in enumerate(x)]
    if not samples:
        raise ValueError("shard_points: expected at least one sample, got an empty list")
    for i, sample in enumerate(samples):
        if sample.ndim != samples[0].ndim or sample.ndim < 2:
            raise ValueError(f"shard_points: sample {i}: expected (N_i, C), got {sample.shape}")
        if sample.shape[1:] != samples[0].shape[1:]:
            raise ValueError(
                f"shard_points: sample {i}: expected the width {samples[0].shape[1:]} of sample 0, "
                f"got shape {sample.shape}"
            )
        if not sample.shape[0]:
            raise ValueError(f"shard_points: sample {i} has no points, got {sample.shape}")
    lengths = [sample.shape[0] for sample in samples]
    padded = [pad_axis(sample, 0, max(lengths) - len(sample)) for sample in samples]
    on_host = all(isinstance(sample, np.ndarray) for sample in padded)
    return np.stack(padded) if on_host else jnp.stack(padded), lengths


def _numbers(where: str, x: ArrayLike | Sequence[ArrayLike]) -> np.ndarray | jax.Array:
    """An array as it is, or nested sequences of numbers as one."""
    if not isinstance(x, jax.Array):
        try:
            x = np.asarray(x)
        except ValueError as error:
            raise ValueError(f"shard_points: {where}expected an array, got {error}") from error
    if not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool):
        raise ValueError(f"shard_points: {where}expected numbers, got type {x.dtype}")
    return x


def _check_grid(x: AnyArray, grid: tuple[int, ...]) -> tuple[int, ...]:
    flat = x.ndim == 3 and x.shape[1] == math.prod(grid)
    spatial = x.ndim == len(grid) + 2 and tuple(x.shape[1:-1]) == grid
    if not flat and not spatial:
        raise ValueError(
            f"shard_points: structured_shape {grid} expects (B, {math.prod(grid)}, C) or "
            f"(B, {', '.join(map(str, grid))}, C), got shape {tuple(x.shape)}"
        )
    return grid
