"""Neighbours of whole clouds found once by a k-d tree, and kept beside the store."""

import hashlib
import json

import jax
from tqdm import tqdm

from experiments.batch import Windows
from experiments.meshes.store import Store, StoredSample, create_store, write_sample
from experiments.neighborhoods import find_neighborhoods
from geotransolver_jax import Neighborhoods
from parallel.neighbors import Neighbors

_METADATA = ("zarr.json", ".zgroup")
_OF = "found_of"


class NeighborCache:
    """Neighbours of the samples of one split, by radius and number.

    Attributes:
        radius: the largest of a model's radii.
        count: the largest of its `neighbors_in_radius`.
    """

    def __init__(self, split, radius: float, count: int):
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
        store = split.stored(0).path.parent
        self._folder = store.with_name(f"{store.name}.neighbors") / f"r{radius:g}_k{count}_{digest}"
        if jax.process_index() == 0:
            self._fill(split)
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices(str(self._folder))
        found = Store(self._folder)
        self._samples = {name: found.sample(name) for name in split.names}

    def _fill(self, split) -> None:
        missing = [i for i in range(len(split)) if not self._is_there(split.stored(i))]
        if not missing:
            return
        self._folder.parent.mkdir(exist_ok=True)
        create_store(self._folder)
        for index in tqdm(missing, desc="Finding neighbours", unit="sample"):
            positions, geometry = split.coordinates(index)
            geometries = [geometry] * len(positions)
            found = find_neighborhoods(positions, geometries, self.radius, self.count)
            arrays = {
                f"{i}_{of}_{part}": array
                for i, both in enumerate(found)
                for of, neighbors in both._asdict().items()
                for part, array in neighbors._asdict().items()
            }
            sample = split.stored(index)
            write_sample(self._folder, sample.name, arrays, {_OF: _signature(sample)})

    def _is_there(self, sample: StoredSample) -> bool:
        try:
            kept = StoredSample(self._folder / sample.name)
        except ValueError:
            return False
        return kept.attributes.get(_OF) == _signature(sample)

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


def _signature(sample: StoredSample) -> list[int]:
    """What changes when a sample is written anew."""
    files = [sample.path / name for name in _METADATA]
    return [file.stat().st_mtime_ns for file in files if file.is_file()]
