"""`python docs/figures/draw.py`: draws the pictures of docs/domain_parallelism.md.

Plain SVG, written by the standard library, so that the same text comes out everywhere and a test
can compare the files in docs/images/ with it.
"""

from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

FOLDER = Path(__file__).parents[1] / "images"
DEVICES = 4
# Light, with dark text: readable on a white and on a dark page, and apart in grey as well.
SPLIT = ("#cfe2f3", "#a9cbe8", "#83b3dc", "#5e9cd1")
WHOLE = "#fbd9a2"
EXCHANGE = "#d5ecd0"
INK = "#222222"
COLUMN, GAP, ROW, SPACE, LEFT, TOP = 168, 12, 46, 22, 20, 96
WIDTH = 2 * LEFT + DEVICES * COLUMN + (DEVICES - 1) * GAP


class Split(NamedTuple):
    """Each device has another part, or computes on its own part."""

    text: str
    shape: str


class Whole(NamedTuple):
    """Every device has the same."""

    text: str
    shape: str


class AllReduce(NamedTuple):
    """A sum or maximum over all devices, whose size does not depend on the points."""

    text: str
    shape: str


class Ring(NamedTuple):
    """Every part travels once around the devices."""

    text: str
    shape: str


class Halo(NamedTuple):
    """Neighbours exchange what lies at their common boundary."""

    text: str
    shape: str


FIGURES = {
    "layout": (
        "What lies where: four devices share out the points of a sample",
        [
            Split("points of a sample", "(B, N/4, C)"),
            Split("mask: which are real", "(B, N/4)"),
            Whole("weights", "(C_in, C_out)"),
            Split("linear, norm, MLP: local", "(B, N/4, C)"),
            AllReduce("attention exchanges latents, sums and maxima, never points", "(B, H, S, D)"),
            Split("prediction", "(B, N/4, C_out)"),
        ],
    ),
    "flare_layer": (
        "A FLARE layer, forward",
        [
            Split("points", "(B, N/4, C)"),
            Split("chunk by chunk", "largest score, sums"),
            AllReduce("1. maximum of the scores of each latent", "(B, H, S)"),
            Split("sums in its scale", "exp(own max - maximum)"),
            AllReduce("2. packed numerator and denominator", "(B, H, S, D + 1)"),
            Whole("latents z", "(B, H, S, D)"),
            Split("decode: local", "softmax over S, times z"),
            Split("points", "(B, N/4, C)"),
        ],
    ),
    "physics_attention": (
        "Transolver's physics attention, forward",
        [
            Split("points", "(B, N/4, C)"),
            Halo("on grids only: a row of each neighbour, for the convolution", "(B, W, C)"),
            Split("slice weights: local", "softmax over S"),
            AllReduce("packed sums of weighted points and of weights", "(B, H, S, D + 1)"),
            Whole("slice tokens", "(B, H, S, D)"),
            Whole("attention among tokens", "(B, H, S, D)"),
            Split("tokens back to points", "slice weights · tokens"),
            Split("points", "(B, N/4, C)"),
        ],
    ),
    "gale": (
        "GeoTransolver's GALE, forward",
        [
            Split("points of a stream", "(B, N/4, C)"),
            Split("slice weights: local", "softmax over S"),
            AllReduce("packed sums of weighted points and of weights", "(B, H, S, D + 1)"),
            Whole("slice tokens; context", "(B, H, S, D) and S_c"),
            Whole("self- and cross-attention", "mixed"),
            Split("tokens back to points", "slice weights · tokens"),
            Split("points", "(B, N/4, C)"),
        ],
    ),
    "gale_fa": (
        "GeoTransolver's GALE_FA, forward",
        [
            Split("points of a stream", "(B, N/4, C)"),
            Split("chunk by chunk", "largest score, sums"),
            AllReduce("1. maximum of the scores of each latent", "(B, H, S)"),
            AllReduce("2. packed numerator and denominator", "(B, H, S, D + 1)"),
            Whole("latents; context", "(B, H, S, D) and S_c"),
            Split("FLARE's decode: local", "softmax over S"),
            Split("attention to the context", "softmax over S_c"),
            Split("both mixed: points", "(B, N/4, C)"),
        ],
    ),
    "context": (
        "GeoTransolver's context, made once for all blocks",
        [
            Split("geometry; global tokens", "M/4, N_g/4 rows, padded"),
            Split("slice weights: local", "softmax over S"),
            AllReduce("packed sums, one for each tokenizer", "(B, H, S, D + 1)"),
            Whole("latents of each", "(B, H, S, D)"),
            Whole("context: side by side", "(B, H, S, D_c)"),
        ],
    ),
    "neighborhoods": (
        "Local features: neighbours within a radius",
        [
            Split("queries; points searched", "(B, N/4, 3), (B, M/4, 3)"),
            Ring(
                "1. search: blocks of coordinates pass by, queries keep the nearest", "(B, M/4, 3)"
            ),
            Split("indices of neighbours", "(B, N/4, K)"),
            Ring("2. gather: coordinates pass by, queries take their neighbours'", "(B, M/4, 3)"),
            Split("features of a point", "(B, N/4, C_local)"),
        ],
    ),
}


class Canvas:
    """An SVG picture of a stack of rows."""

    def __init__(self, title: str, height: int):
        """An empty picture with its title."""
        self.root = ElementTree.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "viewBox": f"0 0 {WIDTH} {height}",
                "width": str(WIDTH),
                "height": str(height),
                "font-family": "Helvetica, Arial, sans-serif",
                "role": "img",
            },
        )
        ElementTree.SubElement(self.root, "title").text = title
        self.rectangle(0, 0, WIDTH, height, "#ffffff")

    def rectangle(self, x: float, y: float, width: float, height: float, fill: str, **more: str):
        """A rectangle."""
        box = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:g}", "height": f"{height:g}"}
        ElementTree.SubElement(self.root, "rect", box | {"fill": fill} | more)

    def text(self, x: float, y: float, text: str, size: int = 12, **more: str):
        """A line of text about its middle."""
        place = {"x": f"{x:g}", "y": f"{y:g}", "font-size": str(size), "fill": INK}
        element = ElementTree.SubElement(
            self.root, "text", {"text-anchor": "middle"} | place | more
        )
        element.text = text

    def arrow(self, x: float, y: float, to_y: float):
        """An arrow down."""
        place = {"x1": f"{x:g}", "y1": f"{y:g}", "x2": f"{x:g}", "y2": f"{to_y:g}"}
        ElementTree.SubElement(self.root, "line", place | {"stroke": INK, "stroke-width": "1.2"})
        corners = ((x, to_y), (x - 4, to_y - 5), (x + 4, to_y - 5))
        points = " ".join(f"{a:g},{b:g}" for a, b in corners)
        ElementTree.SubElement(self.root, "polygon", {"points": points, "fill": INK})

    def __str__(self) -> str:
        """The picture as a file's text."""
        ElementTree.indent(self.root)
        return ElementTree.tostring(self.root, encoding="unicode") + "\n"


def column(device: int) -> float:
    """Left edge of a device's column."""
    return LEFT + device * (COLUMN + GAP)


def across(canvas: Canvas, y: float, row: AllReduce | Ring | Halo) -> None:
    """A band over all devices, for what travels between them."""
    width = WIDTH - 2 * LEFT
    canvas.rectangle(LEFT, y, width, ROW, EXCHANGE, stroke="#4d8a3f", rx="8")
    kind = {AllReduce: "all-reduce", Ring: "ring", Halo: "boundary"}[type(row)]
    canvas.text(WIDTH / 2, y + 19, f"{kind}: {row.text}")
    canvas.text(WIDTH / 2, y + 37, row.shape, 11, fill="#2f5c25")


def columns(canvas: Canvas, y: float, row: Split | Whole) -> None:
    """A box on each device: of one colour where all have the same."""
    for device in range(DEVICES):
        whole = isinstance(row, Whole)
        fill = WHOLE if whole else SPLIT[device]
        canvas.rectangle(column(device), y, COLUMN, ROW, fill, stroke="#777777", rx="3")
        middle = column(device) + COLUMN / 2
        canvas.text(middle, y + 19, row.text)
        canvas.text(middle, y + 37, row.shape, 11)


def draw(title: str, rows: list) -> str:
    """A figure: a column a device, a row a stage, from top to bottom."""
    height = TOP + len(rows) * (ROW + SPACE) - SPACE + 18
    canvas = Canvas(title, height)
    canvas.text(WIDTH / 2, 26, title, 16, **{"font-weight": "bold"})
    legend = ((SPLIT[1], "split: each device its part"), (WHOLE, "whole: the same on every device"))
    legend += ((EXCHANGE, "travels between devices"),)
    for i, (fill, text) in enumerate(legend):
        x = LEFT + 20 + i * 240
        canvas.rectangle(x, 42, 16, 14, fill, stroke="#777777")
        canvas.text(x + 24, 54, text, **{"text-anchor": "start"})
    for device in range(DEVICES):
        canvas.text(column(device) + COLUMN / 2, 84, f"device {device}")
    for i, row in enumerate(rows):
        y = TOP + i * (ROW + SPACE)
        if isinstance(row, Split | Whole):
            columns(canvas, y, row)
        else:
            across(canvas, y, row)
        if i + 1 < len(rows):
            for device in range(DEVICES):
                middle = column(device) + COLUMN / 2
                canvas.arrow(middle, y + ROW + 2, y + ROW + SPACE - 2)
    return str(canvas)


def figures() -> dict[str, str]:
    """Every figure, by the name of its file."""
    return {f"{name}.svg": draw(*content) for name, content in FIGURES.items()}


if __name__ == "__main__":
    for name, text in figures().items():
        (FOLDER / name).write_text(text)
