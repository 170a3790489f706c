"""Errors of predicted fields: summed over the points on the devices, put together on the host."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from parallel import masked_mean, masked_sum
from parallel.annotations import AnyArray
from parallel.placement import to_host


class FieldErrors(NamedTuple):
    """Of the fields of some samples, over their real points; arrays `(B, C)`.

    Attributes:
        points: number of them.
        absolute: sum of absolute errors.
        squared: sum of squared errors.
        largest: largest absolute error.
        target_absolute: sum of absolute targets.
        target_squared: sum of squared targets.
        target_mean: mean of the targets.
        target_spread: sum of squared deviations of the targets from this mean.
    """

    points: Float[AnyArray, "B C"]
    absolute: Float[AnyArray, "B C"]
    squared: Float[AnyArray, "B C"]
    largest: Float[AnyArray, "B C"]
    target_absolute: Float[AnyArray, "B C"]
    target_squared: Float[AnyArray, "B C"]
    target_mean: Float[AnyArray, "B C"]
    target_spread: Float[AnyArray, "B C"]

    @property
    def relative_l1(self) -> Float[np.ndarray, "B C"]:
        """`sum |prediction - target| / sum |target|`."""
        return np.divide(self.absolute, _positive(self.target_absolute))

    @property
    def relative_l2(self) -> Float[np.ndarray, "B C"]:
        """`||prediction - target|| / ||target||`; a field of zeros is compared to a tiny number."""
        return np.sqrt(self.squared / _positive(self.target_squared))

    @property
    def mean_absolute(self) -> Float[np.ndarray, " C"]:
        """Mean absolute error over the points of all samples."""
        return np.sum(self.absolute, 0) / np.sum(self.points, 0)

    @property
    def r_squared(self) -> Float[np.ndarray, " C"]:
        """Coefficient of determination over the points of all samples; NaN where targets are alike.

        One minus the squared errors over the squared deviations from the mean of all targets.
        """
        mean = (self.points * self.target_mean).sum(0) / self.points.sum(0)
        spread = (self.target_spread + self.points * (self.target_mean - mean) ** 2).sum(0)
        alike = spread <= 1e-12 * self.target_squared.sum(0)
        return np.where(alike, np.nan, 1 - self.squared.sum(0) / np.where(alike, 1, spread))


def field_errors(
    prediction: Float[Array, "B N C"],
    target: Float[Array, "B N C"],
    point_mask: Bool[Array, "B N"] | None = None,
) -> FieldErrors:
    """Errors of a batch; three small all-reduces on a mesh."""
    error = prediction.astype(jnp.float32) - target
    mean = masked_mean(target, point_mask)
    parts = [
        jnp.ones_like(error),
        jnp.abs(error),
        jnp.square(error),
        jnp.abs(target),
        jnp.square(target),
        jnp.square(target - mean[:, None]),
    ]
    sums = masked_sum(jnp.stack(parts, axis=-1), point_mask)
    count, absolute, squared, target_absolute, target_squared, spread = jnp.moveaxis(sums, -1, 0)
    size = jnp.abs(error) if point_mask is None else jnp.where(point_mask[..., None], abs(error), 0)
    return FieldErrors(
        count, absolute, squared, size.max(1), target_absolute, target_squared, mean, spread
    )


def on_host(errors: list[tuple[FieldErrors, int]]) -> FieldErrors:
    """Those of all samples in float64, from those of batches and how many of each count."""
    counts = [count for _, count in errors]

    def joined(*parts: np.ndarray) -> np.ndarray:
        counted = zip(parts, counts, strict=True)
        return np.concatenate([np.asarray(part, np.float64)[:count] for part, count in counted])

    return jax.tree.map(joined, *(jax.tree.map(to_host, batch) for batch, _ in errors))


def _positive(sums: AnyArray) -> np.ndarray:
    return np.maximum(sums, float(np.finfo(np.float32).tiny))
