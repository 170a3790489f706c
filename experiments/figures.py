"""Pictures of predictions."""

from pathlib import Path

import matplotlib
import numpy as np
from jaxtyping import Float

from experiments.files import write_atomically

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw_predictions(
    path: Path,
    shape: tuple[int, int],
    inputs: Float[np.ndarray, "n N"],
    truths: Float[np.ndarray, "n N"],
    predictions: Float[np.ndarray, "n N"],
) -> None:
    """Draws input, truth, prediction and error of some samples on a grid as a PNG.

    Args:
        path: the file to write.
        shape: shape of the grid; first axis x, second y.
        inputs: input field of each sample.
        truths: true field.
        predictions: predicted field, drawn with the colours of the true one.
    """
    rows = len(inputs)
    figure, axes = plt.subplots(
        rows, 4, figsize=(13, 3 * rows), squeeze=False, layout="constrained"
    )
    for row, (field, truth, prediction) in enumerate(zip(inputs, truths, predictions, strict=True)):
        error = prediction - truth
        bound = np.abs(error).max()
        relative = np.linalg.norm(error) / np.linalg.norm(truth)
        panels = [
            ("permeability", field, dict(cmap="cividis")),
            ("pressure, truth", truth, dict(cmap="viridis")),
            ("pressure, prediction", prediction, dict(vmin=truth.min(), vmax=truth.max())),
            (
                f"error, relative L2 {relative:.3f}",
                error,
                dict(cmap="RdBu", vmin=-bound, vmax=bound),
            ),
        ]
        for axis, (title, values, style) in zip(axes[row], panels, strict=True):
            image = axis.imshow(
                values.reshape(shape).T, origin="lower", extent=(0, 1, 0, 1), **style
            )
            axis.set_title(title, fontsize=10)
            axis.tick_params(labelsize=7)
            figure.colorbar(image, ax=axis, shrink=0.85)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=110))
    plt.close(figure)
