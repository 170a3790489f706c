"""Forces and moments of bodies whose pressure is known."""

import dataclasses

import numpy as np
import pytest

zarr = pytest.importorskip("zarr")

from stores import (  # noqa: E402
    config_of,
    numbers,
)

from experiments.configuration.schema import (  # noqa: E402
    ForcesConfig,
    FrameConfig,
    FreeStreamConfig,
)
from experiments.datasets import load_dataset  # noqa: E402
from experiments.meshes.forces import (  # noqa: E402
    force_coefficients,
    moment_coefficients,
    tractions,
)
from experiments.meshes.store import create_store, write_sample  # noqa: E402

FLOW = FreeStreamConfig("air_density", "stream_velocity", "100000.0")


def box(cells: int = 8) -> dict[str, np.ndarray]:
    """The surface of a box of 2 x 1 x 0.5 around (0, 0, 1), in cells."""
    sizes, centre = np.array([2.0, 1.0, 0.5]), np.array([0.0, 0.0, 1.0])
    line = (np.arange(cells) + 0.5) / cells - 0.5
    u, v = (part.ravel() for part in np.meshgrid(line, line))
    centers, normals, areas = [], [], []
    for axis in range(3):
        first, second = (axis + 1) % 3, (axis + 2) % 3
        for side in (-1.0, 1.0):
            points = np.zeros((cells**2, 3))
            points[:, axis], points[:, first], points[:, second] = side / 2, u, v
            centers.append(points * sizes + centre)
            normals.append(np.eye(3)[axis] * np.full((cells**2, 1), side))
            areas.append(np.full(cells**2, sizes[first] * sizes[second] / cells**2))
    return {
        "surface_mesh_centers": np.concatenate(centers),
        "surface_normals": np.concatenate(normals),
        "surface_areas": np.concatenate(areas),
    }


def sphere(cells: int = 40) -> dict[str, np.ndarray]:
    """The surface of a unit sphere, in cells between meridians and parallels."""
    edges = np.linspace(0, np.pi, cells + 1)
    theta, phi = np.meshgrid((edges[1:] + edges[:-1]) / 2, (np.arange(cells) + 0.5) * 2 / cells)
    theta, phi = theta.ravel(), phi.ravel() * np.pi
    normals = np.stack(
        [np.cos(theta), np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi)], axis=1
    )
    bands = (np.cos(edges[:-1]) - np.cos(edges[1:])) * 2 * np.pi / cells
    areas = np.tile(bands, cells)
    return {"surface_mesh_centers": normals, "surface_normals": normals, "surface_areas": areas}


DIRECTIONS = {"drag": [1, 0, 0], "side": [0, 2, 0], "lift": [0, 0, 1]}


def test_hydrostatic_pressure_is_buoyancy():
    body = box()
    weight = 3.0
    centers, normals = body["surface_mesh_centers"], body["surface_normals"]
    force = tractions(normals, -weight * centers[:, 2])
    found = force_coefficients(force, body["surface_areas"], DIRECTIONS, 1.0)
    # The midpoint rule is exact for what is linear on a cell. The volume is 1.
    assert found == pytest.approx({"drag": 0, "side": 0, "lift": weight}, abs=1e-12)
    inward = tractions(-normals, -weight * centers[:, 2], inward=True)
    np.testing.assert_array_equal(inward, force)
    flipped = force_coefficients(
        tractions(normals, -weight * centers[:, 2], inward=True),
        body["surface_areas"],
        DIRECTIONS,
        2.0,
    )
    assert flipped["lift"] == pytest.approx(-weight / 2)


def test_buoyancy_acts_at_the_centroid():
    body = box(40)
    centers = body["surface_mesh_centers"]
    force = tractions(body["surface_normals"], -3.0 * centers[:, 2])
    for centre, expected in (((0, 0, 1), 0.0), ((1, 0, 1), 3.0), ((-1, 5, 7), -3.0)):
        found = moment_coefficients(
            force, body["surface_areas"], centers, {"pitch": [0, 1, 0]}, centre, 1.0
        )
        # About y, -x F_z; of the product of pressure and arm the midpoint rule misses 1 / 40^2.
        assert found["pitch"] == pytest.approx(expected, abs=6e-4 * 3)


def test_uniform_pressure_is_no_force_and_shear_adds_up():
    body = box()
    shear = np.tile([0.5, 0.0, -1.0], (len(body["surface_areas"]), 1))
    pressure = np.full(len(shear), 1e5)
    area = 2 * (2 * 1 + 1 * 0.5 + 2 * 0.5)
    force = tractions(body["surface_normals"], pressure, shear)
    found = force_coefficients(force, body["surface_areas"], DIRECTIONS, 7.0)
    # Forces of 1e5 cancel: 1e-16 of them each.
    expected = {"drag": 0.5 * area / 7, "side": 0, "lift": -area / 7}
    assert found == pytest.approx(expected, abs=1e-9)
    on_fluid = tractions(-body["surface_normals"], pressure, -shear, inward=True)
    np.testing.assert_array_equal(on_fluid, force)


def test_ideal_flow_around_a_sphere_has_no_drag():
    body = sphere()
    coefficient = 1 - 9 / 4 * (1 - body["surface_normals"][:, 0] ** 2)
    force = tractions(body["surface_normals"], coefficient)
    found = force_coefficients(force, body["surface_areas"], DIRECTIONS, np.pi)
    # Front and rear cancel cell by cell.
    assert found == pytest.approx({"drag": 0, "side": 0, "lift": 0}, abs=1e-13)
    front = np.where(body["surface_normals"][:, 0] < 0, coefficient, 0)
    force = tractions(body["surface_normals"], front)
    drag = force_coefficients(force, body["surface_areas"], DIRECTIONS, np.pi)["drag"]
    # By integration: 2 int_0^1 (1 - 9/4 (1 - u^2)) u du; 40 cells from pole to pole.
    assert drag == pytest.approx(-0.125, abs=2e-3)


@pytest.mark.parametrize("coefficients", [{}, {"p": "pressure", "tau": "stress"}])
def test_coefficients_of_a_sample_are_those_of_its_fields(coefficients, tmp_path):
    body, density, speed = box(), 1.25, 20.0
    dynamic = density * speed**2 / 2
    z = body["surface_mesh_centers"][:, 2]
    shear = np.tile([50.0, 0, 0], (len(z), 1))
    fields = np.concatenate([1e5 - dynamic * z[:, None], shear], axis=1)
    create_store(tmp_path / "store")
    for name in "abc":
        write_sample(tmp_path / "store", name, body | {"surface_fields": fields}, numbers(0))
    config = config_of(
        tmp_path / "store",
        free_stream=FLOW,
        coefficients=coefficients,
        frame=FrameConfig(centroid=True, length="chord"),
        forces=ForcesConfig(
            pressure="p",
            shear="tau",
            area="0.5",
            length="chord",
            directions={"drag": [1, 0, 0], "lift": [0, 0, "stream_velocity"]},
            moments={"pitch": [0, 1, 0]},
            centre=[1, 0, 1],
        ),
    )
    split = load_dataset(config).splits["test"]
    assert split.has_quantities
    assert (
        not load_dataset(dataclasses.replace(config, resolution=9)).splits["train"].has_quantities
    )
    target = split.whole(0).clouds[0].target
    found = split.quantities(0, (target,))
    # In coefficients: a force of 1 times the volume, and shear over the area of 7, over 0.5.
    expected = {"drag": 50 / dynamic * 7 / 0.5, "lift": 1 / 0.5, "pitch": 1 / (0.5 * 2)}
    for name, (predicted, true) in found.items():
        assert predicted == true
        # Pressures of 1e5 in float32, where they are no coefficients, and 8 cells for the moment.
        assert true == pytest.approx(expected[name], abs=0.02)
    assert split.quantities(0, (0 * target,))["drag"][0] == pytest.approx(0, abs=1e-9)
