"""Splits of data sets that lie in memory: on points of their own, or on as many each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from experiments.data.batch import Cloud, Sample, Windows
from experiments.data.moments import Moments
from experiments.problems.airfoil import AirfoilArrays, surface_lift
from experiments.problems.benchmark_files import RepeatedRows


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
