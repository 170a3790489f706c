"""Batches of a split on the device mesh: shuffled for training, in order for evaluation."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import grain
import numpy as np

from experiments.data.batch import Batch, Sample
from experiments.data.dataset import Split
from experiments.data.placement import Placement
from experiments.messages import one_line
from experiments.processes.coordination import problems_of_all

# As good as endless; Grain counts the batches of an endless pipeline, and one of single samples has
# more than it can count.
_EPOCHS = 2**31
# Samples of evaluation that are not of one batch of training have together at most so many.
_POINTS_OF_EVALUATION = 2**18


class _Read(NamedTuple):
    """What this process has read of a batch: samples, or why they cannot be read, by their places.

    Attributes:
        batch: its number.
        indices: numbers of its samples.
        samples: those of which this process holds some points.
    """

    batch: int
    indices: np.ndarray
    samples: dict[int, Sample | ValueError]


class Loader:
    """Endless shuffled batches of a split, with a position that can be saved.

    All hosts draw the same order of samples, and the same points of them; each reads only what of
    a batch its devices hold.

    Attributes:
        waited: seconds that `next` has waited for what was not read yet.
        bad: what is wrong with samples that were skipped, by their number.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        accumulate: int,
        seed: int,
        threads: int,
        structured_shape: tuple[int, ...] | None,
        *,
        skip_bad: bool = False,
    ) -> None:
        """Prepares the pipeline.

        Args:
            split: where samples come from.
            batch_size: samples of a batch over all hosts.
            accumulate: batches handed out together.
            seed: seed of the order, and of what is drawn of a sample.
            threads: threads that prepare batches.
            structured_shape: shape of the grid, see `parallel.shard_points`.
            skip_bad: take another sample where one cannot be read, by any host. All hosts then
                wait for each other before they place a batch.

        Raises:
            ValueError: the batch does not divide over the mesh, or there are fewer samples.
        """
        if batch_size > len(split):
            raise ValueError(
                f"train.batch_size: expected at most the {len(split)} training samples; "
                f"got {batch_size}"
            )
        self._placement = Placement.of(split, batch_size, structured_shape)
        self._split, self._seed, self._skip_bad = split, seed, skip_bad
        order = grain.MapDataset.range(len(split)).shuffle(seed=seed).repeat(_EPOCHS)
        self._order = order.batch(batch_size)
        batches = self._order.map_with_index(self._read)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=4 * threads)
        self._iterator = iter(batches.to_iter_dataset(options))
        self._accumulate = accumulate
        self.waited = 0.0
        self.bad: dict[int, str] = {}

    def _read(self, batch: int, indices: np.ndarray) -> _Read:
        samples = {row: self._sample(batch, row, int(indices[row])) for row in self._placement.rows}
        return _Read(batch, np.array(indices), samples)

    def _sample(self, batch: int, row: int, index: int) -> Sample | ValueError:
        try:
            return self._placement.read(self._split, row, index, (self._seed, batch, row))
        except ValueError as error:
            if not self._skip_bad:
                raise
            return error

    def _whole(self, read: _Read) -> dict[int, Sample]:
        """The samples of a batch, with others in the place of those that are bad.

        These are the next ones in the split, on all hosts: each may hold another part of a sample.
        """
        batch, indices, samples = read
        for _ in range(len(self._split)):
            good = {row: each for row, each in samples.items() if not isinstance(each, ValueError)}
            if not self._skip_bad:
                return good
            own = {
                row: one_line(bad) for row, bad in samples.items() if isinstance(bad, ValueError)
            }
            told = problems_of_all(json.dumps(own) if own else None)
            if not told:
                return good
            rows = {
                int(row): why for text in told.values() for row, why in json.loads(text).items()
            }
            for row, why in rows.items():
                self.bad[int(indices[row])] = why
                indices[row] = (indices[row] + 1) % len(self._split)
                if row in samples:
                    samples[row] = self._sample(batch, row, int(indices[row]))
        raise ValueError(f"expected a sample that can be read; got none: {why}")

    def samples_of(self, step: int) -> list[int]:
        """Numbers of the samples of a step, counted from 1."""
        batches = range((step - 1) * self._accumulate, step * self._accumulate)
        return [int(index) for batch in batches for index in self._order[batch]]

    def read_again(self, step: int) -> list[dict[int, Sample]]:
        """What this process has read for a step, by the places in its batches."""
        batches = range((step - 1) * self._accumulate, step * self._accumulate)
        return [self._whole(self._read(batch, self._order[batch])) for batch in batches]

    def position_after(self, step: int) -> dict:
        """Where the loader stands when it has handed out the batches of so many steps."""
        return self.position | {"next_index": step * self._accumulate}

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        """The loader itself."""
        return self

    def __next__(self) -> tuple[Batch, ...]:
        """The batches of the next optimizer step, placed on the mesh."""
        return tuple(self._placement.place(self._next()) for _ in range(self._accumulate))

    def _next(self) -> dict[int, Sample]:
        started = time.perf_counter()
        samples = self._whole(next(self._iterator))
        self.waited += time.perf_counter() - started
        return samples

    @property
    def position(self) -> dict:
        """Where the loader stands: what `position` takes to go on from there."""
        return self._iterator.get_state()

    @position.setter
    def position(self, position: dict) -> None:
        self._iterator.set_state(position)


def whole_batches(
    split: Split,
    batch_size: int,
    structured_shape: tuple[int, ...] | None,
    samples: Sequence[int] | None = None,
) -> Iterator[tuple[Batch, np.ndarray]]:
    """Every sample once, in order: batches of one size, and the samples of them that count.

    The last batch is filled up with the first samples.

    Args:
        split: the samples.
        batch_size: of a batch over all hosts.
        structured_shape: shape of the grid, see `parallel.shard_points`.
        samples: those that are wanted, by default all.
    """
    placement = Placement.of(split, batch_size, structured_shape)
    wanted = np.arange(len(split)) if samples is None else np.asarray(samples)
    for start in range(0, len(wanted), batch_size):
        indices = wanted[np.arange(start, start + batch_size) % len(wanted)]
        read = {row: placement.read(split, row, int(indices[row])) for row in placement.rows}
        yield placement.place(read), indices[: min(batch_size, len(wanted) - start)]


def evaluation_batch_size(train_batch_size: int, points: int) -> int:
    """A multiple of the training batch of at least 16 samples, or fewer of many points."""
    wanted = min(16, _POINTS_OF_EVALUATION // points)
    return train_batch_size * max(1, math.ceil(wanted / train_batch_size))
