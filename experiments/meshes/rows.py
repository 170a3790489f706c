"""Which rows of a cloud a sample is made of: all, or a random subset, and any window of them.

A subset is drawn by numbers alone (the seed of the run, the number of the draw, the sample), so
that any process draws the same one and reads only its own window of it. In a store whose points
were shuffled when it was written, a run of rows that starts anywhere is such a subset, and no other
chunk of the file needs to be read; elsewhere single rows are drawn.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Shaped

from experiments.meshes.sample_arrays import Arrays


@dataclass(frozen=True)
class Rows:
    """Rows of a cloud, in order.

    Attributes:
        count: number of them.
        first: of a run, which goes on at row 0 after the last row of the cloud.
        total: rows of the cloud.
        chosen: single rows instead of a run.
    """

    count: int
    total: int
    first: int = 0
    chosen: Int[np.ndarray, " n"] | None = None

    @classmethod
    def all(cls, total: int) -> "Rows":
        """The whole cloud."""
        return cls(total, total)

    @classmethod
    def drawn(
        cls, total: int, count: int | None, seeds: tuple[int, ...], *, shuffled: bool
    ) -> "Rows":
        """A random subset.

        Args:
            total: rows of the cloud.
            count: rows of the subset; `None`, or more than there are, for the whole cloud.
            seeds: numbers of this draw.
            shuffled: whether the cloud lies in random order.
        """
        if count is None or count >= total:
            return cls.all(total)
        generator = np.random.default_rng(seeds)
        if shuffled:
            return cls(count, total, int(generator.integers(total)))
        return cls(count, total, chosen=np.sort(generator.choice(total, count, replace=False)))

    def read(
        self, arrays: Arrays, name: str, window: slice = slice(None)
    ) -> Shaped[np.ndarray, "n *C"]:
        """The rows of an array that lie in a window of this order."""
        start, stop, _ = window.indices(self.count)
        if self.chosen is not None:
            return arrays.read_rows(name, self.chosen[start:stop])
        start, stop = self.first + start, self.first + stop
        turns = (slice(start - shift, min(stop - shift, self.total)) for shift in (0, self.total))
        parts = [
            arrays.read(name, slice(max(0, turn.start), turn.stop))
            for turn in turns
            if turn.stop > max(0, turn.start)
        ]
        if not parts:
            return arrays.read(name, slice(0, 0))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
