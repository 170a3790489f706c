"""Data sets as arrays of points, their statistics, and batches of them on the device mesh."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import grain
import numpy as np
from jaxtyping import Array, Bool, Float

import parallel
from experiments.config import DarcyConfig, DataConfig
from experiments.darcy_cache import load_darcy
from experiments.darcy_files import load_darcy_mat


class Batch(NamedTuple):
    """A batch on the device mesh, or on the host before it is placed (then without a mask).

    Attributes:
        fx: input values.
        embedding: positions.
        target: fields to predict, in physical units.
        point_mask: True where a point is real.
    """

    fx: Float[Array, "B N C_in"]
    embedding: Float[Array, "B N C_emb"]
    target: Float[Array, "B N C_out"]
    point_mask: Bool[Array, "B N"] | None = None


class Statistics(NamedTuple):
    """Mean and standard deviation of each channel, over the training split."""

    fx_mean: Float[Array, " C_in"]
    fx_deviation: Float[Array, " C_in"]
    embedding_mean: Float[Array, " C_emb"]
    embedding_deviation: Float[Array, " C_emb"]
    target_mean: Float[Array, " C_out"]
    target_deviation: Float[Array, " C_out"]


@dataclass(frozen=True)
class Split:
    """Samples on the same points.

    Attributes:
        fx: input values `(n, N, C_in)`.
        embedding: positions `(N, C_emb)`, shared by the samples.
        target: fields `(n, N, C_out)` in physical units.
    """

    fx: Float[np.ndarray, "n N C_in"]
    embedding: Float[np.ndarray, "N C_emb"]
    target: Float[np.ndarray, "n N C_out"]

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.fx)

    def take(self, indices: np.ndarray) -> Batch:
        """The samples of these indices, on the host."""
        embedding = np.broadcast_to(self.embedding, (len(indices), *self.embedding.shape))
        return Batch(self.fx[indices], embedding, self.target[indices])


@dataclass(frozen=True)
class Dataset:
    """Training, validation and test splits, and the shape of their grid if they have one."""

    splits: dict[str, Split]
    structured_shape: tuple[int, ...] | None

    def statistics(self) -> Statistics:
        """Statistics of the training split, accumulated in float64."""
        train = self.splits["train"]
        moments = []
        for name in ("fx", "embedding", "target"):
            values = getattr(train, name)
            axes = tuple(range(values.ndim - 1))
            mean = values.mean(axes, dtype=np.float64)
            deviation = values.std(axes, dtype=np.float64)
            # A channel that never changes says nothing; dividing by its deviation would be 0 / 0.
            deviation = np.where(deviation > 1e-6 * np.abs(mean), deviation, 1)
            moments += [mean.astype(np.float32), deviation.astype(np.float32)]
        return Statistics(*moments)


def load_dataset(config: DataConfig) -> Dataset:
    """Loads the data set that a configuration names.

    Raises:
        ValueError: a file is damaged or does not hold what is asked for.
        FileNotFoundError: a file is not there.
    """
    if isinstance(config, DarcyConfig):
        return _load_darcy(config)
    raise ValueError(f"data.name: no loader for {config.name!r}")


def _load_darcy(config: DarcyConfig) -> Dataset:
    sizes = {"train": config.train, "validation": config.validation, "test": config.test}
    if (config.mat_train is None) != (config.mat_test is None):
        raise ValueError("data: expected both or none of mat_train and mat_test; got one")
    if config.mat_train is not None:
        arrays = load_darcy_mat(
            Path(config.mat_train), Path(config.mat_test), config.resolution, sizes
        )
    else:
        arrays = load_darcy(config.resolution, sizes, config.seed, Path(config.cache_dir))
    points = config.resolution**2
    splits = {
        name: Split(
            fx=split.permeability.reshape(-1, points, 1),
            embedding=split.coordinates,
            target=split.pressure.reshape(-1, points, 1),
        )
        for name, split in arrays.items()
    }
    return Dataset(splits, (config.resolution, config.resolution))


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
                next(self._iterator), self._structured_shape, self._batch_size, self._first_row
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
) -> Batch:
    """Pads the points of a host batch, places it on the mesh, and gives it its mask."""
    placed = [
        parallel.shard_points(array, structured_shape, batch=batch_size, first_row=first_row)
        for array in batch[:3]
    ]
    return Batch(*(array for array, _ in placed), placed[0][1])


def whole_batches(
    split: Split, batch_size: int, structured_shape: tuple[int, ...] | None
) -> Iterator[tuple[Batch, int]]:
    """Every sample once, in order: batches of one size, and how many of their samples count.

    The last batch is filled up with the first samples.
    """
    rows = parallel.local_rows(batch_size)
    for start in range(0, len(split), batch_size):
        indices = np.arange(start, start + batch_size) % len(split)
        batch = split.take(indices[rows])
        count = min(batch_size, len(split) - start)
        yield place_batch(batch, structured_shape, batch_size, rows.start), count


def evaluation_batch_size(train_batch_size: int) -> int:
    """A multiple of the training batch of at least 16 samples."""
    return train_batch_size * math.ceil(16 / train_batch_size)
