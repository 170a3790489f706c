"""What a data set is: its splits, their description, and the statistics of the training split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Float

from experiments.data.batch import Sample, Scale, Statistics, StreamStatistics, Windows
from experiments.data.description import Description
from experiments.data.moments import Moments

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
        """Statistics of the training split, accumulated in float64; the same on every host.

        Raises:
            ValueError: the split has no rows of what is described, or rows of another width.
        """
        moments = self.splits["train"].moments()
        for name, width in self.description.widths().items():
            found = moments.get(name)
            if found is None or not found.count or len(found.mean) != width:
                got = "none" if found is None else f"{found.count} of {len(found.mean)}"
                raise ValueError(
                    f"training split: {name}: expected at least one row of {width} columns; got "
                    f"{got}"
                )
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
