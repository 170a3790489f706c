"""Distances of a volume's points from the STL, for stores that others have written without them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Shaped

from experiments.meshes.beside import kept_beside
from experiments.meshes.features import signed_distance
from experiments.meshes.sample_arrays import DISTANCES, Arrays, StoredSample, one_number

_NEEDED = ("volume_mesh_centers", "stl_coordinates", "stl_faces")


def with_distances(
    samples: Sequence[StoredSample], entries: Sequence[str]
) -> "list[StoredSample | WithDistances]":
    """Samples with the distances that some entries ask for, computed once and kept.

    A sample that has them, or from which they cannot be had, stays as it is.

    Raises:
        ValueError: the folder beside the store cannot be written.
    """
    asked = {entry.partition(".")[0] for entry in entries} & set(DISTANCES)
    lacking = [
        i
        for i, sample in enumerate(samples)
        if not asked <= set(sample.names) and set(_NEEDED) <= set(sample.names)
    ]
    if not asked or not lacking:
        return list(samples)
    chosen = [samples[i] for i in lacking]

    def compute(index: int) -> dict[str, np.ndarray]:
        points, corners, faces = (chosen[index].read(name) for name in _NEEDED)
        return dict(
            zip(DISTANCES, signed_distance(corners, faces.reshape(-1, 3), points), strict=True)
        )

    hint = f"for the distances that {chosen[0].path.resolve().parent} lacks"
    kept = kept_beside(chosen, compute, "distances", doing="Measuring distances", hint=hint)
    added = dict(zip(lacking, kept, strict=True))
    return [
        WithDistances(sample, added[i]) if i in added else sample
        for i, sample in enumerate(samples)
    ]


class WithDistances:
    """A sample of a store with what was computed of it; one of `sample_arrays.Arrays`.

    Attributes:
        name: of the sample.
        path: of its group.
        attributes: its own.
    """

    def __init__(self, sample: StoredSample, distances: StoredSample):
        """Puts both together."""
        self._sample, self._distances = sample, distances
        self.name: str = sample.name
        self.path: Path = sample.path
        self.attributes: Mapping[str, Any] = sample.attributes

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple(sorted({*self._sample.names, *self._distances.names}))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an array."""
        return self._of(name).shape(name)

    def dtype(self, name: str) -> np.dtype:
        """Type of an array."""
        return self._of(name).dtype(name)

    def read(self, name: str, rows: slice = slice(None)) -> Shaped[np.ndarray, "n *C"]:
        """Rows of an array."""
        return self._of(name).read(name, rows)

    def read_rows(self, name: str, rows: Shaped[np.ndarray, " n"]) -> Shaped[np.ndarray, "n *C"]:
        """Rows of an array by their numbers."""
        return self._of(name).read_rows(name, rows)

    def numbers(self, name: str) -> Float64[np.ndarray, " k"]:
        """Numbers of the whole sample."""
        return self._sample.numbers(name)

    def number(self, name: str) -> float:
        """The one number of this name."""
        return one_number(self, name)

    def _of(self, name: str) -> Arrays:
        own = name in self._sample.names or name not in self._distances.names
        return self._sample if own else self._distances
