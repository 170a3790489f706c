"""A store as a data set: its samples split, wired, read in windows, and integrated to forces."""

import dataclasses
import itertools
import zlib
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float

from experiments.configuration.schema import StoreConfig
from experiments.data.batch import Sample, Windows
from experiments.data.description import Description
from experiments.data.moments import Moments, over_processes
from experiments.meshes.checks import check_config, check_sample, entries, shuffled_kind
from experiments.meshes.distances import WithDistances, with_distances
from experiments.meshes.neighbor_cache import NeighborCache
from experiments.meshes.rows import Rows
from experiments.meshes.sample_arrays import StoredSample
from experiments.meshes.sample_forces import forces_of
from experiments.meshes.sample_inputs import cloud, describe, searched_entries, tokens
from experiments.meshes.store import Store
from experiments.meshes.wiring import Wired
from experiments.prediction import COORDINATES
from geotransolver_jax import Neighborhoods

# A split of whole clouds with at most so many numbers is kept in memory when it has been read.
_READ_ONCE = 2**25


class StoreSplit:
    """Samples of a store; see `experiments.data.dataset.Split`."""

    def __init__(
        self,
        samples: Sequence[StoredSample],
        config: StoreConfig,
        *,
        resolution: int | None = None,
        geometry_resolution: int | None = None,
    ) -> None:
        """Looks at every sample, and reads none.

        Args:
            samples: of this split.
            config: how they are read.
            resolution: points of a stream that are drawn, see `StoreConfig`.
            geometry_resolution: likewise of the geometry.

        Raises:
            ValueError: a sample lacks an array, or has other columns than the first.
        """
        asked = [*config.geometry, *itertools.chain(*map(entries, config.streams.values()))]
        self._stored = with_distances(samples, asked)
        self._samples = [Wired(sample, config) for sample in self._stored]
        self._config, self._resolution = config, resolution
        self._geometry_resolution = geometry_resolution
        self._streams = tuple(config.streams.values())
        self.neighbors: NeighborCache | None = None
        described = [_checked(sample) for sample in self._samples]
        self.description = described[0]
        for sample, other in zip(self._samples, described, strict=True):
            problem = self.description.difference(other)
            if problem:
                raise ValueError(
                    f"{sample.arrays.path}: expected what {samples[0].name} has; got {problem}"
                )
        self._lengths = [
            tuple(sample.length(entries(stream)) for stream in self._streams)
            for sample in self._samples
        ]
        self._geometry_lengths = [
            sample.length(config.geometry) if config.geometry else 0 for sample in self._samples
        ]
        # Small clouds would take longer to open than a step takes.
        small = self._numbers_in_all() <= _READ_ONCE and not self.is_drawn
        self._read_once: dict[tuple, Sample] | None = {} if small else None

    def _numbers_in_all(self) -> int:
        """Numbers that all samples have."""
        streams = self.description.streams
        widths = [s.embedding + s.fx + len(s.fields) + 3 * s.positions for s in streams]
        of_streams = (
            sum(width * length for width, length in zip(widths, lengths, strict=True))
            for lengths in self._lengths
        )
        return sum(of_streams) + (self.description.geometry or 0) * sum(self._geometry_lengths)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._samples)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the samples."""
        return tuple(sample.name for sample in self._stored)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Points of the longest sample, or those drawn of it, of each stream."""
        longest = (max(lengths) for lengths in zip(*self._lengths, strict=True))
        return tuple(_at_most(length, self._resolution) for length in longest)

    @property
    def geometry_length(self) -> int:
        """Points of the longest geometry, or those drawn of it; 0 without."""
        return _at_most(max(self._geometry_lengths), self._geometry_resolution)

    @property
    def is_drawn(self) -> bool:
        """Whether only a part of the points of a sample is read, drawn anew each time."""
        return self._resolution is not None or self._geometry_resolution is not None

    @property
    def has_quantities(self) -> bool:
        """Whether forces are integrated, for which whole surfaces must be read."""
        return self._config.forces.pressure is not None and self._resolution is None

    def num_points(self, index: int) -> tuple[int, ...]:
        """Points of each stream of a sample."""
        return tuple(_at_most(length, self._resolution) for length in self._lengths[index])

    def read(self, index: int, windows: Windows, seeds: tuple[int, ...] = (0,)) -> Sample:
        """Windows of the clouds of a sample.

        Args:
            index: of the sample.
            windows: of its clouds.
            seeds: numbers of the draw, where only a part of its points is drawn.
        """
        if self._read_once is None:
            return self._read(index, windows, seeds)
        known = self.neighbors is not None
        key = (index, known, *((w.start, w.stop) for w in (*windows.streams, windows.geometry)))
        if key not in self._read_once:
            self._read_once[key] = self._read(index, windows, seeds)
        return self._read_once[key]

    def _read(self, index: int, windows: Windows, seeds: tuple[int, ...]) -> Sample:
        sample, name = self._samples[index], self._stored[index].name
        own = (*seeds, zlib.crc32(name.encode()))
        geometry_rows = self._rows(
            sample,
            self._config.geometry,
            self._geometry_lengths[index],
            self._geometry_resolution,
            (*own, len(self._streams)),
        )
        found: Sequence[Neighborhoods | None] = [None] * len(self._streams)
        if self.neighbors is not None:
            found = self.neighbors.read(name, windows)
        clouds = []
        for i, (stream, length, window) in enumerate(
            zip(self._streams, self._lengths[index], windows.streams, strict=True)
        ):
            rows = self._rows(sample, stream.embedding, length, self._resolution, (*own, i))
            clouds.append(cloud(sample, stream, rows, window)._replace(neighborhoods=found[i]))
        geometry, length = None, 0
        if self._config.geometry:
            geometry = sample.values(self._config.geometry, geometry_rows, windows.geometry)
            length = geometry_rows.count
        return Sample(tuple(clouds), geometry, length, tokens(sample))

    def _rows(
        self,
        sample: Wired,
        names: Sequence[str],
        length: int,
        count: int | None,
        seeds: tuple[int, ...],
    ) -> Rows:
        if not names:
            return Rows.all(0)
        is_shuffled = shuffled_kind(sample, names) is not None
        return Rows.drawn(length, count, seeds, shuffled=is_shuffled)

    def whole(self, index: int) -> Sample:
        """All that is read of a sample."""
        return self.read(index, Windows((slice(None),) * len(self._streams)))

    def stored(self, index: int) -> StoredSample | WithDistances:
        """A sample as the store has it."""
        return self._stored[index]

    @property
    def searched(self) -> dict:
        """What decides on the coordinates that neighbours are searched among."""
        config = self._config
        return {
            "streams": [searched_entries(stream) for stream in self._streams],
            "geometry": config.geometry,
            "frame": dataclasses.asdict(config.frame),
        }

    def coordinates(self, index: int) -> tuple[list[np.ndarray], np.ndarray]:
        """What neighbours are searched among: positions of each stream, and the geometry."""
        sample = self._samples[index]
        positions = [
            sample.values(searched_entries(stream), Rows.all(length))
            for stream, length in zip(self._streams, self._lengths[index], strict=True)
        ]
        geometry = sample.values(self._config.geometry, Rows.all(self._geometry_lengths[index]))
        return positions, geometry[:, :COORDINATES]

    def moments(self) -> dict[str, Moments]:
        """Moments of all points of all samples, as `experiments.data.dataset.Split` has them.

        Each process goes through its share of the samples.
        """
        total = None
        for index in range(jax.process_index(), len(self), jax.process_count()):
            these = self._moments_of(index)
            total = these if total is None else list(map(Moments.merge, total, these))
        widths = self.description.widths()
        return dict(zip(widths, over_processes(total, list(widths.values())), strict=True))

    def _moments_of(self, index: int) -> list[Moments]:
        sample, moments = self._samples[index], []

        def of(names: Sequence[str], length: int) -> Moments:
            rows = Rows.all(length)
            return Moments.of_blocks(lambda block: sample.values(names, rows, block), length)

        for name in self.description.widths():
            if name == "global_embedding":
                moments.append(Moments.of(sample.numbers(self._config.global_embedding)))
            elif name == "geometry":
                moments.append(of(self._config.geometry, self._geometry_lengths[index]))
            else:
                stream, _, part = name.partition(".")
                length = self._lengths[index][int(stream)]
                moments.append(of(getattr(self._streams[int(stream)], part), length))
        return moments

    def quantities(
        self, index: int, fields: Sequence[Float[np.ndarray, "N C_out"]]
    ) -> dict[str, tuple[float, float]]:
        """Force and moment coefficients from predicted fields, each with that of the true ones."""
        sample, forces = self._samples[index], self._config.forces
        place = list(self._config.streams).index(forces.stream)
        stream = self._streams[place]
        columns = self.description.streams[place].fields
        targets = sample.values(stream.targets, Rows.all(self._lengths[index][place]))
        predicted, true = (forces_of(sample, columns, each) for each in (fields[place], targets))
        return {name: (predicted[name], true[name]) for name in true}


def _checked(sample: Wired) -> Description:
    check_sample(sample)
    return describe(sample)


def _at_most(length: int, count: int | None) -> int:
    return length if count is None else min(length, count)


def load_store(config: StoreConfig) -> dict[str, StoreSplit]:
    """The splits of a store.

    Raises:
        FileNotFoundError: there is no store.
        ValueError: it has too few samples, or one that does not fit, or the configuration asks for
            what no store has.
    """
    check_config(config)
    for key in ("path", "validation_path", "test_path"):
        path = getattr(config, key)
        if path is not None and not Path(path).is_dir():
            raise FileNotFoundError(
                f"data.{key}={path}: expected a store, as experiments.convert makes one; "
                "there is no such folder"
            )
    left, seeds = Store(Path(config.path)), np.random.default_rng(config.seed)
    names = list(seeds.permutation(left.names))
    taken = {}
    for split, path in (("test", config.test_path), ("validation", config.validation_path)):
        if path is not None:
            store = Store(Path(path))
            taken[split] = [store.sample(name) for name in store.names]
            continue
        count = getattr(config, split)
        if count >= len(names):
            raise ValueError(
                f"data.{split}: expected fewer than the {len(names)} samples that {config.path} "
                f"has left; got {count}"
            )
        taken[split] = [left.sample(name) for name in sorted(names[:count])]
        names = names[count:]
    count = len(names) if config.train is None else config.train
    if count > len(names):
        raise ValueError(
            f"data.train: expected at most the {len(names)} samples that {config.path} has left; "
            f"got {count}"
        )
    taken["train"] = [left.sample(name) for name in sorted(names[:count])]
    train = StoreSplit(
        taken.pop("train"),
        config,
        resolution=config.resolution,
        geometry_resolution=config.geometry_resolution,
    )
    others = {name: StoreSplit(samples, config) for name, samples in taken.items()}
    for other in others.values():
        problem = train.description.difference(other.description)
        if problem:
            raise ValueError(
                f"{other.stored(0).path}: expected what {train.stored(0).path} has; got {problem}"
            )
    return {"train": train, **others}
