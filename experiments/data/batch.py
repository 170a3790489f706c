"""What a model is trained on: batches on the device mesh, samples on the host, their statistics."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float

from experiments.data.moments import Moments
from geotransolver_jax import Neighborhoods
from parallel.annotations import AnyArray


class Stream(NamedTuple):
    """One of the clouds of a batch that fields are predicted on.

    Attributes:
        embedding: positions of the points, and what else places them.
        target: fields to predict.
        fx: input values at the points, or `None`.
        positions: coordinates for the search of neighbours; `None` where `embedding` is these.
        mask: True where a point is real.
        neighborhoods: neighbours found before, or `None` for a model to search them.
    """

    embedding: Float[Array, "B N C_emb"]
    target: Float[Array, "B N C_out"]
    fx: Float[Array, "B N C_in"] | None = None
    positions: Float[Array, "B N 3"] | None = None
    mask: Bool[Array, "B N"] | None = None
    neighborhoods: Neighborhoods | None = None


class Batch(NamedTuple):
    """A batch on the device mesh.

    Attributes:
        streams: one or several clouds.
        geometry: points of the geometry, or `None`.
        geometry_mask: True where one of these is real, or `None`.
        global_embedding: tokens of global quantities, or `None`.
    """

    streams: tuple[Stream, ...]
    geometry: Float[Array, "B M C_geo"] | None = None
    geometry_mask: Bool[Array, "B M"] | None = None
    global_embedding: Float[Array, "B G C_g"] | None = None


class Windows(NamedTuple):
    """Which points of a sample are asked for, of its clouds as they are padded.

    Attributes:
        streams: of each stream.
        geometry: of the geometry.
    """

    streams: tuple[slice, ...]
    geometry: slice = slice(None)


class Cloud(NamedTuple):
    """A window of one stream of a sample, on the host.

    Attributes:
        length: points of the whole cloud.
        embedding: see `Stream`, as are the following; real points alone.
        target: `None` where it is to be predicted.
        fx: or `None`.
        positions: or `None`.
        neighborhoods: `of_points` of these points, `of_geometry` of those of the geometry's window.
    """

    length: int
    embedding: Float[np.ndarray, "n C_emb"]
    target: Float[np.ndarray, "n C_out"] | None
    fx: Float[np.ndarray, "n C_in"] | None = None
    positions: Float[np.ndarray, "n 3"] | None = None
    neighborhoods: Neighborhoods | None = None


class Sample(NamedTuple):
    """Windows of the clouds of one sample, on the host.

    Attributes:
        clouds: of each stream.
        geometry: points of the geometry, or `None`.
        geometry_length: points of the whole geometry.
        global_embedding: tokens of global quantities, or `None`.
    """

    clouds: tuple[Cloud, ...]
    geometry: Float[np.ndarray, "m C_geo"] | None = None
    geometry_length: int = 0
    global_embedding: Float[np.ndarray, "G C_g"] | None = None


class Scale(NamedTuple):
    """Mean and standard deviation of each channel."""

    mean: Float[AnyArray, " C"]
    deviation: Float[AnyArray, " C"]

    @classmethod
    def of(cls, moments: Moments) -> "Scale":
        """Those of a training split; a channel that never changes keeps its unit.

        It says nothing, and dividing by its deviation would be 0 / 0.
        """
        deviation = moments.deviation
        deviation = np.where(deviation > 1e-6 * np.abs(moments.mean), deviation, 1)
        return cls(moments.mean.astype(np.float32), deviation.astype(np.float32))

    def normalize(self, values: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        """Values of mean 0 and deviation 1."""
        return (values - self.mean) / self.deviation

    def restore(self, values: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        """Values in their own unit."""
        return values * self.deviation + self.mean


class StreamStatistics(NamedTuple):
    """Of one stream; `None` for what it lacks."""

    embedding: Scale
    target: Scale
    fx: Scale | None = None


class Statistics(NamedTuple):
    """Of the training split; `None` for what it lacks."""

    streams: tuple[StreamStatistics, ...]
    geometry: Scale | None = None
    global_embedding: Scale | None = None
