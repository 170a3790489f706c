"""Neighbours of whole clouds found once by a k-d tree, and kept beside the store."""

import hashlib
import json
from typing import Any

import numpy as np

from experiments.data.batch import Windows
from experiments.data.neighborhoods import find_neighborhoods
from experiments.meshes.beside import kept_beside
from geotransolver_jax import Neighborhoods
from parallel.neighbors import Neighbors


class NeighborCache:
    """Neighbours of the samples of one split, by radius and number.

    Attributes:
        radius: the largest of a model's radii.
        count: the largest of its `neighbors_in_radius`.
    """

    def __init__(self, split: Any, radius: float, count: int) -> None:
        """Finds what is not there yet; on several hosts one of them does, and the others wait.

        Args:
            split: an `experiments.meshes.dataset.StoreSplit`.
            radius: see the class.
            count: see the class.

        Raises:
            ValueError: coordinates cannot be searched, or the folder cannot be written.
        """
        self.radius, self.count = radius, count
        searched = json.dumps(split.searched, sort_keys=True)
        digest = hashlib.sha256(searched.encode()).hexdigest()[:8]
        # All digits of the radius: another one finds other neighbours.
        search = f"r{radius}_k{count}_{digest}"

        def find(index: int) -> dict[str, np.ndarray]:
            positions, geometry = split.coordinates(index)
            found = find_neighborhoods(positions, [geometry] * len(positions), radius, count)
            return {
                f"{i}_{of}_{part}": array
                for i, both in enumerate(found)
                for of, neighbors in both._asdict().items()
                for part, array in neighbors._asdict().items()
            }

        samples = [split.stored(i) for i in range(len(split))]
        hint = "or data.cache_neighbors=false"
        kept = kept_beside(
            samples, find, "neighbors", search, doing="Finding neighbours", hint=hint
        )
        self._samples = dict(zip(split.names, kept, strict=True))

    def read(self, name: str, windows: Windows) -> list[Neighborhoods]:
        """Those of each stream of a sample, of the points in its windows."""
        kept = self._samples[name]

        def neighbors(i: int, of: str, window: slice) -> Neighbors:
            return Neighbors(*(kept.read(f"{i}_{of}_{part}", window) for part in Neighbors._fields))

        return [
            Neighborhoods(
                neighbors(i, "of_points", window), neighbors(i, "of_geometry", windows.geometry)
            )
            for i, window in enumerate(windows.streams)
        ]
