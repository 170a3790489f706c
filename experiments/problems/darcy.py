"""Darcy flow through a two-valued random medium: the fields, and a finite-volume solver for them.

The benchmark of FLARE (arXiv 2508.12594) and Transolver (arXiv 2402.02366), first posed for the
Fourier neural operator (arXiv 2010.08895, section 5.2 and appendix A.3): given the permeability
`a`, predict the pressure `u` of `-div(a grad u) = 1` on the unit square with `u = 0` on its
boundary. All quantities are dimensionless, and nothing here needs an accelerator.

`darcy_cache` makes data sets of it and keeps them on disk; `darcy_files` reads the published ones.
What both return, and how they lay out splits, is defined here.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Float64
from scipy.sparse import csc_array, diags_array
from scipy.sparse.linalg import splu

from experiments.problems.splits import require_integer

PERMEABILITY_LOW = 3.0
PERMEABILITY_HIGH = 12.0
FORCING = 1.0
COVARIANCE_SHIFT = 9.0
# Modes per axis. Fixed, so that a sample is one function whatever grid it is evaluated on.
COSINE_MODES = 256

MINIMUM_RESOLUTION = 4

_RESIDUAL_LIMIT = 1e-10


@dataclass(frozen=True)
class DarcyArrays:
    """Samples of one split on an `r x r` grid, axis 0 of the grid along x and axis 1 along y.

    Attributes:
        permeability: dimensionless.
        pressure: dimensionless.
        coordinates: (x, y) of each of the `r*r` points in units of the square's side, in the
            order of `permeability[i].reshape(-1)`.
    """

    permeability: Float32[np.ndarray, "n r r"]
    pressure: Float32[np.ndarray, "n r r"]
    coordinates: Float32[np.ndarray, "points 2"]


def cell_centres(resolution: int) -> Float32[np.ndarray, "points 2"]:
    """Centres of the cells of a uniform grid on the unit square, row-major in ("i", "j").

    Args:
        resolution: cells per side, `r >= 4`.

    Returns:
        (x, y) of the `r*r` centres in units of the square's side.

    Raises:
        ValueError: `resolution` is not an integer of at least 4.
    """
    require_integer("resolution", resolution, MINIMUM_RESOLUTION)
    return grid_points(_centre_axis(resolution))


def grid_points(axis: Float64[np.ndarray, "r"]) -> Float32[np.ndarray, "points 2"]:
    """The `r*r` points (x, y) whose x and y both run over `axis`, row-major in ("i", "j")."""
    return np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2).astype(np.float32)


def sample_permeability(resolution: int, seed: int, index: int) -> Float64[np.ndarray, "r r"]:
    """Permeability of one sample: a Gaussian random field, cut at zero into 3 and 12.

    The field has covariance `(-Laplacian + 9 I)^-2` with zero Neumann boundary
    (arXiv 2010.08895, appendix A.3), without its constant mode, as in the benchmark's published
    data. It is a series of 256 x 256 cosines whose coefficients depend on `(seed, index)` alone,
    evaluated exactly at the cell centres: grids of different resolution see the same function.

    Args:
        resolution: cells per side, `r >= 4`.
        seed: seed of the data set, `>= 0`.
        index: which sample of the data set, `>= 0`; no other sample is needed to make it.

    Returns:
        3 or 12 (dimensionless) at each of the points of `cell_centres`.

    Raises:
        ValueError: an argument is not an integer or is too small.
    """
    require_integer("resolution", resolution, MINIMUM_RESOLUTION)
    require_integer("seed", seed, 0)
    require_integer("index", index, 0)
    seeds = np.random.SeedSequence(int(seed), spawn_key=(int(index),))
    white_noise = np.random.default_rng(seeds).standard_normal((COSINE_MODES, COSINE_MODES))

    wavenumbers = np.pi * np.arange(COSINE_MODES)
    laplacian = wavenumbers[:, None] ** 2 + wavenumbers[None, :] ** 2
    coefficients = white_noise / (laplacian + COVARIANCE_SHIFT)
    coefficients[0, 0] = 0.0

    cosines = np.cos(np.outer(_centre_axis(resolution), wavenumbers))
    cosines[:, 1:] *= np.sqrt(2.0)  # orthonormal on the unit interval
    field = cosines @ coefficients @ cosines.T
    return np.where(field >= 0.0, PERMEABILITY_HIGH, PERMEABILITY_LOW)


def solve_darcy(permeability: Float[np.ndarray, "r r"]) -> Float64[np.ndarray, "r r"]:
    """Solve `-div(a grad u) = 1` on the unit square with `u = 0` on its boundary.

    Finite volumes on cell centres. The permeability of a face is the harmonic mean of its two
    cells, which keeps the flux continuous where `a` jumps; a boundary face lies half a cell from
    its centre. The sparse system is factorized directly, in float64.

    Args:
        permeability: `r >= 4`, positive and finite (dimensionless); converted to float64.

    Returns:
        Pressure at the points of `cell_centres` (dimensionless).

    Raises:
        ValueError: `permeability` is not square, too small, or not positive and finite.
        RuntimeError: the relative residual of the solution exceeds 1e-10.
    """
    permeability = np.asarray(permeability, dtype=np.float64)
    shape = permeability.shape
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < MINIMUM_RESOLUTION:
        raise ValueError(
            f"permeability: expected shape (r, r) with r >= {MINIMUM_RESOLUTION}, got {shape}"
        )
    if not (np.isfinite(permeability).all() and (permeability > 0.0).all()):
        raise ValueError(
            "permeability: expected positive finite values,"
            f" got values from {permeability.min()} to {permeability.max()}"
        )
    matrix = _flux_matrix(permeability)
    source = np.full(permeability.size, FORCING / permeability.size)
    # The matrix is symmetric positive definite: no pivoting, and an ordering for A + A^T, make
    # the factors smaller and the residual no larger.
    factors = splu(
        matrix,
        permc_spec="MMD_AT_PLUS_A",
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )
    pressure = factors.solve(source)
    residual = np.linalg.norm(source - matrix @ pressure) / np.linalg.norm(source)
    if not residual <= _RESIDUAL_LIMIT:  # also catches NaN
        raise RuntimeError(
            f"expected a relative residual of at most {_RESIDUAL_LIMIT:g}, got {residual:.3g}"
        )
    return pressure.reshape(shape)


def _centre_axis(resolution: int) -> Float64[np.ndarray, "r"]:
    return (np.arange(resolution) + 0.5) / resolution


def _flux_matrix(permeability: Float64[np.ndarray, "r r"]) -> csc_array:
    """Net outflow of each cell for a pressure `(r*r,)`; the spacing cancels in two dimensions."""
    resolution = len(permeability)
    x_faces = _harmonic_mean(permeability[1:], permeability[:-1])
    y_faces = _harmonic_mean(permeability[:, 1:], permeability[:, :-1])

    outflow = np.zeros_like(permeability)
    outflow[1:] += x_faces
    outflow[:-1] += x_faces
    outflow[:, 1:] += y_faces
    outflow[:, :-1] += y_faces
    for side in ((0, ...), (-1, ...), (..., 0), (..., -1)):
        outflow[side] += 2.0 * permeability[side]  # the boundary is half a spacing away

    # In row-major order the last cell of a row precedes the first of the next, but shares no face.
    y_couplings = np.pad(y_faces, ((0, 0), (0, 1))).reshape(-1)[:-1]
    x_couplings = x_faces.reshape(-1)
    return diags_array(
        [outflow.reshape(-1), -y_couplings, -y_couplings, -x_couplings, -x_couplings],
        offsets=[0, 1, -1, resolution, -resolution],
        format="csc",
    )


def _harmonic_mean(
    left: Float64[np.ndarray, "m n"], right: Float64[np.ndarray, "m n"]
) -> Float64[np.ndarray, "m n"]:
    return 2.0 / (1.0 / left + 1.0 / right)
