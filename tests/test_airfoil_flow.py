"""The panel method against Joukowski's exact flow."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.problems import airfoil_flow
from experiments.problems.airfoil_flow import Panels, lift_coefficient, solve_airfoil
from experiments.problems.airfoil_shapes import (
    NacaParameters,
    contains,
    distance_to,
    naca_outline,
    panel_nodes,
)

# Left shift and height of the circle's centre; airfoils 6 to 23 % thick, the last two cambered by
# 2.5 and 7.5 %.
CENTRES = [-0.05 + 0.0j, -0.1 + 0.0j, -0.1 + 0.05j, -0.2 + 0.15j]
ANGLES = [-5.0, 0.0, 5.0, 15.0]
PANELS = 256


def joukowski(centre, degrees, circle_points):
    """Exact flow at images of points on or outside a circle through 1 (Katz and Plotkin, 6.5-6.6).

    `z = zeta + 1 / zeta`, moved and scaled to a chord of 1 with the trailing edge at (1, 0).
    """
    radius, camber_angle = abs(1.0 - centre), np.angle(1.0 - centre)
    rim = centre + radius * np.exp(1j * np.linspace(0.0, 2.0 * np.pi, 20001))
    chord = 2.0 - (rim + 1.0 / rim).real.min()
    angle = np.radians(degrees)
    offset = circle_points - centre
    # The stagnation point of the circle lies where the trailing edge comes from (Kutta).
    circulation = 4.0 * np.pi * radius * np.sin(angle - camber_angle)
    mirror = radius**2 * np.exp(1j * angle)
    velocity = np.exp(-1j * angle) - mirror / offset**2 + 1j * circulation / (2 * np.pi * offset)
    slope = 1.0 - 1.0 / circle_points**2
    # At the cusp both vanish; the ratio of their derivatives remains.
    cusp = mirror / offset**3 - 1j * circulation / (4.0 * np.pi * offset**2)
    at_cusp = abs(slope) < 1e-12
    velocity = np.where(at_cusp, cusp, velocity / np.where(at_cusp, 1.0, slope))
    position = (circle_points + 1.0 / circle_points - 2.0) / chord + 1.0
    return SimpleNamespace(
        position=np.stack([position.real, position.imag], -1),
        velocity=np.stack([velocity.real, -velocity.imag], -1),
        pressure=1.0 - abs(velocity) ** 2,
        lift=2.0 * circulation / chord,
    )


def circle(centre, angles, stretch=1.0):
    radius, camber_angle = abs(1.0 - centre), np.angle(1.0 - centre)
    points = centre + stretch * radius * np.exp(1j * (camber_angle + angles))
    return np.where((angles % (2 * np.pi) == 0.0) & (stretch == 1.0), 1.0, points)


def joukowski_nodes(centre, panels=PANELS):
    """Nodes exactly on an airfoil, placed as `panel_nodes` does, and the circle's points there."""
    dense = np.linspace(0.0, 2.0 * np.pi, 4001)
    outline = joukowski(centre, 0.0, circle(centre, dense)).position
    length = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(outline, axis=0).T))])
    nose = length[np.hypot(*(outline - outline[0]).T).argmax()]
    fractions = 0.5 * (1.0 - np.cos(np.linspace(0.0, np.pi, panels // 2 + 1)))[:-1]
    at = np.concatenate([nose * fractions, nose + (length[-1] - nose) * fractions])
    points = circle(centre, np.interp(at, length, dense))
    return joukowski(centre, 0.0, points).position, points


@pytest.fixture(scope="module", params=CENTRES, ids=str)
def airfoil(request):
    nodes, points = joukowski_nodes(request.param)
    return SimpleNamespace(
        centre=request.param, nodes=nodes, points=points, solver=solve_airfoil(nodes)
    )


@pytest.mark.parametrize("degrees", ANGLES)
def test_surface_pressure_is_joukowskis(airfoil, degrees):
    exact = joukowski(airfoil.centre, degrees, airfoil.points).pressure
    flow = airfoil.solver.at(np.radians(degrees))
    # The trailing edge, a cusp, is node 0 from above and the last from below.
    error = flow.node_pressure - np.append(exact, exact[0])
    assert np.linalg.norm(error) < 0.01 * np.linalg.norm(exact)
    # The largest of all is at the cusp of the most cambered airfoil; elsewhere 0.9 %.
    assert abs(error).max() < 0.012 * np.ptp(exact)
    assert abs(error[1:-1]).max() < 0.01 * np.ptp(exact)


@pytest.mark.parametrize("degrees", ANGLES)
def test_lift_is_joukowskis(airfoil, degrees):
    exact = joukowski(airfoil.centre, degrees, airfoil.points).lift
    flow = airfoil.solver.at(np.radians(degrees))
    # Without lift, the error is compared with that of 1, a typical lift.
    tolerance = 5e-3 * abs(exact) + 1e-6
    assert abs(flow.lift - exact) < tolerance
    assert abs(flow.circulation_lift - exact) < tolerance


@pytest.mark.parametrize("degrees", ANGLES)
def test_velocity_off_the_surface_is_joukowskis(airfoil, degrees):
    angles = np.linspace(0.0, 2.0 * np.pi, 301)[:-1] + 0.01
    flow = airfoil.solver.at(np.radians(degrees))
    # In chords: the nearest points of a sample, the length of a panel, far away.
    for low, high, tolerance in ((1e-3, 4e-3, 5e-3), (4e-3, 3e-2, 1e-3), (3e-2, 1.0, 2e-4)):
        stretch = 1.0 + np.geomspace(1e-3, 1.0, 40)[:, None]
        points = circle(airfoil.centre, angles, stretch).reshape(-1)
        exact = joukowski(airfoil.centre, degrees, points)
        distance = distance_to(airfoil.nodes, exact.position)
        near = (distance > low) & (distance < high)
        assert near.sum() > 300
        error = flow.velocity(exact.position[near]) - exact.velocity[near]
        fastest = np.hypot(*joukowski(airfoil.centre, degrees, airfoil.points).velocity.T).max()
        assert np.hypot(*error.T).max() < tolerance * fastest


def test_pressure_error_falls_with_the_square_of_the_panels():
    errors = []
    for panels in (64, 128, 256):
        nodes, points = joukowski_nodes(-0.1 + 0.05j, panels)
        exact = joukowski(-0.1 + 0.05j, 5.0, points).pressure
        error = solve_airfoil(nodes).at(np.radians(5.0)).node_pressure[:-1] - exact
        # Next to the cusp the order is lower.
        errors.append(np.sqrt((error[nodes[:, 0] < 0.9] ** 2).mean()))
    for coarse, fine in pairwise(errors):
        assert 3.6 < coarse / fine < 4.4


def naca_solver(thickness=0.12, camber=0.0, position=0.4, panels=PANELS):
    return solve_airfoil(
        panel_nodes(naca_outline(NacaParameters(thickness, camber, position)), panels)
    )


def test_symmetric_airfoil_has_no_lift_at_zero_angle_and_a_mirrored_flow():
    solver = naca_solver()
    flow = solver.at(0.0)
    assert abs(flow.lift) < 1e-9
    np.testing.assert_allclose(flow.surface_pressure, flow.surface_pressure[::-1], atol=1e-8)
    up, down = solver.at(0.1), solver.at(-0.1)
    assert up.lift == pytest.approx(-down.lift, rel=1e-8)
    np.testing.assert_allclose(up.surface_pressure, down.surface_pressure[::-1], atol=1e-7)


def test_camber_and_angle_lift_upwards():
    assert naca_solver(camber=0.04).at(0.0).lift > 0.4
    # Thin-airfoil theory: 2 pi per radian; thickness adds some per cent.
    slope = naca_solver(thickness=0.06).at(np.radians(1.0)).lift / np.radians(1.0)
    assert 2.0 * np.pi < slope < 1.1 * 2.0 * np.pi


def test_flow_leaves_the_trailing_edge_as_fast_above_as_below():
    flow = naca_solver(camber=0.04).at(0.1)
    assert flow.vorticity[0] == pytest.approx(-flow.vorticity[-1], abs=1e-9)
    # Fluid goes downstream on both sides: a wrong sense of circulation would turn it around.
    assert (flow.surface_velocity[[0, -1], 0] > 0.3).all()


def test_surface_velocity_is_the_limit_of_the_field():
    flow = naca_solver(camber=0.04).at(0.1)
    panels = flow.panels
    limit = flow.velocity(panels.midpoints + 1e-9 * panels.normals)
    inside = flow.velocity(panels.midpoints - 1e-9 * panels.normals)
    fastest = np.hypot(*flow.surface_velocity.T).max()
    assert abs(limit - flow.surface_velocity).max() < 0.01 * fastest
    assert abs(inside).max() < 0.01 * fastest


def test_fluid_inside_is_at_rest():
    flow = naca_solver(camber=0.04).at(0.1)
    points = np.random.default_rng(0).uniform([0.0, -0.1], [1.0, 0.1], (2000, 2))
    inside = points[contains(flow.panels.nodes, points)]
    deep = inside[distance_to(flow.panels.nodes, inside) > 0.01]
    assert len(deep) > 100
    assert abs(flow.velocity(deep)).max() < 2e-3


def test_field_has_neither_source_nor_rotation():
    flow = naca_solver(camber=0.04).at(0.1)
    angles = np.linspace(0.0, 2.0 * np.pi, 2001)[:-1]
    ring = np.stack([np.cos(angles), np.sin(angles)], -1)
    velocity = flow.velocity([0.5, 0.0] + 0.8 * ring)
    step = 0.8 * 2.0 * np.pi / len(angles)
    assert abs((velocity * ring).sum()) * step < 1e-12
    circulation = (velocity @ [[0.0, -1.0], [1.0, 0.0]] * ring).sum() * step
    assert abs(circulation) == pytest.approx(0.5 * flow.circulation_lift, rel=1e-9)


def test_velocity_does_not_depend_on_its_company(monkeypatch):
    flow = naca_solver(panels=64).at(0.1)
    points = np.random.default_rng(0).uniform([-1.0, 0.2], [2.0, 1.0], (100, 2))
    whole = flow.velocity(points)
    monkeypatch.setattr(airfoil_flow, "_PAIRS", 7 * 64)
    np.testing.assert_allclose(flow.velocity(points), whole, rtol=1e-13)


def test_lift_of_a_known_pressure():
    # A pressure of -y pulls a square of area 1 up by its area.
    corners = np.array([[1.0, 0.0], [1.0, 1.0], [0.5, 1.0], [0.0, 1.0], [0.0, 0.0]])
    panels = Panels.between(corners)
    pressure = -panels.midpoints[:, 1]
    assert lift_coefficient(pressure, panels.normals, panels.lengths, 0.0) == pytest.approx(1.0)
    tilted = lift_coefficient(pressure, panels.normals, panels.lengths, np.radians(60.0))
    assert tilted == pytest.approx(0.5)


def test_unsolved_flow_is_named(monkeypatch):
    monkeypatch.setattr(airfoil_flow, "RESIDUAL_LIMIT", -1.0)
    with pytest.raises(RuntimeError, match="expected a relative residual of at most -1; got"):
        naca_solver(panels=64)


def test_sides_that_coincide_are_named():
    # Two nodes at one place, of the upper and the lower side, give one equation twice.
    spike = np.array([[1.0, 0.0], [0.75, 0.0], [0.5, 0.25], [0.0, 0.0], [0.5, -0.25], [0.75, 0.0]])
    with pytest.raises(RuntimeError, match="expected sides that are apart; got a system with"):
        solve_airfoil(spike)


NODES = panel_nodes(naca_outline(NacaParameters(0.12, 0.0, 0.4)), 32)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (NODES[:, :1], r"nodes: expected shape \(n, 2\) with n >= 5; got \(32, 1\)"),
        (NODES[:4], r"nodes: expected shape \(n, 2\) with n >= 5; got \(4, 2\)"),
        (np.where(NODES == 1.0, np.nan, NODES), "nodes: expected finite coordinates; got NaN"),
        (NODES[[0, 1, 2, 2, 3, 4]], "nodes: expected distinct neighbours; got two alike at node 2"),
        (NODES[::-1], "nodes: expected counter-clockwise ones; got clockwise ones"),
    ],
)
def test_bad_nodes_are_named(nodes, message):
    with pytest.raises(ValueError, match=message) as error:
        solve_airfoil(nodes)
    assert "\n" not in str(error.value)
