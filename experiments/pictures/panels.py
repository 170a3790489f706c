"""Three panels side by side, with their titles and colour bars, as a PNG file."""

import io
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

# Of a picture: inches, dots an inch, and pixels painted for each one shown, against jagged edges.
_PANEL_WIDTH = 4.3
_DOTS = 150
OVERSAMPLING = 2

Colours = Float[np.ndarray, "N 4"]
Painter = Callable[[Axes], None]


class Frame(NamedTuple):
    """What stands around the panels: two of values, which share a colour bar, and one of errors."""

    heading: str
    titles: list[str]
    bars: list[tuple[ScalarMappable, str]]


def panel_pixels() -> float:
    """Pixels that are painted along the width of a panel."""
    return _PANEL_WIDTH * _DOTS * OVERSAMPLING


def compose(
    frame: Frame, painters: list[Painter], height_over_width: float, projection: str | None = None
) -> bytes:
    """The whole picture as a PNG file.

    Args:
        frame: what stands around the panels.
        painters: of the three panels.
        height_over_width: of a panel; very flat and very high ones are brought nearer to a square.
        projection: of the axes, as in matplotlib; by default a plane's.
    """
    figure = Figure(
        figsize=(3 * _PANEL_WIDTH, _PANEL_WIDTH * np.clip(height_over_width, 0.25, 1.3) + 1.25),
        layout="constrained", facecolor="white",
    )  # fmt: skip
    axes = figure.subplots(1, 3, subplot_kw={"projection": projection})
    for axis, title, paint in zip(axes, frame.titles, painters, strict=True):
        paint(axis)
        axis.set_title(title, fontsize=11)
    # Names come from files: a dollar in one would be read as a formula.
    figure.suptitle(frame.heading, fontsize=13, parse_math=False)
    for (mappable, label), under in zip(frame.bars, (axes[:2], axes[2:]), strict=True):
        bar = figure.colorbar(
            mappable, ax=under, location="bottom", extend="both", aspect=35 * len(under),
            shrink=0.8, pad=0.03,
        )  # fmt: skip
        bar.set_label(label, fontsize=10, parse_math=False)
        bar.ax.tick_params(labelsize=9)
        bar.ax.locator_params(nbins=6)
        bar.ax.ticklabel_format(axis="x", scilimits=(-3, 4), useMathText=True)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_DOTS, metadata={"Software": None})
    return file.getvalue()
