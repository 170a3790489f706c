"""Airfoil coordinate files: both formats, what is repaired, and what is refused."""

import importlib.machinery
import re

import numpy as np
import pytest

from experiments.extras import installing
from experiments.problems import airfoil_files
from experiments.problems.airfoil_files import (
    airfoil_paths,
    fingerprint,
    read_nodes,
    read_shapes,
    uiuc_folder,
)
from experiments.problems.airfoil_shapes import NacaParameters, naca_outline, panel_nodes

NACA = NacaParameters(0.12, 0.04, 0.4)
# 81 points, as such files have.
OUTLINE = naca_outline(NACA)[::10]


def lines_of(points):
    return [f"{x:10.6f} {y:10.6f}" for x, y in points]


def write(path, *parts):
    path.write_text("\n".join(line for part in parts for line in part) + "\n")
    return path


def selig(path, points=OUTLINE, title=("NACA 4412",), remarks=()):
    return write(path, title, lines_of(points), remarks)


def lednicer(path, upper=OUTLINE[40::-1], lower=OUTLINE[40:], counts=None):
    counts = counts or (len(upper), len(lower))
    head = ["NACA 4412", " {:9.1f} {:9.1f}".format(*counts), ""]
    return write(path, head, lines_of(upper), [""], lines_of(lower))


def test_selig_file_is_read(tmp_path):
    # The files' 81 points tell where the nose is to within a fraction of their distance.
    nodes = read_nodes(selig(tmp_path / "a.dat"), 64)
    np.testing.assert_allclose(nodes, panel_nodes(naca_outline(NACA), 64), atol=1e-3)
    np.testing.assert_allclose(nodes[0], [1.0, 0.0], atol=1e-12)


def test_as_many_panels_as_asked_for_are_made_of_the_same_shapes(tmp_path):
    path = selig(tmp_path / "a.dat")
    for panels in (32, 300):
        nodes = read_nodes(path, panels)
        assert nodes.shape == (panels, 2)
        np.testing.assert_allclose(nodes[panels // 2], read_nodes(path, 64)[32], atol=1e-12)


def test_lednicer_file_is_the_same_shape(tmp_path):
    nodes = read_nodes(lednicer(tmp_path / "a.dat"), 64)
    np.testing.assert_array_equal(nodes, read_nodes(selig(tmp_path / "b.dat"), 64))


@pytest.mark.parametrize(
    "change",
    [
        lambda points: points[::-1],
        lambda points: 25.4 * points + [3.0, -7.0],
        lambda points: points @ [[np.cos(0.1), np.sin(0.1)], [-np.sin(0.1), np.cos(0.1)]],
        lambda points: np.repeat(points, 2, axis=0),
    ],
    ids=["clockwise", "millimetres", "turned", "doubled"],
)
def test_frame_direction_and_doubled_points_are_put_right(tmp_path, change):
    straight = read_nodes(selig(tmp_path / "a.dat"), 64)
    changed = read_nodes(selig(tmp_path / "b.dat", change(OUTLINE)), 64)
    np.testing.assert_allclose(changed, straight, atol=2e-6)


def test_blunt_trailing_edge_is_closed_in_proportion_to_x(tmp_path):
    side = np.where(np.arange(len(OUTLINE)) <= 40, 1.0, -1.0)
    blunt = OUTLINE + 0.005 * np.stack([np.zeros(len(side)), side * OUTLINE[:, 0]], -1)
    np.testing.assert_allclose(
        read_nodes(selig(tmp_path / "a.dat", blunt), 64),
        read_nodes(selig(tmp_path / "b.dat"), 64),
        atol=1e-4,
    )


@pytest.mark.parametrize(
    ("title", "remarks"),
    [
        ((), ()),
        (("",), ()),
        (("Name", "Second title", "-2.0 3.0 -2.5 3.5"), ()),
        (("Name",), ("", "from a drawing of 1920", "see page 7")),
    ],
)
def test_titles_and_remarks_are_no_points(tmp_path, title, remarks):
    path = selig(tmp_path / "a.dat", title=title, remarks=remarks)
    np.testing.assert_array_equal(read_nodes(path, 64), read_nodes(selig(tmp_path / "b.dat"), 64))


def notched(points):
    points = points.copy()
    points[20, 1] = -0.1
    return points


def wedge():
    """A shape with a nose of 40 degrees, its points so dense that no spline rounds it."""
    x = np.linspace(1.0, 0.0, 2001)
    upper = np.stack([x, 0.36 * np.minimum(x, 0.5 * (1.0 - x))], -1)
    return np.concatenate([upper, upper[-2::-1] * [1.0, -1.0]])


@pytest.mark.parametrize(
    ("points", "title", "remarks", "message"),
    [
        (OUTLINE[:0], ("Name",), (), "expected lines of x and y; got none"),
        (OUTLINE[::20], ("Name",), (), "expected at least 10 points; got 5"),
        (OUTLINE, ("Name",), ("0.5 0.1 0.2",), "expected x and y in line 83; got '0.5 0.1 0.2'"),
        (OUTLINE, ("Name",), ("0.5",), "expected x and y in line 83; got '0.5'"),
        (OUTLINE, ("Name",), ("0.5 nan",), "expected x and y in line 83; got '0.5 nan'"),
        (OUTLINE, ("Name",), ("0.5 O.1",), "expected x and y in line 83; got '0.5 O.1'"),
        (OUTLINE, ("Name", "1.0 ...."), (), r"expected x and y in line 2; got '1.0 ....'"),
        (OUTLINE, ("Name",), ("a remark", "0.5 0.1"), "expected x and y in line 84; got '0.5 0.1'"),
        (OUTLINE[:60], ("Name",), (), "expected ends at most 0.03 chords apart; got"),
        (notched(OUTLINE), ("Name",), (), "expected a"),
        (OUTLINE * [1.0, 0.0], ("Name",), (), "expected an outline with an inside"),
        (wedge(), ("Name",), (), "expected turns of at most 30 degrees between panels; got"),
    ],
    ids=[
        "empty", "few", "three", "one", "nan", "letter", "dots", "resumed", "open", "notched",
        "flat", "wedge",
    ],
)  # fmt: skip
def test_unusable_file_is_named(tmp_path, points, title, remarks, message):
    path = selig(tmp_path / "a.dat", points, title, remarks)
    with pytest.raises(ValueError, match="expected") as error:
        read_nodes(path, 64)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("counts", [(40, 41), (41, 42), (40.5, 41.5)])
def test_lednicer_counts_that_do_not_fit_are_named(tmp_path, counts):
    path = lednicer(tmp_path / "a.dat", counts=counts)
    with pytest.raises(ValueError, match=r"points as its second line says; got 82"):
        read_nodes(path, 64)


def test_crossing_sides_are_named(tmp_path):
    crossed = OUTLINE.copy()
    crossed[41:80, 1] += 0.5 * (OUTLINE[41:80, 0] > 0.6) * (1.0 - OUTLINE[41:80, 0])
    with pytest.raises(
        ValueError, match="expected an outline with an inside; got one that crosses"
    ):
        read_nodes(selig(tmp_path / "a.dat", crossed), 64)


def test_folder_is_read_in_order_without_damaged_files_and_doubles(tmp_path):
    selig(tmp_path / "b.dat")
    selig(tmp_path / "a.dat", naca_outline(NacaParameters(0.15, 0.0, 0.4))[::10])
    selig(tmp_path / "c.dat", OUTLINE + 1e-4)
    selig(tmp_path / "damaged.dat", OUTLINE[:50])
    (tmp_path / "notes.txt").write_text("not an airfoil")
    with pytest.warns(
        UserWarning, match=r"skipped 1 of 4 airfoil files: damaged\.dat; .*damaged\.dat: exp"
    ) as caught:
        shapes = read_shapes(airfoil_paths(tmp_path), 64)
    assert list(shapes) == ["a", "b"]
    np.testing.assert_array_equal(shapes["b"], read_nodes(tmp_path / "b.dat", 64))
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)


def test_every_skipped_file_is_named_in_one_warning(tmp_path):
    for number in range(13):
        selig(tmp_path / f"{number:02}.dat", OUTLINE[:50])
    with pytest.warns(UserWarning, match=r"skipped 13 of 13 .*: expected ends at most") as caught:
        assert read_shapes(airfoil_paths(tmp_path), 64) == {}
    assert len(caught) == 1
    assert all(f"{number:02}.dat" in str(caught[0].message) for number in range(13))


def test_fingerprint_tells_names_and_contents_apart(tmp_path):
    path = selig(tmp_path / "a.dat")
    first = fingerprint([path])
    assert fingerprint([path]) == first
    renamed = path.rename(tmp_path / "b.dat")
    assert fingerprint([renamed]) != first
    other = selig(tmp_path / "a.dat", OUTLINE + 1.0)
    assert fingerprint([other]) != first


def test_missing_folder_is_named(tmp_path):
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(
            FileNotFoundError, match=r"expected a folder with \.dat files; got none"
        ):
            airfoil_paths(folder)


def test_collection_is_found_in_its_package_without_importing_it(tmp_path, monkeypatch):
    folder = tmp_path / "package" / "geometry" / "airfoil" / "airfoil_database"
    spec = importlib.machinery.ModuleSpec("package", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "package")]
    monkeypatch.setattr(airfoil_files, "find_spec", lambda name: spec)
    with pytest.raises(FileNotFoundError, match="expected the package aerosandbox"):
        uiuc_folder()
    folder.mkdir(parents=True)
    assert uiuc_folder() == folder
    monkeypatch.setattr(airfoil_files, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=re.escape(installing("airfoils"))) as error:
        uiuc_folder()
    assert "\n" not in str(error.value)


def test_collection_can_be_used():
    try:
        paths = airfoil_paths(uiuc_folder())
    except FileNotFoundError:
        pytest.skip("needs the extra airfoils")
    with pytest.warns(UserWarning, match="skipped"):
        shapes = read_shapes(paths[::20], 64)
    assert len(shapes) > 0.9 * len(paths[::20])
