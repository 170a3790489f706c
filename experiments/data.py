"""Data sets: their splits, the statistics of a split, and the data set that a config names."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Array, Bool, Float

from experiments.airfoil import AirfoilArrays, surface_lift
from experiments.airfoil_cache import load_airfoil
from experiments.darcy_cache import load_darcy
from experiments.darcy_files import load_darcy_mat
from experiments.schema import AirfoilConfig, DarcyConfig, DataConfig
from geotransolver_jax import Neighborhoods


class Batch(NamedTuple):
    """A batch on the device mesh, or on the host before it is placed.

    On the host there are no masks, and arrays of points may be lists with one array a sample.

    Attributes:
        fx: input values at the points, or `None`.
        embedding: positions of the points.
        target: fields to predict, in physical units.
        point_mask: True where a point is real.
        geometry: points of the geometry, or `None`.
        geometry_mask: True where one of these is real, or `None`.
        global_embedding: tokens of global quantities, or `None`.
        neighborhoods: neighbours found before, or `None` for a model to search them.
    """

    fx: Float[Array, "B N C_in"] | None
    embedding: Float[Array, "B N C_emb"]
    target: Float[Array, "B N C_out"]
    point_mask: Bool[Array, "B N"] | None = None
    geometry: Float[Array, "B M C_geo"] | None = None
    geometry_mask: Bool[Array, "B M"] | None = None
    global_embedding: Float[Array, "B G C_g"] | None = None
    neighborhoods: Neighborhoods | None = None


class Statistics(NamedTuple):
    """Mean and standard deviation of each channel, over the training split; `None` without it."""

    fx_mean: Float[Array, " C_in"] | None
    fx_deviation: Float[Array, " C_in"] | None
    embedding_mean: Float[Array, " C_emb"]
    embedding_deviation: Float[Array, " C_emb"]
    target_mean: Float[Array, " C_out"]
    target_deviation: Float[Array, " C_out"]
    geometry_mean: Float[Array, " C_geo"] | None = None
    geometry_deviation: Float[Array, " C_geo"] | None = None
    global_embedding_mean: Float[Array, " C_g"] | None = None
    global_embedding_deviation: Float[Array, " C_g"] | None = None


class Split(Protocol):
    """Samples of a data set, on the host.

    Attributes:
        fx: input values of all samples, `(..., C_in)`, or `None`; so are the following.
        embedding: positions.
        target: fields in physical units.
        geometry: points of the geometry, or `None`.
        global_embedding: global tokens, or `None`.
        length: points of the longest sample; batches are padded to it.
        has_quantities: whether `quantities` has any.
    """

    fx: np.ndarray | None
    embedding: np.ndarray
    target: np.ndarray
    geometry: np.ndarray | None
    global_embedding: np.ndarray | None
    length: int
    has_quantities: bool

    def __len__(self) -> int:
        """Number of samples."""

    def take(self, indices: np.ndarray) -> Batch:
        """The samples of these indices, on the host."""

    def num_points(self, index: int) -> int:
        """Points of a sample."""

    def quantities(
        self, index: int, fields: Float[np.ndarray, "N C_out"]
    ) -> dict[str, tuple[float, float]]:
        """Integrated quantities of a sample from predicted fields, each with its true value."""


@dataclass(frozen=True)
class GridSplit:
    """Samples on the same points; see `Split`.

    Attributes:
        fx: input values `(n, N, C_in)`.
        embedding: positions `(N, C_emb)`, shared by the samples.
        target: fields `(n, N, C_out)` in physical units.
    """

    fx: Float[np.ndarray, "n N C_in"]
    embedding: Float[np.ndarray, "N C_emb"]
    target: Float[np.ndarray, "n N C_out"]
    geometry: None = None
    global_embedding: None = None
    has_quantities: bool = False

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.fx)

    @property
    def length(self) -> int:
        """Points of a sample."""
        return len(self.embedding)

    def take(self, indices: np.ndarray) -> Batch:
        """The samples of these indices, on the host."""
        embedding = np.broadcast_to(self.embedding, (len(indices), *self.embedding.shape))
        return Batch(self.fx[indices], embedding, self.target[indices])

    def num_points(self, index: int) -> int:
        """Points of a sample."""
        return self.length

    def quantities(self, index: int, fields: np.ndarray) -> dict[str, tuple[float, float]]:
        """None."""
        return {}


@dataclass(frozen=True)
class AirfoilSplit:
    """Airfoils, each on points of its own; see `Split`.

    Attributes:
        arrays: the samples.
    """

    arrays: AirfoilArrays
    fx: None = None
    has_quantities: bool = True

    @property
    def embedding(self) -> np.ndarray:
        """Positions of the points of all samples."""
        return self.arrays.positions

    @property
    def target(self) -> np.ndarray:
        """Fields at these points."""
        return self.arrays.fields

    @property
    def geometry(self) -> np.ndarray:
        """Surface points and normals."""
        return self.arrays.geometry

    @property
    def global_embedding(self) -> np.ndarray:
        """Directions of the free stream."""
        return self.arrays.global_embedding

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.arrays)

    @property
    def length(self) -> int:
        """Points of the longest sample."""
        return int(np.diff(self.arrays.offsets).max())

    def take(self, indices: np.ndarray) -> Batch:
        """The samples of these indices, on the host."""
        rows = [self.arrays.rows(int(index)) for index in indices]
        return Batch(
            None,
            [self.arrays.positions[row] for row in rows],
            [self.arrays.fields[row] for row in rows],
            geometry=self.arrays.geometry[indices],
            global_embedding=self.arrays.global_embedding[indices],
        )

    def num_points(self, index: int) -> int:
        """Points of a sample."""
        rows = self.arrays.rows(index)
        return rows.stop - rows.start

    def quantities(self, index: int, fields: np.ndarray) -> dict[str, tuple[float, float]]:
        """The lift coefficient, integrated from the surface pressure."""
        lengths = self.arrays.panel_lengths[index]
        lift = surface_lift(
            fields[: len(lengths), 2],
            self.arrays.geometry[index],
            lengths,
            float(self.arrays.angle_of_attack[index]),
        )
        return {"lift_coefficient": (lift, float(self.arrays.lift_coefficient[index]))}


@dataclass(frozen=True)
class Dataset:
    """A data set.

    Attributes:
        splits: training, validation and test split.
        structured_shape: shape of the grid of all samples, if they have one.
        fields: names of the predicted fields.
    """

    splits: dict[str, Split]
    structured_shape: tuple[int, ...] | None
    fields: tuple[str, ...]

    def statistics(self) -> Statistics:
        """Statistics of the training split, accumulated in float64."""
        train = self.splits["train"]
        moments = []
        for name in ("fx", "embedding", "target", "geometry", "global_embedding"):
            values = getattr(train, name)
            if values is None:
                moments += [None, None]
                continue
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
    if isinstance(config, AirfoilConfig):
        return _load_airfoil(config)
    raise ValueError(f"data.name: no loader for {config.name!r}")


def _sizes(config: DataConfig) -> dict[str, int]:
    return {"train": config.train, "validation": config.validation, "test": config.test}


def _load_darcy(config: DarcyConfig) -> Dataset:
    sizes = _sizes(config)
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
        name: GridSplit(
            fx=split.permeability.reshape(-1, points, 1),
            embedding=split.coordinates,
            target=split.pressure.reshape(-1, points, 1),
        )
        for name, split in arrays.items()
    }
    return Dataset(splits, (config.resolution, config.resolution), ("pressure",))


def _load_airfoil(config: AirfoilConfig) -> Dataset:
    arrays = load_airfoil(config, _sizes(config), Path(config.cache_dir))
    splits = {name: AirfoilSplit(split) for name, split in arrays.items()}
    return Dataset(splits, None, ("velocity_x", "velocity_y", "pressure_coefficient"))
