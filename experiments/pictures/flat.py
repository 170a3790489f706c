"""Pictures of points of a plane or of a thin slab, where a pixel shows the point nearest to it."""

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes
from scipy.spatial import cKDTree

from experiments.pictures.panels import Colours, Frame, Painter, compose, panel_pixels
from experiments.pictures.spacing import neighbours, spacing


def draw_flat(positions: np.ndarray, colourings: list[Colours], frame: Frame) -> bytes:
    """Points of a plane, or of a slab as seen along its thickness."""
    names = list("xyz"[: positions.shape[1]])
    if len(names) == 3:
        thin = np.ptp(positions, axis=0).argmin()
        low, high = positions[:, thin].min(), positions[:, thin].max()
        note = f" (slab of {names.pop(thin)} from {low:.3g} to {high:.3g})"
        frame = frame._replace(heading=frame.heading + note)
        positions = np.delete(positions, thin, axis=1)
    low, high = _view(positions)
    shape = np.ceil((high - low) / (high - low).max() * panel_pixels()).astype(int)
    nearest, near = _nearest_points(positions, low, high, shape)

    def painter(colours: Colours) -> Painter:
        image = np.where(near[..., None], colours[nearest], 0)

        def paint(axis: Axes) -> None:
            axis.imshow(image, origin="lower", extent=(low[0], high[0], low[1], high[1]))
            axis.set_aspect("equal")
            axis.set_xlabel(names[0])
            axis.set_ylabel(names[1])
            axis.tick_params(labelsize=8)

        return paint

    width, height = high - low
    return compose(frame, [painter(colours) for colours in colourings], height / width)


def _view(positions: Float[np.ndarray, "N 2"]) -> tuple[np.ndarray, np.ndarray]:
    """Corners of what is shown: not the few points far from where all others are."""
    low, high = np.percentile(positions, (2, 98), axis=0)
    margin = 0.05 * (high - low)
    low = np.maximum(low - margin, positions.min(0) - margin)
    high = np.minimum(high + margin, positions.max(0) + margin)
    # Neither a line nor a single point is narrower than a strip.
    least = 0.1 * (high - low).max() or 1.0
    narrow = np.maximum(least - (high - low), 0) / 2
    return low - narrow, high + narrow


def _nearest_points(
    positions: Float[np.ndarray, "N 2"], low: np.ndarray, high: np.ndarray, shape: tuple[int, int]
) -> tuple[Int[np.ndarray, "h w"], Bool[np.ndarray, "h w"]]:
    """The point nearest to each pixel, and whether it is so near that its disc covers the pixel.

    Equal to a scatter of discs as wide as the points are apart, where no disc hides another point.
    """
    extent = (high - low).max()
    distances, _ = neighbours(positions, 7)
    # Wider than a surface's: these hide nothing, and gaps look like holes of the domain.
    least = max(0.0015, 0.02 / len(positions) ** 0.5)
    radii = np.clip(1.4 * spacing(distances), least * extent, 0.05 * extent)
    x, y = (
        np.linspace(low[i], high[i], 2 * shape[i] + 1)[1::2]  # centres of the pixels
        for i in range(2)
    )
    pixels = np.stack(np.meshgrid(x, y), axis=-1)
    distance, nearest = cKDTree(positions).query(pixels)
    return nearest, distance <= radii[nearest]
