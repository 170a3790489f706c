"""Airfoil samples: where their points lie, what they carry, and the lift of a pressure."""

import numpy as np
import pytest

from experiments.problems.airfoil import (
    FARTHEST_POINT,
    NEAREST_POINT,
    concatenate,
    draw_points,
    make_sample,
    surface_lift,
)
from experiments.problems.airfoil_flow import solve_airfoil
from experiments.problems.airfoil_shapes import (
    NacaParameters,
    contains,
    distance_to,
    naca_outline,
    panel_nodes,
)

POINTS, SURFACE, DEGREES = 1500, 64, 7.0


def solved(thickness=0.12, camber=0.05, panels=SURFACE):
    outline = naca_outline(NacaParameters(thickness, camber, 0.4))
    return solve_airfoil(panel_nodes(outline, panels))


@pytest.fixture(scope="module")
def solver():
    return solved()


@pytest.fixture(scope="module")
def flow(solver):
    return solver.at(np.radians(DEGREES))


@pytest.fixture(scope="module")
def sample(solver):
    return make_sample(solver, DEGREES, POINTS, np.random.default_rng(0))


def test_arrays_have_their_shapes(sample):
    assert sample.positions.shape == sample.fields.shape == (POINTS, 3)
    assert sample.geometry.shape == (SURFACE, 6)
    assert sample.panel_lengths.shape == (SURFACE,)
    assert sample.global_embedding.shape == (1, 2)
    for name in ("positions", "fields", "geometry", "panel_lengths", "global_embedding"):
        assert getattr(sample, name).dtype == np.float32
        assert np.isfinite(getattr(sample, name)).all()
    np.testing.assert_allclose(
        sample.global_embedding[0], [np.cos(np.radians(7.0)), np.sin(np.radians(7.0))], rtol=1e-6
    )
    assert sample.angle_of_attack == 7.0


def test_sample_lies_in_one_plane(sample):
    assert (sample.positions[:, 2] == 0.0).all()
    assert (sample.geometry[:, [2, 5]] == 0.0).all()


def test_first_points_are_the_surface_in_the_order_of_the_panels(sample, flow):
    panels = flow.panels
    np.testing.assert_array_equal(sample.positions[:SURFACE], sample.geometry[:, :3])
    np.testing.assert_allclose(sample.geometry[:, :2], panels.midpoints, atol=1e-7)
    np.testing.assert_allclose(sample.panel_lengths, panels.lengths, rtol=1e-6)
    np.testing.assert_allclose(sample.fields[:SURFACE, :2], flow.surface_velocity, rtol=1e-5)
    np.testing.assert_allclose(sample.fields[:SURFACE, 2], flow.surface_pressure, atol=1e-5)


def test_normals_point_outwards(sample, flow):
    normals = sample.geometry[:, 3:5].astype(float)
    np.testing.assert_allclose(np.hypot(*normals.T), 1.0, rtol=1e-6)
    nodes = flow.panels.nodes
    midpoints = flow.panels.midpoints
    assert not contains(nodes, midpoints + 1e-5 * normals).any()
    assert contains(nodes, midpoints - 1e-5 * normals).all()


def test_other_points_lie_outside_within_reach_and_gather_at_the_surface(sample, flow):
    nodes = flow.panels.nodes
    outside = sample.positions[SURFACE:, :2].astype(float)
    assert not contains(nodes, outside).any()
    distance = distance_to(nodes, outside)
    # Rounded to float32.
    assert distance.min() > NEAREST_POINT - 1e-7
    assert distance.max() < FARTHEST_POINT
    decades = np.histogram(distance, [1e-3, 1e-2, 1e-1, 1.0])[0] / len(distance)
    assert (decades > 0.25).all()
    # All around: ahead, behind, above, below.
    x, y = outside.T
    for side in (x < -0.3, x > 1.3, y > 0.5, y < -0.5):
        assert side.mean() > 0.01


def test_fields_are_the_flow_at_the_points(sample, flow):
    fields = sample.fields[SURFACE:].astype(float)
    velocity = flow.velocity(sample.positions[SURFACE:, :2].astype(float))
    np.testing.assert_allclose(fields[:, :2], velocity, atol=2e-4)
    np.testing.assert_allclose(fields[:, 2], 1.0 - (fields[:, :2] ** 2).sum(axis=1), atol=1e-5)


def test_stored_truth_has_the_lift_of_the_flow(sample, flow):
    stored = surface_lift(
        sample.fields[:SURFACE, 2], sample.geometry, sample.panel_lengths, sample.angle_of_attack
    )
    assert stored == sample.lift_coefficient
    assert stored == pytest.approx(flow.lift, rel=1e-5)
    assert stored == pytest.approx(flow.circulation_lift, rel=5e-3)


def test_lift_follows_a_predicted_pressure(sample):
    pressure = sample.fields[:SURFACE, 2]
    args = (sample.geometry, sample.panel_lengths, sample.angle_of_attack)
    # The same pressure everywhere pushes nowhere.
    assert abs(surface_lift(np.full_like(pressure, 3.0), *args)) < 1e-6
    assert surface_lift(2.0 * pressure, *args) == pytest.approx(2.0 * sample.lift_coefficient)


@pytest.mark.parametrize("array", [0, 1, 2])
def test_surface_of_another_length_is_named(sample, array):
    arrays = [sample.fields[:SURFACE, 2], sample.geometry, sample.panel_lengths]
    arrays[array] = arrays[array][:-1]
    with pytest.raises(ValueError, match=r"surface: expected shapes \(M,\), \(M, 6\) and \(M,\)"):
        surface_lift(*arrays, 0.0)


def test_too_few_points_are_named(solver):
    with pytest.raises(
        ValueError, match="points: expected more than the 64 on the surface; got 64"
    ):
        make_sample(solver, 0.0, 64, np.random.default_rng(0))


def test_many_points_are_drawn_in_several_rounds(solver):
    points = draw_points(solver.panels, 9000, np.random.default_rng(0))
    assert len(points) == len(np.unique(points, axis=0)) == 9000


def test_samples_of_different_length_lie_one_after_another(solver):
    generator = np.random.default_rng(0)
    samples = [make_sample(solver, angle, 100 + 10 * angle, generator) for angle in (0, 1, 2)]
    arrays = concatenate(samples, ["a", "b", "b"])
    assert len(arrays) == 3
    assert arrays.offsets.tolist() == [0, 100, 210, 330]
    assert arrays.shape.tolist() == ["a", "b", "b"]
    for part, first in ((arrays, 0), (arrays.take(slice(1, 3)), 1)):
        assert part.offsets[0] == 0
        assert len(part.positions) == len(part.fields) == part.offsets[-1]
        for index in range(len(part)):
            sample = samples[first + index]
            np.testing.assert_array_equal(part.positions[part.rows(index)], sample.positions)
            np.testing.assert_array_equal(part.fields[part.rows(index)], sample.fields)
            np.testing.assert_array_equal(
                part.positions[part.surface_rows(index)], part.geometry[index, :, :3]
            )
            assert part.angle_of_attack[index] == sample.angle_of_attack
            assert part.lift_coefficient[index] == surface_lift(
                part.fields[part.surface_rows(index), 2],
                part.geometry[index],
                part.panel_lengths[index],
                part.angle_of_attack[index],
            )
