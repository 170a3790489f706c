"""Airfoil shapes: the NACA family, panels, and polygons."""

import numpy as np
import pytest

from experiments.problems.airfoil_shapes import (
    CAMBER_POSITION_RANGE,
    CAMBER_RANGE,
    THICKNESS_RANGE,
    NacaParameters,
    contains,
    crosses_itself,
    distance_to,
    naca_outline,
    panel_nodes,
    sample_naca,
    signed_area,
)

SQUARE = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])


def test_symmetric_airfoil_has_the_tabulated_thickness():
    # NACA 0012: half thickness in chords (Abbott and von Doenhoff, appendix I), where the trailing
    # edge is open; the last coefficient of the thickness closes it.
    outline = naca_outline(NacaParameters(0.12, 0.0, 0.4))
    upper = outline[:401][::-1]
    x = np.array([0.05, 0.10, 0.30, 0.60, 0.80])
    half = np.interp(x, upper[:, 0], upper[:, 1]) + 5.0 * 0.12 * (0.1036 - 0.1015) * x**4
    np.testing.assert_allclose(half, [0.03555, 0.04683, 0.06002, 0.04563, 0.02623], atol=1e-5)
    np.testing.assert_allclose(outline[:401, 1], -outline[400:, 1][::-1], atol=1e-15)


def test_camber_line_is_highest_at_its_position():
    outline = naca_outline(NacaParameters(0.10, 0.05, 0.35))
    camber = 0.5 * (outline[:401][::-1] + outline[400:])
    highest = camber[:, 1].argmax()
    np.testing.assert_allclose(camber[highest], [0.35, 0.05], atol=5e-3)
    assert camber[highest, 1] == pytest.approx(0.05, abs=1e-5)
    # Thickness is laid off at right angles to the camber line.
    across = outline[:401][::-1] - outline[400:]
    slope = np.gradient(camber[:, 1], camber[:, 0])[1:-1]
    tilt = -across[1:-1, 0] / across[1:-1, 1]
    np.testing.assert_allclose(tilt[5:-5], slope[5:-5], atol=5e-3)


@pytest.mark.parametrize("index", range(5))
def test_outline_is_closed_and_counter_clockwise(index):
    outline = naca_outline(sample_naca(0, index))
    assert outline.shape == (801, 2)
    np.testing.assert_array_equal(outline[[0, -1]], [[1.0, 0.0], [1.0, 0.0]])
    nodes = panel_nodes(outline, 64)
    assert signed_area(nodes) > 0.0
    assert nodes[1, 1] > nodes[-1, 1]
    assert not crosses_itself(nodes)


def test_parameters_fill_their_ranges_and_depend_on_seed_and_index_alone():
    drawn = np.array([sample_naca(3, index) for index in range(300)])
    ranges = np.array([THICKNESS_RANGE, CAMBER_RANGE, CAMBER_POSITION_RANGE])
    assert (drawn >= ranges[:, 0]).all()
    assert (drawn <= ranges[:, 1]).all()
    np.testing.assert_allclose(drawn.min(0), ranges[:, 0], atol=0.02 * np.ptp(ranges, axis=1).max())
    np.testing.assert_allclose(drawn.max(0), ranges[:, 1], atol=0.02 * np.ptp(ranges, axis=1).max())
    assert sample_naca(3, 299) == tuple(drawn[299])
    assert sample_naca(4, 299) != tuple(drawn[299])


@pytest.mark.parametrize("panels", [32, 100, 256])
def test_nodes_lie_on_the_outline_and_gather_at_both_edges(panels):
    outline = naca_outline(NacaParameters(0.12, 0.04, 0.4))
    nodes = panel_nodes(outline, panels)
    assert nodes.shape == (panels, 2)
    np.testing.assert_array_equal(nodes[0], [1.0, 0.0])
    # The dense outline's own chords are 1e-5 off its curve.
    assert distance_to(outline[:-1], nodes).max() < 2e-5
    nose = panels // 2
    assert np.hypot(*(nodes - [1.0, 0.0]).T).argmax() == nose
    assert np.hypot(*nodes[nose]) < 0.01
    lengths = np.hypot(*(np.roll(nodes, -1, axis=0) - nodes).T)
    for ends in (lengths[0], lengths[nose - 1], lengths[nose], lengths[-1]):
        assert ends < 4.0 / panels * lengths.max()
    ratios = lengths[1:nose] / lengths[: nose - 1]
    assert ratios.max() < 3.2


def test_symmetric_airfoil_has_mirrored_nodes():
    nodes = panel_nodes(naca_outline(NacaParameters(0.12, 0.0, 0.4)), 64)
    np.testing.assert_allclose(nodes[1:], nodes[:0:-1] * [1.0, -1.0], atol=1e-9)


@pytest.mark.parametrize(
    ("panels", "message"),
    [
        (30, "panels: expected an integer of at least 32, got 30"),
        (64.0, "panels: expected an integer of at least 32, got 64.0"),
        (65, "panels: expected an even number; got 65"),
    ],
)
def test_bad_number_of_panels_is_named(panels, message):
    with pytest.raises(ValueError, match=message):
        panel_nodes(naca_outline(NacaParameters(0.12, 0.0, 0.4)), panels)


def test_coinciding_points_are_named():
    outline = naca_outline(NacaParameters(0.12, 0.0, 0.4))
    with pytest.raises(ValueError, match=r"outline: expected distinct .* got 2 pairs"):
        panel_nodes(np.insert(outline, [5, 9], outline[[5, 9]], axis=0), 64)


@pytest.mark.parametrize(
    "parameters",
    [(0.0, 0.0, 0.4), (1.0, 0.0, 0.4), (0.1, -0.1, 0.4), (0.1, 0.0, 1.0), (np.nan, 0, 0.4)],
)
def test_bad_parameters_are_named(parameters):
    with pytest.raises(ValueError, match="NACA parameters: expected thickness and camber") as error:
        naca_outline(NacaParameters(*parameters))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("seed", "index", "name"), [(-1, 0, "seed"), (0, -1, "index")])
def test_bad_sample_is_named(seed, index, name):
    with pytest.raises(ValueError, match=f"{name}: expected an integer of at least 0, got -1"):
        sample_naca(seed, index)


def test_area_has_the_sign_of_the_direction():
    assert signed_area(SQUARE) == 1.0
    assert signed_area(SQUARE[::-1]) == -1.0


@pytest.mark.parametrize("angle", [0.0, 0.1, 0.7])
def test_edges_of_a_straight_side_do_not_cross(angle):
    sides = [
        np.linspace(start, end, 20)[:-1]
        for start, end in zip(SQUARE, np.roll(SQUARE, -1, 0), strict=True)
    ]
    turn = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
    assert not crosses_itself(np.concatenate(sides) @ turn)


def test_crossing_edges_are_found():
    assert not crosses_itself(SQUARE)
    assert crosses_itself(SQUARE[[0, 2, 1, 3]])
    # A notch that reaches through the far side, and one that stops short of it.
    assert crosses_itself(np.insert(SQUARE, 2, [0.5, -0.1], axis=0))
    assert not crosses_itself(np.insert(SQUARE, 2, [0.5, 0.1], axis=0))


@pytest.mark.parametrize("direction", [1, -1])
def test_inside_and_distance_of_a_square(direction):
    points = np.array([[0.5, 0.5], [0.9, 0.2], [1.5, 0.5], [-0.5, 0.5], [2.0, 2.0], [0.5, -3.0]])
    square = SQUARE[::direction]
    assert contains(square, points).tolist() == [True, True, False, False, False, False]
    np.testing.assert_allclose(
        distance_to(square, points), [0.5, 0.1, 0.5, 0.5, np.sqrt(2.0), 3.0], rtol=1e-12
    )


def test_ray_through_a_node_counts_once():
    diamond = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    points = np.array([[0.0, 0.0], [-2.0, 0.0], [-0.5, 1.0], [-0.5, -1.0], [2.0, 0.0]])
    assert contains(diamond, points).tolist() == [True, False, False, False, False]
