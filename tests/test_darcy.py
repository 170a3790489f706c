"""Darcy flow: the solver and the random medium."""

from itertools import pairwise

import numpy as np
import pytest

from experiments.problems import darcy


def relative_error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def layered_solution(resolution, left, right, terms=60):
    """Pressure for permeability `left` where x < 1/2 and `right` elsewhere, a sine series in y.

    Each mode solves `a (X'' - w^2 X) = -f` in both halves, with X and a X' continuous between.
    """
    x = y = (np.arange(resolution) + 0.5) / resolution
    total = np.zeros((resolution, resolution))
    for k in range(1, 2 * terms, 2):
        w, f = np.pi * k, 4.0 / (np.pi * k)
        decay = np.exp(-w / 2)
        # X = f/(a w^2) + A exp(-w x) + B exp(-w (1/2 - x)) on the left, likewise on the right
        # with x - 1/2 and 1 - x: exponents that stay negative.
        conditions = np.array(
            [
                [1.0, decay, 0.0, 0.0],
                [0.0, 0.0, decay, 1.0],
                [decay, 1.0, -1.0, -decay],
                [-left * decay, left, right, -right * decay],
            ]
        )
        particular = f / w**2 / np.array([left, right])
        constants = np.linalg.solve(
            conditions, [-particular[0], -particular[1], particular[1] - particular[0], 0.0]
        )
        in_left = x < 0.5
        x_left, x_right = x[in_left], x[~in_left]
        profile = np.concatenate(
            [
                particular[0]
                + constants[0] * np.exp(-w * x_left)
                + constants[1] * np.exp(-w * (0.5 - x_left)),
                particular[1]
                + constants[2] * np.exp(-w * (x_right - 0.5))
                + constants[3] * np.exp(-w * (1.0 - x_right)),
            ]
        )
        total += np.outer(profile, np.sin(w * y))
    return total


def layered_permeability(resolution, left, right):
    return np.repeat([left, right], resolution // 2)[:, None] * np.ones(resolution)


@pytest.mark.parametrize(("left", "right"), [(1.0, 1.0), (12.0, 3.0)])
def test_error_falls_with_the_square_of_the_spacing(left, right):
    errors = [
        relative_error(
            darcy.solve_darcy(layered_permeability(r, left, right)),
            layered_solution(r, left, right),
        )
        for r in (16, 32, 64)
    ]
    assert errors[-1] < 2e-3
    for coarse, fine in pairwise(errors):
        # Second order asymptotically; arithmetic face means would give a ratio near 2.
        assert 3.6 < coarse / fine < 4.4


def test_series_solution_has_the_known_peak():
    # -Laplace u = 1 on the unit square: u(1/2, 1/2) = 0.0736713...; guards the reference itself.
    assert layered_solution(101, 1.0, 1.0)[50, 50] == pytest.approx(0.0736713, abs=1e-6)


def test_layers_act_along_either_axis():
    permeability = layered_permeability(12, 12.0, 3.0)
    across = darcy.solve_darcy(permeability.T)
    np.testing.assert_allclose(across, darcy.solve_darcy(permeability).T, rtol=1e-12)


def test_every_cell_balances_its_flux():
    resolution = 6
    permeability = np.random.default_rng(0).uniform(1.0, 20.0, (resolution, resolution))
    pressure = darcy.solve_darcy(permeability)
    spacing = 1.0 / resolution
    for i in range(resolution):
        for j in range(resolution):
            outflow = 0.0
            for k, m in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
                if 0 <= k < resolution and 0 <= m < resolution:
                    # Two half cells in series.
                    resistance = spacing / 2 / permeability[i, j] + spacing / 2 / permeability[k, m]
                    outflow += spacing * (pressure[i, j] - pressure[k, m]) / resistance
                else:
                    outflow += spacing * pressure[i, j] * permeability[i, j] / (spacing / 2)
            assert outflow == pytest.approx(spacing**2, rel=1e-11)


def test_flux_through_the_boundary_equals_the_forcing():
    permeability = darcy.sample_permeability(24, seed=1, index=0)
    flux = 2.0 * permeability * darcy.solve_darcy(permeability)
    boundary = flux[0].sum() + flux[-1].sum() + flux[:, 0].sum() + flux[:, -1].sum()
    assert boundary == pytest.approx(1.0, rel=1e-11)


def test_pressure_scales_inversely_with_permeability():
    permeability = darcy.sample_permeability(16, seed=1, index=0)
    np.testing.assert_allclose(
        darcy.solve_darcy(1e3 * permeability), darcy.solve_darcy(permeability) / 1e3, rtol=1e-12
    )


@pytest.mark.parametrize(
    "permeability",
    [np.ones(16), np.ones((4, 5)), np.ones((3, 3)), np.zeros((4, 4)), np.full((4, 4), np.nan)],
    ids=["flat", "oblong", "small", "zero", "nan"],
)
def test_bad_permeability_is_named(permeability):
    with pytest.raises(ValueError, match="permeability: expected") as error:
        darcy.solve_darcy(permeability)
    message = str(error.value)
    assert "got" in message
    assert "\n" not in message


def test_permeability_takes_two_values():
    assert set(np.unique(darcy.sample_permeability(32, 0, 0))) == {3.0, 12.0}


@pytest.mark.parametrize("index", range(4))
def test_sample_is_one_function_on_every_grid(index):
    # The centres of every third cell of the fine grid are those of the coarse grid.
    coarse = darcy.sample_permeability(21, seed=7, index=index)
    fine = darcy.sample_permeability(63, seed=7, index=index)
    np.testing.assert_array_equal(coarse, fine[1::3, 1::3])


def test_pressure_converges_to_one_limit_as_the_grid_is_refined():
    coarse = darcy.solve_darcy(darcy.sample_permeability(43, seed=7, index=1))
    fine = darcy.solve_darcy(darcy.sample_permeability(129, seed=7, index=1))
    assert relative_error(coarse, fine[1::3, 1::3]) < 0.03


def test_mean_permeability_is_halfway_between_the_two_values():
    means = [darcy.sample_permeability(16, 0, index).mean() for index in range(100)]
    # The field is symmetric about zero, so the expected mean is 7.5; four standard errors.
    assert abs(np.mean(means) - 7.5) < 4 * np.std(means) / np.sqrt(len(means))


def test_samples_differ_by_seed_and_index_and_are_reproducible():
    first = darcy.sample_permeability(16, 3, 4)
    np.testing.assert_array_equal(first, darcy.sample_permeability(16, 3, 4))
    assert (first != darcy.sample_permeability(16, 4, 4)).any()
    assert (first != darcy.sample_permeability(16, 3, 5)).any()
    assert (first != darcy.sample_permeability(16, 4, 3)).any()


def test_cell_centres_follow_the_arrays():
    np.testing.assert_allclose(
        darcy.cell_centres(4)[:5],
        [[0.125, 0.125], [0.125, 0.375], [0.125, 0.625], [0.125, 0.875], [0.375, 0.125]],
    )
    assert darcy.cell_centres(4).shape == (16, 2)
    assert darcy.cell_centres(4).dtype == np.float32


def test_bad_sample_index_is_named():
    with pytest.raises(ValueError, match="index: expected an integer of at least 0, got -1"):
        darcy.sample_permeability(8, 0, -1)
