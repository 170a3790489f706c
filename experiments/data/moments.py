"""Mean, standard deviation, least and greatest value of columns that come in blocks of rows.

Exact whatever the blocks: means and squared deviations of two sets merge without a difference of
large sums (Chan, Golub and LeVeque, The American Statistician 37(3), 1983).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Float64

# Rows that are worked on at a time.
BLOCK = 2**20


@dataclass(frozen=True)
class Moments:
    """What is known of the rows so far.

    Attributes:
        count: number of rows.
        mean: of each column.
        squares: sum of squared deviations from the mean.
        least: value of each column.
        greatest: value of each column.
    """

    count: int
    mean: Float64[np.ndarray, " C"]
    squares: Float64[np.ndarray, " C"]
    least: Float64[np.ndarray, " C"]
    greatest: Float64[np.ndarray, " C"]

    @classmethod
    def of(cls, rows: Float[np.ndarray, "n *C"]) -> "Moments":
        """Those of some rows; a vector counts as one column. Those of no row change no others."""
        rows = np.asarray(rows, np.float64)
        rows = rows.reshape(len(rows), math.prod(rows.shape[1:]))
        if not len(rows):
            zero = np.zeros(rows.shape[1])
            return cls(0, zero, zero, zero + np.inf, zero - np.inf)
        mean = rows.mean(0)
        squares = np.square(rows - mean).sum(0)
        return cls(len(rows), mean, squares, rows.min(0), rows.max(0))

    @classmethod
    def of_blocks(
        cls, read: Callable[[slice], Float[np.ndarray, "n *C"]], total: int, block: int = BLOCK
    ) -> "Moments":
        """Those of `total` rows, of which `read` hands out any slice."""
        moments = cls.of(read(slice(0, min(block, total))))
        for start in range(block, total, block):
            moments = moments.merge(cls.of(read(slice(start, min(start + block, total)))))
        return moments

    def merge(self, other: "Moments") -> "Moments":
        """Those of the rows of both."""
        count = self.count + other.count
        step = other.mean - self.mean
        # Two that have no rows have means of zero: any number divides their step.
        over = max(count, 1)
        return Moments(
            count,
            self.mean + step * (other.count / over),
            self.squares + other.squares + step**2 * (self.count * other.count / over),
            np.minimum(self.least, other.least),
            np.maximum(self.greatest, other.greatest),
        )

    @property
    def deviation(self) -> Float64[np.ndarray, " C"]:
        """Standard deviation of each column."""
        return np.sqrt(self.squares / self.count)


def over_processes(moments: Sequence[Moments] | None, widths: Sequence[int]) -> Sequence[Moments]:
    """Moments of the rows of all processes, from those of each.

    Args:
        moments: of this process; `None` where it has no rows.
        widths: columns of each, which all processes know.
    """
    if moments is not None and jax.process_count() == 1:
        return moments
    from jax.experimental import multihost_utils

    ends = np.cumsum([1 + 4 * width for width in widths])
    own = np.zeros(ends[-1])
    if moments is not None:
        own = np.concatenate(
            [[m.count, *m.mean, *m.squares, *m.least, *m.greatest] for m in moments]
        )
    # As words: JAX would narrow float64 to float32.
    words = multihost_utils.process_allgather(own.view(np.uint32))
    merged: Any = None
    for row in np.ascontiguousarray(words).view(np.float64):
        # A process that has samples has extremes, be they of no points.
        if not row.any():
            continue
        parts = [Moments(int(part[0]), *np.split(part[1:], 4)) for part in np.split(row, ends[:-1])]
        merged = parts if merged is None else list(map(Moments.merge, merged, parts))
    return merged
