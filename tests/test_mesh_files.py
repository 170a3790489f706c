"""Files of simulations: what is read of them, and what is wrong with bad ones."""

import numpy as np
import pytest

pyvista = pytest.importorskip("pyvista")

from experiments.meshes import files, sampling  # noqa: E402


def sphere(**options):
    return pyvista.Sphere(theta_resolution=16, phi_resolution=16, **options)


def with_fields(mesh, on: str):
    centers = mesh.points if on == "points" else mesh.cell_centers().points
    data = mesh.point_data if on == "points" else mesh.cell_data
    data["p"] = centers[:, 0]
    data["tau"] = np.asarray(centers, np.float32)
    return mesh


def mixed_surface():
    """A cube of two squares, eight triangles."""
    cube = pyvista.Cube().clean()
    corners = cube.regular_faces
    faces = [[4, *face] for face in corners[:2]]
    for a, b, c, d in corners[2:]:
        faces += [[3, a, b, c], [3, a, c, d]]
    return pyvista.PolyData(cube.points, np.concatenate(faces))


def saved(tmp_path, mesh, name: str):
    path = tmp_path / name
    mesh.save(path)
    return path


# Surfaces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".vtp", ".vtk"])
@pytest.mark.parametrize("on", ["cells", "points"])
def test_surface_is_sampled_where_its_fields_lie(on, ending, tmp_path):
    mesh = with_fields(sphere(), on)
    path = saved(tmp_path, mesh, f"ball{ending}")
    sampled = sampling.sample_surface(path, files.read_mesh(path), None)
    assert sampled.on_cells == (on == "cells")
    assert len(sampled.positions) == (mesh.n_cells if on == "cells" else mesh.n_points)
    assert sampled.names == ("p", "tau_x", "tau_y", "tau_z")
    np.testing.assert_allclose(sampled.fields[:, 0], sampled.positions[:, 0], atol=1e-6)
    np.testing.assert_allclose(sampled.fields[:, 1:], sampled.positions, atol=1e-6)
    np.testing.assert_allclose(sampled.sizes.sum(), mesh.area, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(sampled.normals, axis=1), 1, rtol=1e-5)
    outward = (sampled.normals * sampled.positions).sum(1) / 0.5
    assert outward.min() > 0.9
    for array in (sampled.positions, sampled.fields, sampled.normals, sampled.sizes):
        assert array.dtype == np.float32


@pytest.mark.parametrize("on", ["cells", "points"])
@pytest.mark.parametrize(
    "make",
    [lambda: pyvista.Cube().clean(), mixed_surface, pyvista.Dodecahedron],
    ids=["squares", "mixed", "pentagons"],
)
def test_areas_of_any_polygons_add_up(make, on, tmp_path):
    mesh = make()
    path = saved(tmp_path, with_fields(mesh, on), "body.vtp")
    sampled = sampling.sample_surface(path, files.read_mesh(path), ["p"])
    assert sampled.names == ("p",)
    np.testing.assert_allclose(sampled.sizes.sum(), mesh.area, rtol=1e-5)
    assert (sampled.sizes > 0).all()


def test_fields_of_points_are_averaged_where_others_lie_on_cells(tmp_path):
    mesh = with_fields(sphere(), "cells")
    mesh.point_data["height"] = mesh.points[:, 2]
    path = saved(tmp_path, mesh, "ball.vtp")
    sampled = sampling.sample_surface(path, files.read_mesh(path), ["height", "p"])
    assert sampled.on_cells
    corners = mesh.points[mesh.regular_faces][..., 2]
    np.testing.assert_allclose(sampled.fields[:, 0], corners.mean(1), atol=1e-6)


def test_blocks_of_a_multiblock_file_are_one_surface(tmp_path):
    parts = [with_fields(sphere(center=(x, 0, 0)), "cells") for x in (0.0, 3.0)]
    path = saved(tmp_path, pyvista.MultiBlock(parts), "two.vtm")
    sampled = sampling.sample_surface(path, files.read_mesh(path), ["p"])
    assert len(sampled.positions) == 2 * parts[0].n_cells
    np.testing.assert_allclose(sampled.fields[:, 0], sampled.positions[:, 0], atol=1e-6)


# Volumes -----------------------------------------------------------------------------------------


def block(on: str):
    return with_fields(pyvista.ImageData(dimensions=(4, 5, 6)), on)


@pytest.mark.parametrize("on", ["cells", "points"])
@pytest.mark.parametrize(
    ("name", "convert"),
    [
        ("box.vtu", lambda mesh: mesh.cast_to_unstructured_grid()),
        ("box.vts", lambda mesh: mesh.cast_to_structured_grid()),
        ("box.vtk", lambda mesh: mesh.cast_to_unstructured_grid()),
    ],
    ids=["vtu", "vts", "vtk"],
)
def test_volume_is_sampled_where_its_fields_lie(name, convert, on, tmp_path):
    path = saved(tmp_path, convert(block(on)), name)
    mesh = files.read_mesh(path)
    assert files.is_volume(mesh)
    sampled = sampling.sample_volume(path, mesh, ["p"])
    assert sampled.normals is None
    assert len(sampled.positions) == (3 * 4 * 5 if on == "cells" else 4 * 5 * 6)
    np.testing.assert_allclose(sampled.fields[:, 0], sampled.positions[:, 0], atol=1e-6)
    np.testing.assert_allclose(sampled.sizes.sum(), 60 if on == "cells" else 0, rtol=1e-5)


def test_kinds_of_meshes_are_told_apart():
    assert not files.is_volume(sphere())
    assert not files.is_volume(sphere().cast_to_unstructured_grid())
    assert files.is_volume(block("points"))
    assert files.is_volume(pyvista.PolyData(np.random.default_rng(0).random((5, 3))))


def test_a_cloud_of_points_is_a_volume_without_cells(tmp_path):
    cloud = pyvista.PolyData(np.random.default_rng(0).random((50, 3)).astype(np.float32))
    path = saved(tmp_path, with_fields(cloud, "points"), "cloud.vtp")
    sampled = sampling.sample_volume(path, files.read_mesh(path), None)
    assert len(sampled.positions) == 50
    np.testing.assert_array_equal(sampled.fields[:, 1:], sampled.positions)


# Geometry ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["body.stl", "body.vtp"])
def test_geometry_is_triangles(name, tmp_path):
    cube = pyvista.Cube()
    path = saved(tmp_path, cube.triangulate() if name.endswith("stl") else cube, name)
    geometry = files.read_geometry(path)
    assert geometry.faces.shape == (12, 3)
    np.testing.assert_allclose(geometry.areas, 0.5, rtol=1e-6)
    np.testing.assert_allclose(
        geometry.coordinates[geometry.faces].mean(1), geometry.centers, atol=1e-6
    )


# Bad files ---------------------------------------------------------------------------------------


def truncated(tmp_path):
    path = saved(tmp_path, with_fields(sphere(), "cells"), "cut.vtp")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def not_finite(tmp_path):
    mesh = sphere()
    mesh.points[3] = np.nan
    return saved(tmp_path, mesh, "nan.vtp")


def text(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("no mesh")
    return path


def rubbish(ending):
    def make(tmp_path):
        path = tmp_path / f"rubbish{ending}"
        path.write_bytes(bytes(range(256)))
        return path

    return make


def empty_surface(tmp_path):
    return saved(tmp_path, pyvista.PolyData(), "empty.vtp")


def both_kinds(tmp_path):
    return saved(tmp_path, pyvista.MultiBlock([sphere(), block("points")]), "both.vtm")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (truncated, "cut.vtp: expected a readable .vtp file; got"),
        (not_finite, "nan.vtp: expected finite coordinates; got 1 points that are not"),
        (text, "notes.txt: expected a file ending in one of .vtp, .vtu, .*; got .txt"),
        (rubbish(".vtu"), "rubbish.vtu: expected a"),
        (rubbish(".vtk"), "rubbish.vtk: expected a"),
        (rubbish(".stl"), "rubbish.stl: expected a"),
        (empty_surface, "empty.vtp: expected a mesh with points; got none"),
        (both_kinds, "both.vtm: expected blocks of surfaces or of volumes; got both"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_bad_file_is_named(make, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        files.read_mesh(make(tmp_path))
    assert "\n" not in str(error.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none.vtp: expected a mesh file; there is none"):
        files.read_mesh(tmp_path / "none.vtp")


def test_missing_field_is_named_with_those_that_are_there(tmp_path):
    path = saved(tmp_path, with_fields(sphere(), "cells"), "ball.vtp")
    mesh = files.read_mesh(path)
    with pytest.raises(ValueError, match=r"ball.vtp: expected a field 'q'; has 'p', 'tau'"):
        sampling.sample_surface(path, mesh, ["q"])


def test_field_that_is_not_finite_is_named(tmp_path):
    mesh = with_fields(sphere(), "cells")
    mesh.cell_data["p"][:2] = np.inf
    path = saved(tmp_path, mesh, "ball.vtp")
    with pytest.raises(
        ValueError, match=r"ball.vtp: field 'p': expected finite values; got 2 that"
    ):
        sampling.sample_surface(path, files.read_mesh(path), None)


def test_surface_and_geometry_without_faces_are_named(tmp_path):
    path = saved(tmp_path, pyvista.Line(), "line.vtp")
    with pytest.raises(ValueError, match=r"line.vtp: expected a surface with faces; got none"):
        sampling.sample_surface(path, files.read_mesh(path), None)
    with pytest.raises(ValueError, match=r"line.vtp: expected a surface with triangles; got none"):
        files.read_geometry(path)


def test_fields_of_different_length_are_named(tmp_path):
    arrays = {"p": np.zeros(4), "q": np.zeros(5)}
    with pytest.raises(ValueError, match=r"x.npz: field 'q': expected 4 values, .*; got 5"):
        sampling.as_columns(tmp_path / "x.npz", arrays)


def plain(parts: int):
    """A square of so many parts along each side, without fields."""
    mesh = pyvista.Plane(i_resolution=parts, j_resolution=parts)
    mesh.clear_data()
    return mesh


def test_a_name_on_points_and_on_cells_keeps_the_values_of_the_cells(tmp_path):
    mesh = plain(3)
    mesh.cell_data["c"] = np.linspace(0, 1, mesh.n_cells)
    mesh.point_data["c"] = np.linspace(5, 6, mesh.n_points)
    mesh.point_data["d"] = np.ones(mesh.n_points)
    mesh.save(tmp_path / "a.vtp")
    sampled = sampling.sample_surface(tmp_path, files.read_mesh(tmp_path / "a.vtp"), None)
    assert sampled.on_cells
    np.testing.assert_allclose(sampled.fields[:, 0], np.linspace(0, 1, 9), atol=1e-6)


@pytest.mark.parametrize("where", ["cells", "points"])
def test_points_and_lines_beside_polygons_are_left_out(where, tmp_path):
    plane = plain(2)
    plane.points *= (2, 3, 1)
    mesh = pyvista.PolyData(plane.points, faces=plane.faces, verts=[1, 0], lines=[2, 0, 1])
    assert mesh.n_cells == 6
    data = mesh.cell_data if where == "cells" else mesh.point_data
    data["p"] = np.arange(mesh.n_cells if where == "cells" else mesh.n_points, dtype=float)
    mesh.save(tmp_path / "a.vtp")
    surface = files.surface_of(files.read_mesh(tmp_path / "a.vtp"))
    sampled = sampling.sample_surface(tmp_path, surface, None)
    assert sampled.sizes.sum() == pytest.approx(6)
    expected = np.arange(2, 6) if where == "cells" else np.arange(9)
    np.testing.assert_array_equal(sampled.fields[:, 0], expected)


def test_integers_are_fields_where_they_are_named(tmp_path):
    mesh = plain(2)
    mesh.cell_data["part"] = np.arange(4)
    mesh.save(tmp_path / "a.vtp")
    read = files.read_mesh(tmp_path / "a.vtp")
    assert sampling.sample_surface(tmp_path, read, None).names == ()
    named = sampling.sample_surface(tmp_path, read, ["part"])
    np.testing.assert_array_equal(named.fields[:, 0], np.arange(4))


def test_coordinates_beyond_float32_and_names_twice_are_refused(tmp_path):
    mesh = plain(2)
    mesh.points = np.asarray(mesh.points, np.float64) * 4e39
    mesh.cell_data["p"] = np.ones(4)
    with pytest.raises(ValueError, match="expected coordinates within float32; got 4 points"):
        sampling.sample_surface(tmp_path, mesh, None)
    mesh = plain(2)
    mesh.cell_data["p"], mesh.cell_data["p_x"] = np.ones((4, 3)), np.ones(4)
    with pytest.raises(ValueError, match="field 'p_x': expected one of this name; got several"):
        sampling.sample_surface(tmp_path, mesh, None)


def test_a_damaged_file_is_said_once(tmp_path, capfd):
    pyvista.Sphere().save(tmp_path / "a.vtp")
    content = (tmp_path / "a.vtp").read_bytes()
    (tmp_path / "a.vtp").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"a\.vtp: expected a readable .vtp file; got ") as error:
        files.read_mesh(tmp_path / "a.vtp")
    assert len(str(error.value)) < 300 + len(str(tmp_path))
    assert capfd.readouterr() == ("", "")
