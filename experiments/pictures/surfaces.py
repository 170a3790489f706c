"""Pictures of the points of a surface, as a camera sees them.

VTK draws them as shaded spheres, off screen; where it or a way to render is missing, matplotlib
scatters them.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Shaped, UInt8
from matplotlib.axes import Axes

from experiments.pictures.panels import (
    OVERSAMPLING,
    Colours,
    Frame,
    Painter,
    compose,
    panel_pixels,
)
from experiments.pictures.spacing import neighbours, spacing

# Points of matplotlib's slow scatter in three dimensions at most.
_MOST_SCATTERED = 20_000

# From the front left and above: x runs downstream and z up in most cases of external flow.
_TOWARDS_CAMERA = np.array([-1.0, -1.3, 0.8]) / np.linalg.norm([-1.0, -1.3, 0.8])
_TOWARDS_LIGHT = np.array([-0.3, -0.7, 1.0]) / np.linalg.norm([-0.3, -0.7, 1.0])


def draw_surface(positions: np.ndarray, colourings: list[Colours], frame: Frame) -> bytes:
    """Points of a surface, as seen by a camera."""
    low, high = positions.min(0), positions.max(0)
    # In single precision, which graphics have, only after they are around the origin.
    points = (positions - (low + high) / 2) / ((high - low).max() or 1.0)
    try:
        images = _rendered(points, colourings)
    except Exception:
        # No VTK, or no way for it to render: whatever it was, a plainer picture beats none.
        painters = [_scatter_painter(points, colours) for colours in colourings]
        return compose(frame, painters, 0.75, projection="3d")
    height, width, _ = images[0].shape
    return compose(frame, [_image_painter(image) for image in images], height / width)


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

    distances, indices = neighbours(points, 13)
    # Less than the spacing, which leaves 2 % open but keeps outlines.
    radii = np.clip(0.8 * spacing(distances), 0.0015, 0.03)
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
    pixels = round(panel_pixels() / 2) * 2
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
        height // OVERSAMPLING, OVERSAMPLING, width // OVERSAMPLING, OVERSAMPLING, channels
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
