"""Pictures of one sample of points: truth, prediction and error of a field side by side."""

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize

from experiments.pictures.flat import draw_flat
from experiments.pictures.panels import Frame
from experiments.pictures.surfaces import draw_surface

# Points drawn at most.
_MOST_POINTS = 200_000
# Percentiles that the colours span.
_COLOUR_RANGE = (1, 99)
# A slab is this thick in parts of the cloud, or thicker until it has enough points for a picture.
_SLAB_THICKNESS = 0.02
_SLAB_POINTS = 5_000


def render_points(
    positions: Float[np.ndarray, "N D"],
    truth: Float[np.ndarray, " N"],
    prediction: Float[np.ndarray, " N"],
    *,
    field: str,
    surface: bool,
    title: str,
) -> bytes:
    """Draws truth, prediction and error of one field of one sample.

    A surface in three dimensions is drawn by VTK, off screen (by matplotlib, where VTK or a way to
    render is missing). Of a volume a thin slab is drawn, across its shortest extent and through the
    median of the points, which is where the mesh is fine. At most 200,000 points are drawn, the
    same ones every time; the relative L2 error in the title is that of all points.

    Args:
        positions: of the points, two or three coordinates in any one unit.
        truth: of the field, in its unit.
        prediction: likewise; values that are not finite are grey.
        field: name of the field.
        surface: whether the points lie on a surface rather than in a volume.
        title: what the sample is called.

    Returns:
        A PNG file.

    Raises:
        ValueError: the shapes do not fit together, there are no points, or positions or truth are
            not finite.
    """
    positions, truth, prediction = (
        np.asarray(array, np.float64) for array in (positions, truth, prediction)
    )
    _check(positions, truth, prediction)
    error = prediction - truth
    heading = f"{title}, {field}: relative L2 {_relative_l2(error, truth)}"
    solid = positions.shape[1] == 3
    shown = np.arange(len(positions))
    if solid and not surface:
        shown = shown[_in_slab(positions)]
    shown = _subset(shown)

    low, high = _wider(*np.percentile(truth[shown], _COLOUR_RANGE))
    bound = _error_bound(error[shown], high - low)
    of_values = ScalarMappable(Normalize(low, high), _colour_map("viridis"))
    of_errors = ScalarMappable(Normalize(-bound, bound), _colour_map("RdBu_r"))
    colourings = [
        mappable.to_rgba(np.where(np.isfinite(values), values, np.nan)[shown])
        for mappable, values in ((of_values, truth), (of_values, prediction), (of_errors, error))
    ]
    titles = ["truth", "prediction", _error_title(error)]
    bars = [(of_values, field), (of_errors, f"{field}, prediction − truth")]
    draw = draw_surface if solid and surface else draw_flat
    return draw(positions[shown], colourings, Frame(heading, titles, bars))


def _check(positions: np.ndarray, truth: np.ndarray, prediction: np.ndarray) -> None:
    if positions.ndim != 2 or positions.shape[1] not in (2, 3) or len(positions) == 0:
        raise ValueError(
            f"positions: expected shape (N, 2) or (N, 3) with N > 0; got {positions.shape}"
        )
    for name, values in (("truth", truth), ("prediction", prediction)):
        if values.shape != positions.shape[:1]:
            raise ValueError(f"{name}: expected shape {positions.shape[:1]}; got {values.shape}")
    for name, values in (("positions", positions), ("truth", truth)):
        if not np.isfinite(values).all():
            raise ValueError(f"{name}: expected finite values; got some that are not")


def _colour_map(name: str) -> Colormap:
    return colormaps[name].with_extremes(bad="0.6")


def _relative_l2(error: np.ndarray, truth: np.ndarray) -> str:
    size = np.linalg.norm(truth)
    return f"{np.linalg.norm(error) / size:.4g}" if size > 0 else "undefined, truth is 0"


def _error_title(error: np.ndarray) -> str:
    finite = np.abs(error[np.isfinite(error)])
    return f"error, largest {finite.max():.3g}" if finite.size else "error, none of it finite"


def _wider(low: float, high: float) -> tuple[float, float]:
    """The same range, or one around it if it is too narrow to tell colours apart."""
    size = max(abs(low), abs(high))
    if high - low > 1e-6 * size:
        return low, high
    margin = 0.1 * size or 1.0
    return low - margin, high + margin


def _error_bound(error: np.ndarray, span: float) -> float:
    """End of the error's colours: all but the largest errors, which would hide the others."""
    sizes = np.abs(error[np.isfinite(error)])
    if not sizes.any():
        return span
    # Errors at less than one point in a hundred would otherwise be lost.
    return np.percentile(sizes, _COLOUR_RANGE[1]) or sizes.max()


def _subset(indices: Int[np.ndarray, " N"]) -> Int[np.ndarray, " n"]:
    if len(indices) <= _MOST_POINTS:
        return indices
    # Not sorted, so that the first of them are a subset as even as the whole.
    return np.random.default_rng(0).choice(indices, _MOST_POINTS, replace=False)


def _in_slab(positions: Float[np.ndarray, "N 3"]) -> Bool[np.ndarray, " N"]:
    # Not the whole extents, which a few points far away would make.
    low, middle, high = np.percentile(positions, (2, 50, 98), axis=0)
    axis = np.ptp(positions, axis=0).argmin()
    distance = np.abs(positions[:, axis] - middle[axis])
    enough = min(_SLAB_POINTS, len(positions))
    half = max(
        _SLAB_THICKNESS / 2 * (high - low)[axis], np.partition(distance, enough - 1)[enough - 1]
    )
    return distance <= half
