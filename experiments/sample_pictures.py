"""Pictures of one sample of points: truth, prediction and error of a field side by side."""

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from scipy.spatial import cKDTree

# Points drawn at most, and those of matplotlib's slow scatter in three dimensions.
_MOST_POINTS = 200_000
_MOST_SCATTERED = 20_000
# Percentiles that the colours span.
_COLOUR_RANGE = (1, 99)
# A slab is this thick in parts of the cloud, or thicker until it has enough points for a picture.
_SLAB_THICKNESS = 0.02
_SLAB_POINTS = 5_000

# Of a picture: inches, dots an inch, and pixels painted for each one shown, against jagged edges.
_PANEL_WIDTH = 4.3
_DOTS = 150
_OVERSAMPLING = 2

# From the front left and above: x runs downstream and z up in most cases of external flow.
_TOWARDS_CAMERA = np.array([-1.0, -1.3, 0.8]) / np.linalg.norm([-1.0, -1.3, 0.8])
_TOWARDS_LIGHT = np.array([-0.3, -0.7, 1.0]) / np.linalg.norm([-0.3, -0.7, 1.0])

Colours = Float[np.ndarray, "N 4"]
Painter = Callable[[Axes], None]


class _Frame(NamedTuple):
    """What stands around the panels: two of values, which share a colour bar, and one of errors."""

    heading: str
    titles: list[str]
    bars: list[tuple[ScalarMappable, str]]


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
    draw = _draw_surface if solid and surface else _draw_flat
    return draw(positions[shown], colourings, _Frame(heading, titles, bars))


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


def _neighbours(points: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Distances and indices of the nearest points of each point, itself among them."""
    order = np.arange(1, min(count, len(points)) + 1)
    return cKDTree(points).query(points, k=order)


def _spacing(distances: Float[np.ndarray, "N k"]) -> Float[np.ndarray, " N"]:
    """Distance to the sixth neighbour.

    Discs of that radius leave open exp(-6) of a random cloud that is evenly dense on a surface.
    """
    return distances[:, min(6, distances.shape[1] - 1)]


def _draw_flat(positions: np.ndarray, colourings: list[Colours], frame: _Frame) -> bytes:
    """Points of a plane, or of a slab as seen along its thickness."""
    names = list("xyz"[: positions.shape[1]])
    if len(names) == 3:
        thin = np.ptp(positions, axis=0).argmin()
        low, high = positions[:, thin].min(), positions[:, thin].max()
        note = f" (slab of {names.pop(thin)} from {low:.3g} to {high:.3g})"
        frame = frame._replace(heading=frame.heading + note)
        positions = np.delete(positions, thin, axis=1)
    low, high = _view(positions)
    pixels = _PANEL_WIDTH * _DOTS * _OVERSAMPLING
    shape = np.ceil((high - low) / (high - low).max() * pixels).astype(int)
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
    return _compose(frame, [painter(colours) for colours in colourings], height / width)


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
    distances, _ = _neighbours(positions, 7)
    # Wider than a surface's: these hide nothing, and gaps look like holes of the domain.
    least = max(0.0015, 0.02 / len(positions) ** 0.5)
    radii = np.clip(1.4 * _spacing(distances), least * extent, 0.05 * extent)
    x, y = (
        np.linspace(low[i], high[i], 2 * shape[i] + 1)[1::2]  # centres of the pixels
        for i in range(2)
    )
    pixels = np.stack(np.meshgrid(x, y), axis=-1)
    distance, nearest = cKDTree(positions).query(pixels)
    return nearest, distance <= radii[nearest]


def _draw_surface(positions: np.ndarray, colourings: list[Colours], frame: _Frame) -> bytes:
    """Points of a surface, as seen by a camera."""
    low, high = positions.min(0), positions.max(0)
    # In single precision, which graphics have, only after they are around the origin.
    points = (positions - (low + high) / 2) / ((high - low).max() or 1.0)
    try:
        images = _rendered(points, colourings)
    except Exception:
        # No VTK, or no way for it to render: whatever it was, a plainer picture beats none.
        painters = [_scatter_painter(points, colours) for colours in colourings]
        return _compose(frame, painters, 0.75, projection="3d")
    height, width, _ = images[0].shape
    return _compose(frame, [_image_painter(image) for image in images], height / width)


def _image_painter(image: UInt8[np.ndarray, "h w 3"]) -> Painter:
    def paint(axis: Axes) -> None:
        axis.imshow(image)
        axis.set_axis_off()

    return paint


def _scatter_painter(points: Float[np.ndarray, "N 3"], colours: Colours) -> Painter:
    points, colours = points[:_MOST_SCATTERED], colours[:_MOST_SCATTERED]
    area = np.clip(60_000 / len(points), 2, 40)
    elevation = np.degrees(np.arcsin(_TOWARDS_CAMERA[2]))
    azimuth = np.degrees(np.arctan2(_TOWARDS_CAMERA[1], _TOWARDS_CAMERA[0]))

    def paint(axis: Any) -> None:
        axis.scatter(*points.T, c=colours, s=area, linewidths=0, depthshade=False)
        axis.set_box_aspect(np.maximum(np.ptp(points, axis=0), 0.1), zoom=1.3)
        axis.view_init(elev=elevation, azim=azimuth)
        axis.set_axis_off()

    return paint


def _rendered(
    points: Float[np.ndarray, "N 3"], colourings: list[Colours]
) -> list[UInt8[np.ndarray, "h w 3"]]:
    """Pictures of points around the origin by VTK, one for each colouring.

    Raises:
        RuntimeError: VTK rendered nothing.
    """
    import pyvista  # an optional extra

    distances, indices = _neighbours(points, 13)
    # Less than the spacing, which leaves 2 % open but keeps outlines.
    radii = np.clip(0.8 * _spacing(distances), 0.0015, 0.03)
    shade = _shade(points, indices)[:, None]

    right = np.cross((0.0, 0.0, 1.0), _TOWARDS_CAMERA)
    right /= np.linalg.norm(right)
    up = np.cross(_TOWARDS_CAMERA, right)
    seen = points @ np.stack([right, up], axis=1)
    low, high = (seen - radii[:, None]).min(0), (seen + radii[:, None]).max(0)
    center, (width, height) = (low + high) / 2, 1.04 * (high - low)
    # A panel is as wide as high, or wider.
    width = max(width, height)
    height = max(height, 0.3 * width)
    pixels = round(_PANEL_WIDTH * _DOTS * _OVERSAMPLING / 2) * 2
    size = (pixels, round(pixels * height / width / 2) * 2)
    focus = center[0] * right + center[1] * up

    # Graphics draw points as spheres fast, but of one size at a time: in steps of sqrt(2).
    diameters = 2 * radii * size[0] / width
    steps = np.ceil(2 * np.log2(diameters)).astype(int)
    images = []
    # Without a display VTK warns of it before it takes another way.
    with pyvista.vtk_verbosity("error"):
        plotter = pyvista.Plotter(off_screen=True, window_size=list(size), lighting="none")
        try:
            plotter.background_color = pyvista.Color("white")
            camera = plotter.camera
            camera.focal_point, camera.position, camera.up = focus, focus + 4 * _TOWARDS_CAMERA, up
            camera.parallel_projection, camera.parallel_scale = True, height / 2
            for colours in colourings:
                plotter.clear_actors()
                rgb = np.round(255 * colours[:, :3] * shade).astype(np.uint8)
                for step in np.unique(steps):
                    of_size = steps == step
                    plotter.add_points(
                        points[of_size].astype(np.float32), scalars=rgb[of_size], rgb=True,
                        point_size=2 ** (step / 2), render_points_as_spheres=True, lighting=False,
                        reset_camera=False,
                    )  # fmt: skip
                camera.clipping_range = (1, 7)
                images.append(_averaged(np.asarray(plotter.screenshot(return_img=True))))
        finally:
            plotter.close()
    if images[0].min() == images[0].max():
        raise RuntimeError("VTK rendered nothing")
    return images


def _averaged(image: UInt8[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "h w 3"]:
    height, width, channels = image.shape
    blocks = image.reshape(
        height // _OVERSAMPLING, _OVERSAMPLING, width // _OVERSAMPLING, _OVERSAMPLING, channels
    )
    return np.round(blocks.mean((1, 3))).astype(np.uint8)


def _shade(
    points: Float[np.ndarray, "N 3"], neighbours: Shaped[np.ndarray, "N k"]
) -> Float[np.ndarray, " N"]:
    """Brightness by normals, which are where neighbours vary least; spheres' own would be bumpy."""
    offsets = points[neighbours] - points[neighbours].mean(1, keepdims=True)
    _, directions = np.linalg.eigh(np.einsum("nki,nkj->nij", offsets, offsets))
    normals = directions[:, :, 0]
    # What is seen faces the camera.
    normals *= np.where(normals @ _TOWARDS_CAMERA < 0, -1, 1)[:, None]
    return 0.62 + 0.38 * np.clip(normals @ _TOWARDS_LIGHT, 0, 1)


def _compose(
    frame: _Frame, painters: list[Painter], height_over_width: float, projection: str | None = None
) -> bytes:
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
