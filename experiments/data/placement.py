"""Where the points of a batch lie on the device mesh, and what of them this process reads."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Array

from experiments.data.batch import Batch, Sample, Stream, Windows
from experiments.data.dataset import Split
from geotransolver_jax import Neighborhoods
from parallel.neighbors import Neighbors
from parallel.placement import local_windows, place, place_windows
from parallel.points import grid_shape, padded_size


@dataclass(frozen=True)
class Placement:
    """Where the samples of a batch lie on the mesh, and which of their points are read here.

    Attributes:
        batch_size: samples of a batch over all hosts.
        lengths: points of a sample as it is padded, of each stream.
        geometry_length: likewise of the geometry; 0 without.
        windows: of each stream, see `parallel.placement.local_windows`.
        geometry_windows: likewise of the geometry.
    """

    batch_size: int
    lengths: tuple[int, ...]
    geometry_length: int
    windows: tuple[dict[int, slice], ...]
    geometry_windows: dict[int, slice]

    @classmethod
    def of(
        cls, split: Split, batch_size: int, structured_shape: tuple[int, ...] | None
    ) -> "Placement":
        """That of batches of a split on the mesh of the context; all have one shape.

        Raises:
            ValueError: the batch does not divide over the mesh.
        """
        lengths = tuple(padded_size(length) for length in split.lengths)
        if structured_shape is not None:
            rows, *row = grid_shape(structured_shape)
            lengths = (padded_size(rows) * math.prod(row),)
        geometry = padded_size(split.geometry_length)
        return cls(
            batch_size,
            lengths,
            geometry,
            tuple(local_windows(batch_size, length) for length in lengths),
            local_windows(batch_size, geometry),
        )

    @property
    def rows(self) -> list[int]:
        """Places in the batch of the samples that this process reads."""
        return list(self.windows[0])

    def read(self, split: Split, row: int, index: int, seeds: tuple[int, ...] = (0,)) -> Sample:
        """What this process holds of the sample at a place of the batch.

        Raises:
            ValueError: the sample cannot be read, or a cloud of it has no point.
        """
        windows = Windows(
            tuple(windows[row] for windows in self.windows), self.geometry_windows[row]
        )
        sample = split.read(index, windows, seeds)
        if not all(cloud.length for cloud in sample.clouds):
            raise ValueError(f"{split.names[index]}: expected at least one point; got none")
        return sample

    def place(self, samples: dict[int, Sample]) -> Batch:
        """Places a batch on the mesh, from the samples by their places in it."""
        streams = tuple(self._stream(i, samples) for i in range(len(self.lengths)))
        first = next(iter(samples.values()))
        geometry = mask = tokens = None
        if first.geometry is not None:
            geometry, mask = self._cloud(
                {row: sample.geometry for row, sample in samples.items()},
                {row: sample.geometry_length for row, sample in samples.items()},
                self.geometry_windows,
                self.geometry_length,
            )
        if first.global_embedding is not None:
            given: Any = [sample.global_embedding for sample in samples.values()]
            tokens = place(np.stack(given), self.batch_size, min(samples), split_points=False)
        return Batch(streams, geometry, mask, tokens)

    def _stream(self, i: int, samples: dict[int, Sample]) -> Stream:
        clouds = {row: sample.clouds[i] for row, sample in samples.items()}
        lengths = {row: cloud.length for row, cloud in clouds.items()}

        def put(name: str) -> tuple[Any, Any]:
            arrays = {row: getattr(cloud, name) for row, cloud in clouds.items()}
            if next(iter(arrays.values())) is None:
                return None, None
            return self._cloud(arrays, lengths, self.windows[i], self.lengths[i])

        embedding, mask = put("embedding")
        return Stream(
            embedding,
            put("target")[0],
            put("fx")[0],
            put("positions")[0],
            mask,
            self._neighborhoods(i, {row: cloud.neighborhoods for row, cloud in clouds.items()}),
        )

    def _cloud(
        self,
        arrays: dict[int, Any],
        lengths: dict[int, int],
        windows: dict[int, slice],
        length: int,
    ) -> tuple[Array, Array]:
        """Points and their mask."""
        real = {
            row: np.ones(max(0, min(lengths[row], window.stop) - window.start), bool)
            for row, window in windows.items()
        }
        mask = place_windows(real, windows, self.batch_size, length)
        return place_windows(arrays, windows, self.batch_size, length), mask

    def _neighborhoods(
        self, i: int, found: dict[int, Neighborhoods | None]
    ) -> Neighborhoods | None:
        if next(iter(found.values())) is None:
            return None

        def put(of: str, windows: dict[int, slice], length: int) -> Neighbors:
            both = {row: getattr(neighborhoods, of) for row, neighborhoods in found.items()}
            fills = {"indices": -1, "distances": np.inf}
            return Neighbors(
                *(
                    place_windows(
                        {row: getattr(neighbors, part) for row, neighbors in both.items()},
                        windows,
                        self.batch_size,
                        length,
                        fills[part],
                    )
                    for part in Neighbors._fields
                )
            )

        return Neighborhoods(
            put("of_points", self.windows[i], self.lengths[i]),
            put("of_geometry", self.geometry_windows, self.geometry_length),
        )
