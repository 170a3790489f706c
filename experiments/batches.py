"""Batches of a split on the device mesh: shuffled for training, in order for evaluation."""

import math
from collections.abc import Iterator

import grain
import numpy as np

import parallel
from experiments.data import Batch, Split
from parallel.points import place


class Loader:
    """Endless shuffled batches of a split, with a position that can be saved.

    All hosts draw the same order of samples; each reads only the rows of a batch that its devices
    hold.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        accumulate: int,
        seed: int,
        threads: int,
        structured_shape: tuple[int, ...] | None,
    ):
        """Prepares the pipeline.

        Args:
            split: where samples come from.
            batch_size: samples of a batch over all hosts.
            accumulate: batches handed out together.
            seed: seed of the order.
            threads: threads that prepare batches.
            structured_shape: shape of the grid, see `parallel.shard_points`.

        Raises:
            ValueError: the batch does not divide over the mesh, or there are fewer samples.
        """
        if batch_size > len(split):
            raise ValueError(
                f"train.batch_size: expected at most the {len(split)} training samples; "
                f"got {batch_size}"
            )
        self._batch_size = batch_size
        self._structured_shape = structured_shape
        self._length = split.length
        rows = parallel.local_rows(batch_size)
        self._first_row = rows.start
        order = grain.MapDataset.range(len(split)).shuffle(seed=seed).repeat()
        batches = order.batch(batch_size).map(lambda indices: split.take(indices[rows]))
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=4 * threads)
        self._iterator = iter(batches.to_iter_dataset(options))
        self._accumulate = accumulate

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        """The loader itself."""
        return self

    def __next__(self) -> tuple[Batch, ...]:
        """The batches of the next optimizer step, placed on the mesh."""
        return tuple(
            place_batch(
                next(self._iterator),
                self._structured_shape,
                self._batch_size,
                self._first_row,
                length=self._length,
            )
            for _ in range(self._accumulate)
        )

    @property
    def position(self) -> dict:
        """Where the loader stands: what `position` takes to go on from there."""
        return self._iterator.get_state()

    @position.setter
    def position(self, position: dict) -> None:
        self._iterator.set_state(position)


def place_batch(
    batch: Batch,
    structured_shape: tuple[int, ...] | None,
    batch_size: int,
    first_row: int = 0,
    *,
    length: int,
) -> Batch:
    """Pads the points of a host batch, places it on the mesh, and gives it its masks.

    Args:
        batch: the samples `first_row` and following.
        structured_shape: shape of the grid, if they have one.
        batch_size: samples of the whole batch.
        first_row: place of the first sample of `batch` in the whole batch.
        length: points to pad clouds to, so that every batch has the same shape.
    """

    def shard(points, length=None):
        if points is None:
            return None, None
        return parallel.shard_points(
            points, structured_shape, batch=batch_size, first_row=first_row, length=length
        )

    length = length if structured_shape is None else None
    embedding, mask = shard(batch.embedding, length)
    geometry, geometry_mask = shard(batch.geometry)
    tokens = batch.global_embedding
    return Batch(
        shard(batch.fx, length)[0],
        embedding,
        shard(batch.target, length)[0],
        mask,
        geometry,
        geometry_mask,
        None if tokens is None else place(tokens, batch_size, first_row, split_points=False),
    )


def whole_batches(
    split: Split, batch_size: int, structured_shape: tuple[int, ...] | None
) -> Iterator[tuple[Batch, np.ndarray]]:
    """Every sample once, in order: batches of one size, and the samples of them that count.

    The last batch is filled up with the first samples.
    """
    rows = parallel.local_rows(batch_size)
    for start in range(0, len(split), batch_size):
        indices = np.arange(start, start + batch_size) % len(split)
        batch = place_batch(
            split.take(indices[rows]),
            structured_shape,
            batch_size,
            rows.start,
            length=split.length,
        )
        yield batch, indices[: min(batch_size, len(split) - start)]


def evaluation_batch_size(train_batch_size: int) -> int:
    """A multiple of the training batch of at least 16 samples."""
    return train_batch_size * math.ceil(16 / train_batch_size)
