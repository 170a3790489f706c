"""Pictures of predictions."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from experiments.data.batch import Windows
from experiments.data.dataset import Dataset
from experiments.data.in_memory import AirfoilSplit, GridSplit
from experiments.files import write_atomically

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# What is shown of an airfoil's surroundings, in chords, and the percentiles that colours span.
_AIRFOIL_VIEW = (-0.3, 1.3, -0.5, 0.5)
_COLOUR_RANGE = (1, 99)


def draw_predictions(
    path: Path,
    dataset: Dataset,
    predictions: dict[int, tuple[Float[np.ndarray, "N C"], ...]],
) -> None:
    """Writes the `picture` of some test samples."""
    png = picture(dataset, predictions)
    write_atomically(path, lambda temporary: temporary.write_bytes(png))


def picture(
    dataset: Dataset, predictions: dict[int, tuple[Float[np.ndarray, "N C"], ...]]
) -> bytes:
    """Truth, prediction and error of some test samples as a PNG, by the kind of data.

    Args:
        dataset: the data set.
        predictions: predicted fields of each stream by the number of their sample; the first is
            drawn.
    """
    split = dataset.splits["test"]
    draw = _airfoil_panels if isinstance(split, AirfoilSplit) else _cloud_panels
    # A grid of squares is one picture; one that bends is a cloud.
    if isinstance(split, GridSplit) and split.embedding.ndim == 2:
        draw = _grid_panels
    rows = [draw(dataset, index, fields[0]) for index, fields in predictions.items()]
    columns = len(rows[0])
    figure, axes = plt.subplots(
        len(rows), columns, figsize=(13, 3 * len(rows)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for row, panels in zip(axes, rows, strict=True):
        for axis, (title, paint) in zip(row, panels, strict=True):
            image = paint(axis)
            axis.set_title(title, fontsize=10)
            axis.tick_params(labelsize=7)
            figure.colorbar(image, ax=axis, shrink=0.85)
    written = io.BytesIO()
    figure.savefig(written, dpi=110)
    plt.close(figure)
    return written.getvalue()


def _errors(prediction: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Error, its largest value, and the relative L2 error."""
    error = prediction - truth
    relative = float(np.linalg.norm(error) / np.linalg.norm(truth))
    return error, np.abs(error).max(), relative


def _grid_panels(dataset: Dataset, index: int, fields: np.ndarray) -> list[tuple[str, Any]]:
    """Input, truth, prediction and error of the first field on a grid."""
    split: Any = dataset.splits["test"]
    name = dataset.fields[0]
    values, truth, prediction = split.fx[index, :, 0], split.target[index, :, 0], fields[:, 0]
    error, bound, relative = _errors(prediction, truth)

    def paint(values: np.ndarray, **style: Any) -> Callable[[Axes], Any]:
        grid = values.reshape(dataset.description.structured_shape).T
        return lambda axis: axis.imshow(grid, origin="lower", extent=(0, 1, 0, 1), **style)

    return [
        ("permeability", paint(values, cmap="cividis")),
        (f"{name}, truth", paint(truth)),
        (f"{name}, prediction", paint(prediction, vmin=truth.min(), vmax=truth.max())),
        (
            f"error, relative L2 {relative:.3f}",
            paint(error, cmap="RdBu", vmin=-bound, vmax=bound),
        ),
    ]


def _cloud_panels(dataset: Dataset, index: int, fields: np.ndarray) -> list[tuple[str, Any]]:
    """Truth, prediction and error of the first field, seen along the shortest extent."""
    count = len(dataset.description.streams)
    windows = Windows((slice(None),) * count)
    cloud: Any = dataset.splits["test"].read(index, windows).clouds[0]
    positions = cloud.embedding if cloud.positions is None else cloud.positions
    seen = np.sort(np.argsort(-np.ptp(positions, axis=0), kind="stable")[:2])
    across = positions[:, seen] if len(seen) == 2 else np.pad(positions, ((0, 0), (0, 1)))
    name, truth, prediction = dataset.fields[0], cloud.target[:, 0], fields[:, 0]
    error, bound, relative = _errors(prediction, truth)
    low, high = np.percentile(truth, _COLOUR_RANGE)

    def paint(values: np.ndarray, **style: Any) -> Callable[[Axes], Any]:
        def on(axis: Any) -> Any:
            axis.set_aspect("equal")
            return axis.scatter(*across.T, c=values, s=3, linewidths=0, **style)

        return on

    return [
        (f"{name}, truth", paint(truth, vmin=low, vmax=high)),
        ("prediction", paint(prediction, vmin=low, vmax=high)),
        (f"error, relative L2 {relative:.3f}", paint(error, cmap="RdBu", vmin=-bound, vmax=bound)),
    ]


def _airfoil_panels(dataset: Dataset, index: int, fields: np.ndarray) -> list[tuple[str, Any]]:
    """Truth, prediction and error of the pressure coefficient around an airfoil."""
    split: Any = dataset.splits["test"]
    arrays = split.arrays
    rows = arrays.rows(index)
    positions, truth = arrays.positions[rows], arrays.fields[rows][:, 2]
    error, bound, relative = _errors(fields[:, 2], truth)
    outline = arrays.geometry[index]
    low, high = np.percentile(truth, _COLOUR_RANGE)

    def paint(values: np.ndarray, **style: Any) -> Callable[[Axes], Any]:
        def on(axis: Axes) -> Any:
            image = axis.tricontourf(
                positions[:, 0], positions[:, 1], values, extend="both", **style
            )
            axis.fill(outline[:, 0], outline[:, 1], "white", edgecolor="black", linewidth=0.6)
            axis.axis(_AIRFOIL_VIEW)
            axis.set_aspect("equal")
            return image

        return on

    levels = np.linspace(low, high, 33)
    bound = min(bound, (high - low) / 4)
    angle = arrays.angle_of_attack[index]
    return [
        (f"pressure coefficient at {angle:.1f}°, truth", paint(truth, levels=levels)),
        ("prediction", paint(fields[:, 2], levels=levels)),
        (
            f"error, relative L2 {relative:.3f}",
            paint(error, levels=np.linspace(-bound, bound, 33), cmap="RdBu"),
        ),
    ]
