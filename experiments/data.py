"""Data sets: their splits, the statistics of a split, and the data set that a config names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Float

from experiments.airfoil import AirfoilArrays, surface_lift
from experiments.airfoil_cache import load_airfoil
from experiments.batch import Cloud, Sample, Scale, Statistics, StreamStatistics, Windows
from experiments.benchmark_files import RepeatedRows, load_benchmark
from experiments.coordination import first_then_others
from experiments.darcy_cache import load_darcy
from experiments.darcy_files import load_darcy_mat
from experiments.description import Description, StreamDescription
from experiments.moments import Moments
from experiments.schema import (
    AirfoilConfig,
    BenchmarkConfig,
    DarcyConfig,
    DataConfig,
    StoreConfig,
)

# Predicted and true value by name.
Quantities = dict[str, tuple[float, float]]


class Split(Protocol):
    """Samples of a data set."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the samples."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Points of the longest sample, of each stream; batches are padded to them."""

    @property
    def geometry_length(self) -> int:
        """Likewise of the geometry; 0 without."""

    @property
    def has_quantities(self) -> bool:
        """Whether `quantities` has any."""

    def __len__(self) -> int:
        """Number of samples."""

    def num_points(self, index: int) -> tuple[int, ...]:
        """Points of each stream of a sample."""

    def read(self, index: int, windows: Windows, seeds: tuple[int, ...] = (0,)) -> Sample:
        """Windows of the clouds of a sample; `seeds` number a draw where points are drawn."""

    def moments(self) -> dict[str, Moments]:
        """Moments of all points of all samples, by the names of `Description.widths`."""

    def quantities(self, index: int, fields: Sequence[Float[np.ndarray, "N C_out"]]) -> Quantities:
        """Integrated quantities of a sample from predicted fields, each with its true value."""


@dataclass(frozen=True)
class GridSplit:
    """Samples on as many points each, in memory; see `Split`.

    Attributes:
        fx: input values `(n, N, C_in)`, or `None`.
        embedding: positions `(N, C_emb)` that the samples share, or `(n, N, C_emb)`.
        target: fields `(n, N, C_out)`.
        global_embedding: global tokens `(n, G, C_g)`, or `None`.
    """

    fx: Float[np.ndarray, "n N C_in"] | RepeatedRows | None
    embedding: Float[np.ndarray, "*n N C_emb"] | RepeatedRows
    target: Float[np.ndarray, "n N C_out"]
    global_embedding: Float[np.ndarray, "n G C_g"] | None = None
    geometry_length: int = 0
    has_quantities: bool = False

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.target)

    @property
    def names(self) -> list[str]:
        """Numbers of the samples."""
        return [str(index) for index in range(len(self))]

    @property
    def lengths(self) -> tuple[int]:
        """Points of a sample."""
        return (self.embedding.shape[-2],)

    def num_points(self, index: int) -> tuple[int]:
        """Points of a sample."""
        return self.lengths

    def read(self, index: int, windows: Windows, seeds: tuple[int, ...] = (0,)) -> Sample:
        """A window of a sample."""
        (window,) = windows.streams
        embedding = self.embedding if self.embedding.ndim == 2 else self.embedding[index]
        fx = None if self.fx is None else self.fx[index][window]
        cloud = Cloud(*self.lengths, embedding[window], self.target[index][window], fx)
        tokens = None if self.global_embedding is None else self.global_embedding[index]
        return Sample((cloud,), global_embedding=tokens)

    def moments(self) -> dict[str, Moments]:
        """Moments of all points of all samples; see `Split`."""
        return _moments(
            {
                "0.embedding": self.embedding,
                "0.targets": self.target,
                "0.fx": self.fx,
                "global_embedding": self.global_embedding,
            }
        )

    def quantities(
        self, index: int, fields: Sequence[np.ndarray]
    ) -> dict[str, tuple[float, float]]:
        """None."""
        return {}


@dataclass(frozen=True)
class AirfoilSplit:
    """Airfoils, each on points of its own; see `Split`.

    Attributes:
        arrays: the samples.
    """

    arrays: AirfoilArrays
    has_quantities: bool = True

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.arrays)

    @property
    def names(self) -> list[str]:
        """Numbers of the samples, with their angle of attack."""
        return [f"{i} at {angle:.1f}°" for i, angle in enumerate(self.arrays.angle_of_attack)]

    @property
    def lengths(self) -> tuple[int]:
        """Points of the longest sample."""
        return (int(np.diff(self.arrays.offsets).max()),)

    @property
    def geometry_length(self) -> int:
        """Points of the surface."""
        return self.arrays.geometry.shape[1]

    def num_points(self, index: int) -> tuple[int]:
        """Points of a sample."""
        rows = self.arrays.rows(index)
        return (rows.stop - rows.start,)

    def read(self, index: int, windows: Windows, seeds: tuple[int, ...] = (0,)) -> Sample:
        """Windows of a sample."""
        (window,), rows = windows.streams, self.arrays.rows(index)
        cloud = Cloud(
            *self.num_points(index),
            self.arrays.positions[rows][window],
            self.arrays.fields[rows][window],
        )
        return Sample(
            (cloud,),
            self.arrays.geometry[index][windows.geometry],
            self.geometry_length,
            self.arrays.global_embedding[index],
        )

    def moments(self) -> dict[str, Moments]:
        """Moments of all points of all samples; see `Split`."""
        return _moments(
            {
                "0.embedding": self.arrays.positions,
                "0.targets": self.arrays.fields,
                "geometry": self.arrays.geometry,
                "global_embedding": self.arrays.global_embedding,
            }
        )

    def quantities(
        self, index: int, fields: Sequence[np.ndarray]
    ) -> dict[str, tuple[float, float]]:
        """The lift coefficient, integrated from the surface pressure."""
        lengths = self.arrays.panel_lengths[index]
        lift = surface_lift(
            fields[0][: len(lengths), 2],
            self.arrays.geometry[index],
            lengths,
            float(self.arrays.angle_of_attack[index]),
        )
        return {"lift_coefficient": (lift, float(self.arrays.lift_coefficient[index]))}


def _moments(arrays: Mapping[str, np.ndarray | RepeatedRows | None]) -> dict[str, Moments]:
    def of(values: np.ndarray | RepeatedRows) -> Moments:
        if isinstance(values, RepeatedRows):
            values = values.rows
        rows = values.reshape(-1, values.shape[-1])
        return Moments.of_blocks(rows.__getitem__, len(rows))

    return {name: of(values) for name, values in arrays.items() if values is not None}


@dataclass(frozen=True)
class Dataset:
    """A data set.

    Attributes:
        splits: training, validation and test split.
        description: names and widths of what they hold.
    """

    splits: Mapping[str, Split]
    description: Description

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the predicted fields of all streams."""
        return self.description.fields

    def statistics(self) -> Statistics:
        """Statistics of the training split, accumulated in float64; the same on every host."""
        moments = self.splits["train"].moments()
        return _statistics(
            self.description, {name: Scale.of(these) for name, these in moments.items()}
        )


def statistics_like(description: Description) -> Statistics:
    """Shapes of the statistics of a data set, as `jax.ShapeDtypeStruct`s."""
    shapes: dict[str, Any] = {
        name: jax.ShapeDtypeStruct((width,), np.float32)
        for name, width in description.widths().items()
    }
    return _statistics(description, {name: Scale(like, like) for name, like in shapes.items()})


def _statistics(description: Description, scales: dict[str, Scale]) -> Statistics:
    streams = tuple(
        StreamStatistics(scales[f"{i}.embedding"], scales[f"{i}.targets"], scales.get(f"{i}.fx"))
        for i in range(len(description.streams))
    )
    return Statistics(streams, scales.get("geometry"), scales.get("global_embedding"))


def load_dataset(config: DataConfig) -> Dataset:
    """Loads the data set that a configuration names.

    Raises:
        ValueError: a file is damaged or does not hold what is asked for.
        FileNotFoundError: a file is not there.
    """
    if isinstance(config, DarcyConfig):
        return first_then_others(lambda: _load_darcy(config))
    if isinstance(config, AirfoilConfig):
        return first_then_others(lambda: _load_airfoil(config))
    if isinstance(config, BenchmarkConfig):
        return _load_benchmark(config)
    if isinstance(config, StoreConfig):
        return _load_store(config)
    raise ValueError(f"data.name: no loader for {config.name!r}")


def _sizes(config: DataConfig) -> dict[str, Any]:
    """Numbers of samples; a `null`, which is for stores alone, is refused where they are split."""
    return {"train": config.train, "validation": config.validation, "test": config.test}


def _load_darcy(config: DarcyConfig) -> Dataset:
    sizes = _sizes(config)
    if (config.mat_train is None) != (config.mat_test is None):
        raise ValueError("data: expected both or none of mat_train and mat_test; got one")
    if config.mat_train is not None and config.mat_test is not None:
        arrays = load_darcy_mat(
            Path(config.mat_train), Path(config.mat_test), config.resolution, sizes
        )
    else:
        arrays = load_darcy(config.resolution, sizes, config.seed, Path(config.cache_dir))
    points = config.resolution**2
    splits = {
        name: GridSplit(
            fx=split.permeability.reshape(-1, points, 1),
            embedding=split.coordinates,
            target=split.pressure.reshape(-1, points, 1),
        )
        for name, split in arrays.items()
    }
    stream = StreamDescription("points", 2, 1, ("pressure",))
    grid = (config.resolution, config.resolution)
    return Dataset(splits, Description((stream,), structured_shape=grid))


def _load_airfoil(config: AirfoilConfig) -> Dataset:
    arrays = load_airfoil(config, _sizes(config), Path(config.cache_dir))
    splits = {name: AirfoilSplit(split) for name, split in arrays.items()}
    fields = ("velocity_x", "velocity_y", "pressure_coefficient")
    first = splits["train"].arrays
    return Dataset(
        splits,
        Description(
            (StreamDescription("points", first.positions.shape[-1], 0, fields),),
            first.geometry.shape[-1],
            first.global_embedding.shape[1:],
        ),
    )


def _load_benchmark(config: BenchmarkConfig) -> Dataset:
    arrays = load_benchmark(config.problem, Path(config.folder), _sizes(config))
    first = arrays["train"]
    stream = StreamDescription(
        "points",
        first.embedding.shape[-1],
        0 if first.fx is None else first.fx.shape[-1],
        first.fields,
    )
    tokens = None if first.global_embedding is None else first.global_embedding.shape[1:]
    splits = {
        name: GridSplit(part.fx, part.embedding, part.target, part.global_embedding)
        for name, part in arrays.items()
    }
    return Dataset(
        splits, Description((stream,), None, tokens, structured_shape=first.structured_shape)
    )


def _load_store(config: StoreConfig) -> Dataset:
    try:
        from experiments.meshes.dataset import load_store
    except ModuleNotFoundError as error:
        raise ValueError(
            f"data.name=store: expected the extra `meshes` to be installed; got {error}"
        ) from error
    splits = load_store(config)
    return Dataset(splits, splits["train"].description)
