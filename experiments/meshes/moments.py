"""Mean, standard deviation, least and greatest value of columns that come in blocks of rows.

Exact whatever the blocks: means and squared deviations of two sets merge without a difference of
large sums (Chan, Golub and LeVeque, The American Statistician 37(3), 1983).
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64

from experiments.meshes.store import StoredSample

# Rows that are read at a time.
_BLOCK = 2**20


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
        """Those of some rows, at least one; a vector counts as one column."""
        rows = np.asarray(rows, np.float64).reshape(len(rows), -1)
        mean = rows.mean(0)
        squares = np.square(rows - mean).sum(0)
        return cls(len(rows), mean, squares, rows.min(0), rows.max(0))

    def merge(self, other: "Moments") -> "Moments":
        """Those of the rows of both."""
        count = self.count + other.count
        step = other.mean - self.mean
        return Moments(
            count,
            self.mean + step * (other.count / count),
            self.squares + other.squares + step**2 * (self.count * other.count / count),
            np.minimum(self.least, other.least),
            np.maximum(self.greatest, other.greatest),
        )

    @property
    def deviation(self) -> Float64[np.ndarray, " C"]:
        """Standard deviation of each column."""
        return np.sqrt(self.squares / self.count)


def moments_of(sample: StoredSample, name: str, block: int = _BLOCK) -> Moments:
    """Those of an array of a sample, read block by block.

    Raises:
        ValueError: the sample has no such array, it is empty, or has a value that is not finite.
    """
    total = sample.shape(name)[0]
    if total == 0:
        raise ValueError(f"{sample.path}: array {name!r}: expected values; got none")
    moments = None
    for start in range(0, total, block):
        rows = sample.read(name, slice(start, min(start + block, total)))
        if not np.isfinite(rows).all():
            raise ValueError(
                f"{sample.path}: array {name!r}: expected finite values; "
                f"got {np.count_nonzero(~np.isfinite(rows))} that are not from row {start} on"
            )
        these = Moments.of(rows)
        moments = these if moments is None else moments.merge(these)
    return moments
