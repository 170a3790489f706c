"""A folder of simulation files becomes a store: resumed, reported, never half."""

import errno
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

pyvista = pytest.importorskip("pyvista")
pytest.importorskip("zarr")

from experiments.meshes import conversion  # noqa: E402
from experiments.meshes.conversion import Options, convert, describe  # noqa: E402
from experiments.meshes.samples import find_samples  # noqa: E402
from experiments.meshes.store import Store  # noqa: E402


def body(radius: float, names=("p", "tau")):
    mesh = pyvista.Sphere(radius=radius, theta_resolution=12, phi_resolution=12)
    centers = np.asarray(mesh.cell_centers().points, np.float32)
    for name in names:
        mesh.cell_data[name] = centers[:, 0] if name == "p" else centers
    return mesh


@pytest.fixture
def folder(tmp_path):
    """Two samples in folders of their own, with a surface, a volume, a geometry and numbers."""
    folder = tmp_path / "runs"
    for i in (1, 2):
        own = folder / f"run_{i}"
        own.mkdir(parents=True)
        body(0.5 * i).save(own / "boundary.vtp")
        body(0.5 * i, ()).save(own / "body.stl")
        grid = pyvista.ImageData(dimensions=(4, 4, 4))
        grid.point_data["U"] = np.asarray(grid.points, np.float32)
        grid.cast_to_unstructured_grid().save(own / "volume.vtu")
        (own / "parameters.json").write_text(json.dumps({"stream_velocity": 30.0 + i}))
    return folder


def test_a_sample_holds_its_surface_volume_geometry_and_numbers(folder, tmp_path):
    rows = convert(folder, tmp_path / "store", Options(), workers=1)
    assert [row["sample"] for row in rows] == ["run_1", "run_2"]
    sample = Store(tmp_path / "store").sample("run_2")
    cells = body(1.0).n_cells
    assert sample.shape("surface_mesh_centers") == sample.shape("surface_normals") == (cells, 3)
    assert sample.shape("surface_fields") == (cells, 4)
    assert sample.shape("surface_areas") == (cells,)
    assert sample.shape("volume_fields") == sample.shape("volume_mesh_centers") == (64, 3)
    assert sample.shape("stl_faces") == (3 * cells,)
    assert sample.number("stream_velocity") == 32.0
    assert sample.attributes["surface_field_names"] == ["p", "tau_x", "tau_y", "tau_z"]
    np.testing.assert_allclose(
        sample.read("surface_fields")[:, 1:], sample.read("surface_mesh_centers"), atol=1e-6
    )


def test_files_of_one_name_are_a_sample(tmp_path):
    for i in (1, 2):
        body(i).save(tmp_path / f"{i}.vtp")
        body(i, ()).save(tmp_path / f"{i}.stl")
    sources = find_samples(tmp_path)
    assert [source.name for source in sources] == ["1", "2"]
    assert all(len(source.meshes) == len(source.geometry) == 1 for source in sources)


def test_several_patches_are_one_surface(folder, tmp_path):
    body(2.0).save(folder / "run_1" / "wheel.vtp")
    convert(folder, tmp_path / "store", Options(), workers=1)
    sample = Store(tmp_path / "store").sample("run_1")
    assert sample.shape("surface_fields") == (2 * body(1.0).n_cells, 4)


def test_an_interrupted_conversion_goes_on(folder, tmp_path, monkeypatch):
    store, written = tmp_path / "store", []
    write = conversion.write_sample

    def counted(store, name, *rest):
        written.append(name)
        write(store, name, *rest)

    monkeypatch.setattr(conversion, "write_sample", counted)
    first = convert(folder, store, Options(), workers=1)
    assert convert(folder, store, Options(), workers=1) == first
    assert written == ["run_1", "run_2"]

    body(3.0).save(folder / "run_2" / "boundary.vtp")
    convert(folder, store, Options(), workers=1)
    assert written == ["run_1", "run_2", "run_2"]
    convert(folder, store, Options(surface_fields=("p",)), workers=1)
    assert written[3:] == ["run_1", "run_2"]
    assert Store(store).sample("run_1").shape("surface_fields")[1] == 1


def test_processes_give_what_one_gives(folder, tmp_path):
    one = convert(folder, tmp_path / "one", Options(), workers=1)
    assert convert(folder, tmp_path / "two", Options(), workers=2) == one


def test_report_says_what_each_sample_held(folder, tmp_path):
    rows = convert(folder, tmp_path / "store", Options(), workers=1)
    cells = body(1.0).n_cells
    report = describe(rows)
    assert f"run_1: {cells:,} surface points, 64 volume points, {cells:,} triangles" in report
    low, high = rows[1]["surface_ranges"]["p"]
    assert -1 < low < -0.9
    assert 0.9 < high < 1
    assert json.loads((tmp_path / "store" / "report.json").read_text()) == rows


def test_patches_are_told_and_a_folder_above_the_samples_looks_like_them(folder, tmp_path):
    patches, above = tmp_path / "patches", tmp_path / "above"
    (above / "cars").mkdir(parents=True)
    for i in range(3):
        body(1.0).save(above / "cars" / f"{i}.vtp")
    report = describe(convert(above, tmp_path / "store", Options(), workers=1))
    assert f"cars: {3 * body(1.0).n_cells:,} surface points of 3 files\n" in report
    note = f"3 files became one sample; if each is one, convert {above / 'cars'}"
    assert f"note: {above / 'cars'}: {note}" in report
    body(1.0).save(folder / "run_1" / "wheel.vtp")
    report = describe(convert(folder, patches, Options(), workers=1))
    assert "surface points of 2 files" in report
    assert "note" not in report


def test_other_options_convert_again_and_say_so(folder, tmp_path):
    convert(folder, tmp_path / "store", Options(), workers=1)
    rows = convert(folder, tmp_path / "store", Options(surface_fields=("p",)), workers=1)
    assert "note: run_1, run_2: unchanged, but were converted with other options" in describe(rows)
    assert rows[-1]["field_names"]["surface"] == ["p"]
    again = convert(folder, tmp_path / "store", Options(surface_fields=("p",)), workers=1)
    assert "note" not in describe(again)


# Bad samples -------------------------------------------------------------------------------------


def cut(own):
    path = own / "boundary.vtp"
    path.write_bytes(path.read_bytes()[:500])


def without_field(own):
    body(1.0, ["p"]).save(own / "boundary.vtp")


def other_components(own):
    mesh = body(1.0, ["p"])
    mesh.cell_data["tau"] = np.ones((mesh.n_cells, 2))
    mesh.save(own / "boundary.vtp")


def not_finite(own):
    mesh = body(1.0)
    mesh.cell_data["p"][0] = np.nan
    mesh.save(own / "boundary.vtp")


def numbers(content):
    def make(own):
        (own / "parameters.json").write_text(content)

    return make


def no_triangles(own):
    (own / "body.stl").write_bytes(bytes(84))


def two_kinds_of_patches(own):
    body(1.0, ["p"]).save(own / "wheel.vtp")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut, "boundary.vtp: expected a readable .vtp file; got"),
        (without_field, "before, p, tau_x, tau_y, tau_z of a surface and U_x, U_y, U_z of a "),
        (other_components, "run_2: expected the fields of the samples before"),
        (not_finite, "boundary.vtp: field 'p': expected finite values; got 1 that are not"),
        (numbers("{"), "parameters.json: expected a JSON file of numbers; got"),
        (numbers("[1]"), "parameters.json: expected names and numbers; got list"),
        (numbers('{"a": "b"}'), "parameters.json: 'a': expected a finite number; got 'b'"),
        (numbers('{"a": NaN}'), "parameters.json: 'a': expected a finite number; got nan"),
        (no_triangles, "body.stl: expected a"),
        (two_kinds_of_patches, "wheel.vtp: expected the fields of boundary.vtp"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_bad_sample_is_named_and_the_others_are_converted(spoil, message, folder, tmp_path):
    spoil(folder / "run_2")
    rows = convert(folder, tmp_path / "store", Options(), workers=1)
    assert Store(tmp_path / "store").names == ("run_1",)
    assert "error" not in rows[0]
    assert message in rows[1]["error"]
    assert "\n" not in rows[1]["error"]
    assert f"error: {rows[1]['error']}" in describe(rows)


def test_missing_field_is_named_with_those_that_are_there(folder, tmp_path):
    options = Options(surface_fields=("p", "q"))
    rows = convert(folder, tmp_path / "store", options, workers=1)
    for row in rows:
        assert "boundary.vtp: expected a field 'q'; has 'p', 'tau'" in row["error"]


def test_equal_errors_are_one_line(folder, tmp_path):
    report = describe(convert(folder, tmp_path / "store", Options(("q",)), workers=1))
    assert report.count("error:") == 1
    assert report.endswith("has 'p', 'tau' (likewise run_2)")


def test_no_store_is_left_where_nothing_was_converted(folder, tmp_path):
    convert(folder, tmp_path / "new", Options(("q",)), workers=1)
    assert not (tmp_path / "new").exists()
    convert(folder, tmp_path / "store", Options(), workers=1)
    convert(folder, tmp_path / "store", Options(("q",)), workers=1)
    assert Store(tmp_path / "store").names == ("run_1", "run_2")


def test_full_disk_is_named(folder, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    monkeypatch.setattr(conversion, "write_sample", full)
    rows = convert(folder, tmp_path / "store", Options(), workers=1)
    assert rows[0]["error"] == "run_1: No space left on device"


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "experiments.convert", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_command_ends_with_one_if_a_sample_is_bad_and_two_if_all_are(folder, tmp_path):
    cut(folder / "run_1")
    done = run(folder, tmp_path / "store", "--workers", 1)
    assert (done.returncode, "run_2:" in done.stdout) == (1, True)
    cut(folder / "run_2")
    done = run(folder, tmp_path / "other", "--workers", 1)
    assert done.returncode == 2
    assert "expected samples that can be converted; got none" in done.stderr
    done = run(tmp_path / "nothing", tmp_path / "third")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "expected a folder of simulation files; there is none" in done.stderr
    done = run(folder / "run_1" / "body.stl", tmp_path / "third")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "expected a folder of simulation files; got a file" in done.stderr


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"a": 1' + "0" * 400 + "}", "'a': expected a finite number"),
        ("[" * 100_000, "expected a JSON file of numbers"),
        ('{"surface_field_names": 3}', "expected another name"),
        ('{"complete": 0}', "expected another name"),
    ],
    ids=["huge", "deep", "names", "reserved"],
)
def test_numbers_that_are_none_stop_their_sample_alone(text, what, folder, tmp_path):
    (folder / "run_1" / "parameters.json").write_text(text)
    bad, good = convert(folder, tmp_path / "store", Options(), workers=1)
    assert what in bad["error"]
    assert "\n" not in bad["error"]
    assert len(bad["error"]) < 300 + len(str(folder))
    assert "error" not in good


def test_samples_that_the_folder_lost_are_told(folder, tmp_path):
    convert(folder, tmp_path / "store", Options(), workers=1)
    shutil.rmtree(folder / "run_1")
    rows = convert(folder, tmp_path / "store", Options(), workers=1)
    assert "run_1: is not in" in describe(rows)
    assert Store(tmp_path / "store").names == ("run_1", "run_2")


def test_changed_blocks_are_converted_again(tmp_path):
    (tmp_path / "files").mkdir()
    blocks = pyvista.MultiBlock([body(1.0), body(2.0)])
    blocks.save(tmp_path / "files" / "a.vtm")
    (before,) = convert(tmp_path / "files", tmp_path / "store", Options(), workers=1)
    first = min((tmp_path / "files" / "a").iterdir())
    mesh = pyvista.read(first)
    mesh.cell_data["p"] = np.full(mesh.n_cells, 99, np.float32)
    mesh.save(first)
    (after,) = convert(tmp_path / "files", tmp_path / "store", Options(), workers=1)
    assert before["surface_ranges"]["p"][1] < 99 == after["surface_ranges"]["p"][1]


def test_a_second_conversion_into_a_store_is_refused(folder, tmp_path):
    store = tmp_path / "store"
    convert(folder, store, Options(), workers=1)
    with conversion._only_one_into(store), pytest.raises(ValueError, match="no other conversion"):
        convert(folder, store, Options(), workers=1)


def test_leftovers_of_a_name_with_brackets_go(tmp_path):
    (tmp_path / "files").mkdir()
    body(1.0).save(tmp_path / "files" / "a[1].vtp")
    for _ in range(2):
        convert(tmp_path / "files", tmp_path / "store", Options(), workers=1)
        os.utime(tmp_path / "files" / "a[1].vtp")
    left = [path.name for path in (tmp_path / "store").iterdir() if "partial" in path.name]
    assert left == []
