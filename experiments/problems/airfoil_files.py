"""Airfoil coordinate files: those of the UIUC collection, or of any folder.

The two formats in use are Selig's, one list of x and y that runs around the airfoil from the
trailing edge, and Lednicer's, the numbers of points of both sides and then each side from its
leading edge (UIUC Airfoil Coordinates Database). The first line names the airfoil.
"""

import hashlib
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from jaxtyping import Float64
from scipy.spatial.distance import cdist

from experiments.extras import installing
from experiments.formats.limits import read_text
from experiments.problems.airfoil_shapes import (
    crosses_itself,
    distance_to,
    panel_nodes,
    signed_area,
)

UIUC_PACKAGE = "aerosandbox"
_UIUC_FOLDER = Path("geometry", "airfoil", "airfoil_database")

# In chords. A wider gap is a file that lacks an end; closing it would change the whole shape.
LARGEST_GAP = 0.03
# How far panels may stray from the points of the file, in chords: splines swing out at kinks.
LARGEST_DEVIATION = 0.01
# Between two of 256 panels, in degrees. Flow turns a sharp nose at a speed that only the panels
# limit.
LARGEST_TURN = 30.0
# In chords. Two files whose nodes all agree within this are one shape.
SAME_SHAPE = 1e-3

_FEWEST_POINTS = 10
_CHECKED_PANELS = 256


def uiuc_folder() -> Path:
    """The coordinate files of the UIUC collection that the package `aerosandbox` brings.

    The package itself is not imported.

    Raises:
        FileNotFoundError: the package is not installed, or holds no such folder.
    """
    spec = find_spec(UIUC_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(location) / _UIUC_FOLDER
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"data.shapes=uiuc: expected the package {UIUC_PACKAGE} with its airfoil files "
        f"({installing('airfoils')}), or data.uiuc_dir; got neither"
    )


def airfoil_paths(folder: Path) -> list[Path]:
    """The coordinate files `*.dat` of a folder, by name.

    Raises:
        FileNotFoundError: there is no such folder, or no such file in it.
    """
    paths = sorted(Path(folder).glob("*.dat"))
    if not paths:
        raise FileNotFoundError(f"{folder}: expected a folder with .dat files; got none")
    return paths


def fingerprint(paths: list[Path]) -> str:
    """SHA-256 of the names and contents of files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.name.encode()).digest())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_shapes(paths: list[Path], panels: int) -> dict[str, Float64[np.ndarray, "n 2"]]:
    """Nodes of every airfoil that can be used, by the name of its file without its ending.

    Files that cannot be used are skipped; one warning counts and names them. Of files
    with one shape, the first is kept: the collection holds many an airfoil twice.

    Args:
        paths: coordinate files.
        panels: number of nodes, even, `>= 32`.

    Raises:
        ValueError: `panels` is too small or odd.
    """
    shapes: dict[str, Float64[np.ndarray, "n 2"]] = {}
    refused = {}
    for path in paths:
        try:
            shapes[path.stem] = read_nodes(path, panels)
        except ValueError as error:
            refused[path.name] = str(error)
    if refused:
        warnings.warn(
            f"skipped {len(refused)} of {len(paths)} airfoil files: {', '.join(refused)}; the first"
            f" is {next(iter(refused.values()))}",
            stacklevel=2,
        )
    return _distinct(shapes)


def read_nodes(path: Path, panels: int) -> Float64[np.ndarray, "n 2"]:
    """Nodes of one airfoil, in the frame and the order of `airfoil_shapes`.

    The chord is turned onto the x axis and scaled to 1. A blunt trailing edge is closed: each side
    is sheared towards its middle in proportion to x.

    Args:
        path: a coordinate file.
        panels: number of nodes, even, `>= 32`.

    Raises:
        ValueError: the file is damaged, or its shape has a wide trailing edge, crosses itself, has
            a sharp nose, or is given by too few points; names the file.
    """
    outline = _close(_normalise(_read_outline(path), path))
    _require_smooth(outline, path)
    return panel_nodes(outline, panels)


def _require_smooth(outline: Float64[np.ndarray, "m 2"], path: Path) -> None:
    """Refuses an outline that panels cannot follow, however many of them are asked for later."""
    nodes = panel_nodes(outline, _CHECKED_PANELS)
    deviation = distance_to(nodes, outline).max()
    if deviation > LARGEST_DEVIATION:
        raise ValueError(
            f"{path}: expected a smooth outline; got points that are {deviation:.3f} chords off"
            " the panels through them"
        )
    if signed_area(nodes) <= 0.0 or crosses_itself(nodes):
        raise ValueError(f"{path}: expected an outline with an inside; got one that crosses itself")
    turn = _largest_turn(nodes)
    if turn > LARGEST_TURN:
        raise ValueError(
            f"{path}: expected turns of at most {LARGEST_TURN:g} degrees between panels;"
            f" got {turn:.0f}"
        )


def _read_outline(path: Path) -> Float64[np.ndarray, "m 2"]:
    """The points of a file in Selig's order; the first and the last may differ."""
    rows = _read_rows(path)
    if rows[0].min() > 1.5:  # numbers of points, which no coordinate of an airfoil looks like
        upper, lower = (int(number) for number in rows[0])
        if [upper, lower] != rows[0].tolist() or upper + lower != len(rows) - 1:
            raise ValueError(
                f"{path}: expected {rows[0, 0]:g} + {rows[0, 1]:g} points as its second line says;"
                f" got {len(rows) - 1}"
            )
        rows = np.concatenate([rows[upper:0:-1], rows[upper + 1 :]])
    changed = np.concatenate([[True], (np.diff(rows, axis=0) != 0.0).any(axis=1)])
    rows = rows[changed]
    if len(rows) < _FEWEST_POINTS:
        raise ValueError(f"{path}: expected at least {_FEWEST_POINTS} points; got {len(rows)}")
    return rows


def _read_rows(path: Path) -> Float64[np.ndarray, "m 2"]:
    """The pairs of numbers between the lines of a title and those of remarks at the end."""
    rows, remarks = [], False
    lines = read_text(path, encoding="latin-1").splitlines()
    for number, line in enumerate(lines, start=1):
        words = line.replace(",", " ").split()
        numbers = [value for value in map(_number, words) if value is not None]
        if len(words) == len(numbers) == 2 and np.isfinite(numbers).all() and not remarks:
            rows.append(numbers)
        elif not words or number == 1:
            continue
        elif (rows and len(numbers) == len(words)) or (
            len(words) == 2 and _number(words[0]) is not None
        ):
            raise ValueError(f"{path}: expected x and y in line {number}; got {line.strip()!r}")
        else:
            remarks = bool(rows)
    if not rows:
        raise ValueError(f"{path}: expected lines of x and y; got none")
    return np.array(rows)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _normalise(outline: Float64[np.ndarray, "m 2"], path: Path) -> Float64[np.ndarray, "m 2"]:
    """Turned counter-clockwise, the leading edge at (0, 0), the trailing edge around (1, 0)."""
    trailing = 0.5 * (outline[0] + outline[-1])
    distance = np.hypot(*(outline - trailing).T)
    nose = int(distance.argmax())
    gap = np.hypot(*(outline[0] - outline[-1])) / distance[nose]
    if not gap <= LARGEST_GAP:
        raise ValueError(
            f"{path}: expected ends at most {LARGEST_GAP:g} chords apart; got {gap:.3f}"
        )
    chord = trailing - outline[nose]
    turned = np.stack([chord, [-chord[1], chord[0]]], -1) / (chord @ chord)
    outline = (outline - outline[nose]) @ turned
    return outline if signed_area(outline) > 0.0 else outline[::-1]


def _close(outline: Float64[np.ndarray, "m 2"]) -> Float64[np.ndarray, "m 2"]:
    """Moves both ends to (1, 0), and each side along in proportion to x."""
    nose = int(np.hypot(*outline.T).argmin())
    upper = (np.arange(len(outline)) <= nose)[:, None]
    missing = np.where(upper, [1.0, 0.0] - outline[0], [1.0, 0.0] - outline[-1])
    closed = outline + outline[:, :1].clip(0.0, 1.0) * missing
    closed[[0, -1]] = 1.0, 0.0
    return closed


def _largest_turn(nodes: Float64[np.ndarray, "n 2"]) -> float:
    """Largest angle in degrees between neighbouring panels, away from the trailing edge."""
    steps = np.diff(nodes, axis=0, append=nodes[:1])
    heading = np.unwrap(np.arctan2(steps[:, 1], steps[:, 0]))
    return float(np.degrees(np.abs(np.diff(heading)).max()))


def _distinct(
    shapes: dict[str, Float64[np.ndarray, "n 2"]],
) -> dict[str, Float64[np.ndarray, "n 2"]]:
    """Shapes without those that equal an earlier one."""
    if not shapes:
        return shapes
    flat = np.stack([nodes.reshape(-1) for nodes in shapes.values()])
    earlier = np.tril(cdist(flat, flat, "chebyshev") < SAME_SHAPE, -1).any(axis=1)
    return {name: shapes[name] for name, same in zip(shapes, earlier, strict=True) if not same}
