"""Distances are those of bodies whose distance is known; frames and coefficients go back."""

import numpy as np
import pytest

pyvista = pytest.importorskip("pyvista")

from experiments.meshes.features import Frame, FreeStream, signed_distance  # noqa: E402


def triangles(mesh):
    mesh = mesh.triangulate()
    return np.asarray(mesh.points), mesh.regular_faces


def test_distance_from_a_sphere():
    coordinates, faces = triangles(pyvista.Sphere(radius=1, theta_resolution=90, phi_resolution=90))
    points = np.random.default_rng(0).uniform(-2, 2, (500, 3))
    distance, direction = signed_distance(coordinates, faces, points)
    radius = np.linalg.norm(points, axis=1)
    np.testing.assert_allclose(distance, radius - 1, atol=2e-3)
    far = np.abs(radius - 1) > 0.1
    away = points / radius[:, None] * np.sign(1 - radius)[:, None]
    assert (direction * away).sum(1)[far].min() > 0.99


def test_distance_from_a_cube_is_exact_at_faces_edges_and_corners():
    coordinates, faces = triangles(pyvista.Cube().clean())
    points = np.random.default_rng(0).uniform(-1.5, 1.5, (500, 3))
    distance, direction = signed_distance(coordinates, faces, points)
    beyond = np.abs(points) - 0.5
    outside = np.linalg.norm(np.maximum(beyond, 0), axis=1)
    expected = outside + np.minimum(beyond.max(1), 0)
    np.testing.assert_allclose(distance, expected, atol=1e-6)
    nearest = points + direction * np.abs(distance)[:, None]
    np.testing.assert_allclose(np.abs(nearest).max(1), 0.5, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(direction, axis=1), 1, rtol=1e-5)


def test_a_point_on_the_surface_has_no_direction():
    coordinates, faces = triangles(pyvista.Cube().clean())
    distance, direction = signed_distance(coordinates, faces, np.array([[0.5, 0.0, 0.25]]))
    assert abs(distance[0]) < 1e-12
    np.testing.assert_array_equal(direction, 0)


def test_a_frame_begins_at_the_centroid_by_area():
    # The left half of the surface in many small parts.
    centers = np.concatenate([np.tile([-1.0, 0, 0], (10, 1)), [[3.0, 0, 0]]])
    areas = np.array([0.1] * 10 + [1.0])
    frame = Frame.of_surface(centers, areas, length=2)
    np.testing.assert_allclose(frame.origin, [1, 0, 0])
    np.testing.assert_allclose(frame.positions(centers)[[0, -1], 0], [-1, 1])


@pytest.mark.parametrize("kind", ["pressure", "stress", "velocity"])
def test_coefficients_go_back_to_their_fields(kind):
    stream = FreeStream(density=1.2, velocity=30.0, pressure=1e5)
    field = np.random.default_rng(0).standard_normal((5, 3))
    np.testing.assert_allclose(stream.field(stream.coefficient(field, kind), kind), field)


def test_the_stagnation_pressure_has_the_coefficient_one():
    stream = FreeStream(density=1.2, velocity=30.0, pressure=1e5)
    assert stream.coefficient(1e5 + 0.5 * 1.2 * 30.0**2, "pressure") == pytest.approx(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FreeStream(0.0, 1.0), "expected a positive density; got 0.0"),
        (lambda: FreeStream(1.0, float("nan")), "expected a positive velocity; got nan"),
        (lambda: FreeStream(1.0, 1.0).coefficient(np.ones(1), "heat"), "expected one of pressure"),
        (lambda: Frame.of_surface(np.ones((1, 3)), np.zeros(1)), "a surface of some area; got 0"),
        (lambda: Frame.of_surface(np.ones((1, 3)), np.ones(1), 0), "positive reference length"),
    ],
    ids=["density", "velocity", "kind", "area", "length"],
)
def test_bad_reference_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
