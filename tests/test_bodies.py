"""Bodies in an ideal flow: exact ellipsoids, the panels against them, and the files of a folder."""

import json

import numpy as np
import pytest
from commands import call

pyvista = pytest.importorskip("pyvista")

from experiments import bodies as command  # noqa: E402
from experiments.problems import (  # noqa: E402
    bodies,
    body_flow,
    body_shapes,
)
from experiments.problems.bodies import make_bodies, make_sample  # noqa: E402
from experiments.problems.body_flow import (  # noqa: E402
    Panels,
    ellipsoid_speeds,
    ellipsoid_velocity,
    force_share,
    panel_velocity,
    pressure_coefficient,
)
from experiments.problems.body_shapes import KINDS, deformed, draw_body  # noqa: E402

DIRECTION = np.array([0.9, 0.3, -0.2]) / np.linalg.norm([0.9, 0.3, -0.2])
FACES = 400


def relative_l2(actual, expected) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def sphere(halvings: int = 2) -> tuple[np.ndarray, np.ndarray]:
    mesh = pyvista.Icosphere(radius=1.0, nsub=halvings)
    return np.asarray(mesh.points, np.float64), mesh.regular_faces


def unit_vectors(count: int) -> np.ndarray:
    vectors = np.random.default_rng(0).normal(size=(count, 3))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def body_of():
    """Bodies of every kind; each is made once."""
    made = {}

    def get(kind: str):
        if kind not in made:
            made[kind] = draw_body(np.random.default_rng(0), FACES, kind)
        return made[kind]

    return get


# Exact flow --------------------------------------------------------------------------------------


def test_speed_on_a_sphere_is_three_halves_of_the_tangential_stream():
    points = 0.7 * unit_vectors(50)
    normals = points / 0.7
    tangential = DIRECTION - (normals @ DIRECTION)[:, None] * normals
    velocity = ellipsoid_velocity([0.7, 0.7, 0.7], points, DIRECTION)
    np.testing.assert_allclose(velocity, 1.5 * tangential, rtol=1e-13, atol=1e-14)
    assert pressure_coefficient(velocity).min() >= 1.0 - 1.5**2 - 1e-12


def test_spheroid_is_as_fast_as_its_closed_form():
    # Lamb, article 114: a prolate spheroid of eccentricity e along its axis.
    e = 0.8
    alpha = 2.0 * (1.0 - e**2) / e**3 * (np.arctanh(e) - e)
    expected = 2.0 / (2.0 - alpha)
    for axis in range(3):
        semi_axes = np.full(3, np.sqrt(1.0 - e**2))
        semi_axes[axis] = 1.0
        assert ellipsoid_speeds(semi_axes)[axis] == pytest.approx(expected, rel=1e-13)


def test_long_ellipsoid_is_a_cylinder():
    assert ellipsoid_speeds([1.0, 1.0, 1e5]) == pytest.approx([2.0, 2.0, 1.0], abs=1e-8)


def test_nothing_flows_through_an_ellipsoid():
    semi_axes = np.array([0.5, 0.35, 0.2])
    points = unit_vectors(50) * semi_axes
    gradient = points / semi_axes**2
    velocity = ellipsoid_velocity(semi_axes, points, DIRECTION)
    np.testing.assert_allclose((velocity * gradient).sum(axis=1), 0.0, atol=1e-13)
    # A point off the surface stands for the one on its ray.
    np.testing.assert_allclose(ellipsoid_velocity(semi_axes, 0.9 * points, DIRECTION), velocity)


# Panels ------------------------------------------------------------------------------------------


def test_panels_approach_the_exact_flow_around_an_ellipsoid():
    # Measured: relative L2 errors of the pressure of 0.072 and 0.038, of the velocity of 0.051 and
    # 0.028. They are of the order of an edge, which is half as long.
    errors = []
    for faces in (250, 1000):
        body = draw_body(np.random.default_rng(1), faces, "ellipsoid")
        exact = ellipsoid_velocity(body.semi_axes, body.panels.centres, DIRECTION)
        solved = panel_velocity(body.panels, DIRECTION)
        pressures = (pressure_coefficient(velocity) for velocity in (solved, exact))
        errors.append([relative_l2(*pressures), relative_l2(solved, exact)])
    coarse, fine = np.array(errors)
    assert (fine < [0.05, 0.04]).all()
    assert (fine < 0.7 * coarse).all()


def test_panels_on_an_even_sphere_are_within_two_percent():
    panels = Panels.between(*sphere(3))
    exact = ellipsoid_velocity(np.ones(3), panels.centres, DIRECTION)
    assert relative_l2(panel_velocity(panels, DIRECTION), exact) < 0.02  # measured: 0.004


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_flows_through_the_panels(kind, body_of):
    panels = body_of(kind).panels
    velocity = panel_velocity(panels, DIRECTION)
    assert np.isfinite(velocity).all()
    assert abs((velocity * panels.normals).sum(axis=1)).max() < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_the_flow_pushes_no_body(kind, body_of):
    # d'Alembert. Measured: below 0.011, but 0.024 for the cone, which has the sharpest edge.
    panels = body_of(kind).panels
    pressure = pressure_coefficient(panel_velocity(panels, DIRECTION))
    assert force_share(panels, pressure) < (0.04 if kind == "cone" else 0.02)


def test_velocity_does_not_depend_on_the_blocks(monkeypatch):
    panels = Panels.between(*sphere())
    expected = panel_velocity(panels, DIRECTION)
    monkeypatch.setattr(body_flow, "_PAIRS", 1000)
    np.testing.assert_allclose(panel_velocity(panels, DIRECTION), expected, atol=1e-12)


def test_velocity_does_not_depend_on_size_and_place():
    points, faces = sphere()
    expected = panel_velocity(Panels.between(points, faces), DIRECTION)
    moved = Panels.between(50.0 * points + [3.0, -20.0, 7.0], faces)
    np.testing.assert_allclose(panel_velocity(moved, DIRECTION), expected, atol=1e-10)


def test_surface_that_crosses_itself_is_refused():
    points, faces = sphere()
    twice = np.concatenate([points, points + np.array([0.7, 0.1, 0.2])])
    panels = Panels.between(twice, np.concatenate([faces, faces + len(points)]))
    with pytest.raises(RuntimeError, match="expected a surface that does not cross itself"):
        panel_velocity(panels, DIRECTION)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda points, faces: (points, faces[1:]), "edges that two triangles share"),
        (lambda points, faces: (points, faces[:0]), "edges that two triangles share"),
        (lambda points, faces: (points, np.roll(faces, 1, 1)[:, ::-1]), "point outwards"),
        (lambda points, faces: (points * [1, 1, np.nan], faces), "finite coordinates"),
        (lambda points, faces: (np.ones_like(points), faces), "no area in row 0"),
    ],
    ids=["open", "empty", "inward", "nan", "flat"],
)
def test_bad_panels_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Panels.between(*change(*sphere()))


# Shapes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_body_is_closed_and_turned_outwards(kind, body_of):
    panels = body_of(kind).panels
    mesh = pyvista.PolyData.from_regular_faces(panels.points, panels.faces)
    assert mesh.is_manifold
    assert mesh.n_open_edges == 0
    assert mesh.n_cells == FACES
    assert (panels.areas @ (panels.normals * panels.centres)).sum() > 0.0
    assert 0.3 < np.ptp(panels.points, axis=0).max() < 3.0
    # The triangles are even: the mean of 1 is that of equilateral ones.
    corners = panels.points[panels.faces]
    squares = np.square(corners - np.roll(corners, 1, axis=1)).sum(axis=(1, 2))
    assert (4.0 * np.sqrt(3.0) * panels.areas / squares).mean() > 0.8
    np.testing.assert_array_equal(panels.points, panels.points.astype(np.float32))


@pytest.mark.parametrize(("kind", "characteristic"), [("torus", 0), ("nut", 0), ("airplane", 2)])
def test_holes_stay(kind, characteristic, body_of):
    panels = body_of(kind).panels
    assert len(np.unique(panels.faces)) - FACES // 2 == characteristic


def test_ellipsoid_has_its_points_on_the_ellipsoid(body_of):
    body = body_of("ellipsoid")
    assert body.semi_axes.max() == 0.5
    on = np.square(body.panels.points / body.semi_axes).sum(axis=1)
    np.testing.assert_allclose(on, 1.0, rtol=1e-6)  # float32


def test_deformation_never_folds_space():
    step = 1e-5
    points = np.random.default_rng(1).uniform(-0.5, 0.5, (300, 3))
    for seed in range(10):
        moved = [
            deformed(points + step * offset, np.random.default_rng(seed))
            for offset in (np.zeros(3), *np.eye(3))
        ]
        jacobian = np.stack([each - moved[0] for each in moved[1:]], -1) / step
        assert np.linalg.det(jacobian).min() > 0.05


def test_a_third_of_the_bodies_are_ellipsoids_and_all_kinds_come(monkeypatch):
    nothing = body_shapes._Fine(np.zeros((1, 3)), np.zeros((0, 3), np.int64))
    monkeypatch.setattr(body_shapes, "_fine_outside", lambda *_: nothing)
    monkeypatch.setattr(body_shapes, "_covered", lambda *_: None)
    generator = np.random.default_rng(0)
    kinds = [draw_body(generator, FACES).kind for _ in range(300)]
    assert set(kinds) == set(KINDS)
    assert 80 < kinds.count("ellipsoid") < 120


# Samples and files -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bodies") / "made" / "here"
    make_bodies(folder, samples=4, faces=200, seed=3, workers=1)
    return folder


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_hold_the_surface_the_flow_and_the_stream(folder):
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"00{i}.{ending}" for i in range(4) for ending in ("vtp", "stl", "json")
    )
    for i in range(4):
        mesh = pyvista.read(folder / f"00{i}.vtp")
        numbers = json.loads((folder / f"00{i}.json").read_text())
        assert mesh.n_cells == 200
        assert mesh.is_manifold
        assert set(mesh.cell_data) == {"pressure_coefficient", "velocity", "pressure"}
        assert all(values.dtype == np.float32 for values in mesh.cell_data.values())
        assert all(np.isfinite(values).all() for values in mesh.cell_data.values())
        assert mesh.cell_data["velocity"].shape == (200, 3)
        coefficient = mesh.cell_data["pressure_coefficient"]
        np.testing.assert_allclose(
            coefficient, pressure_coefficient(mesh.cell_data["velocity"]), atol=1e-5
        )
        dynamic = 0.5 * numbers["air_density"] * numbers["stream_velocity"] ** 2
        np.testing.assert_allclose(mesh.cell_data["pressure"], dynamic * coefficient, rtol=1e-6)
        assert numbers["air_density"] == 1.2
        assert 20.0 <= numbers["stream_velocity"] <= 40.0
        direction = [numbers[f"direction_{axis}"] for axis in "xyz"]
        assert np.linalg.norm(direction) == pytest.approx(1.0)
        assert direction[0] >= np.cos(np.radians(20.0))
        stl = pyvista.read(folder / f"00{i}.stl")
        np.testing.assert_array_equal(
            stl.points[stl.regular_faces], mesh.points[mesh.regular_faces]
        )


def test_a_sample_does_not_depend_on_the_others(folder, tmp_path):
    make_bodies(tmp_path, samples=2, faces=200, seed=3, workers=2)
    made = contents(folder)
    for name, content in contents(tmp_path).items():
        assert content == made[name]
    alone = make_sample(3, 3, 200)
    mesh = pyvista.read(folder / "003.vtp")
    np.testing.assert_array_equal(mesh.points, alone.panels.points)
    np.testing.assert_array_equal(mesh.cell_data["velocity"], alone.velocity.astype(np.float32))
    other = make_sample(4, 3, 200)
    assert not np.array_equal(other.direction, alone.direction)


def test_command_goes_on_where_it_was_interrupted(folder, monkeypatch):
    before = contents(folder)
    (folder / "001.vtp").unlink()
    (folder / "002.json").unlink()
    made = []

    def watched(seed, index, faces):
        made.append(index)
        return make_sample(seed, index, faces)

    monkeypatch.setattr(bodies, "make_sample", watched)
    result = call(command.main, folder, "--samples", 4, "--faces", 200, "--seed", 3, "--workers", 1)
    assert result.code == 0
    assert made == [1, 2]
    assert contents(folder) == before


def test_unsound_body_is_drawn_again(monkeypatch):
    draws = []

    def sound_after(unsound):
        def draw(generator, faces):
            draws.append(generator.uniform())
            if len(draws) <= unsound:
                raise ValueError("expected edges that two triangles share; got an open surface")
            return draw_body(generator, faces, "ellipsoid")

        return draw

    monkeypatch.setattr(bodies, "draw_body", sound_after(2))
    assert make_sample(0, 0, 100).kind == "ellipsoid"
    assert len(set(draws)) == 3
    draws.clear()
    monkeypatch.setattr(bodies, "draw_body", sound_after(1000))
    with pytest.raises(RuntimeError, match="sample 0: expected a sound body in 20 draws"):
        make_sample(0, 0, 100)
    assert len(draws) == 20


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--samples", 0], "error: --samples: expected an integer of at least 1, got 0\n"),
        (["--faces", 99], "error: --faces: expected an integer of at least 100, got 99\n"),
        (["--seed", -1], "error: --seed: expected an integer of at least 0, got -1\n"),
        (["--workers", 0], "error: --workers: expected an integer of at least 1, got 0\n"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_numbers_end_in_one_line(options, line, tmp_path):
    result = call(command.main, tmp_path / "bodies", *options)
    assert (result.code, result.err) == (2, line)
    assert not (tmp_path / "bodies").exists()


def test_folder_that_is_a_file_ends_in_one_line(tmp_path):
    path = tmp_path / "taken"
    path.write_text("")
    result = call(command.main, path)
    assert result.code == 2
    assert result.err == f"error: {path}: expected a folder, or nothing there yet; got a file\n"
