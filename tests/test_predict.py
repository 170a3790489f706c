"""A run predicts on files that it has never seen, in any format, and reports on itself."""

import csv
import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from commands import assert_one_line, call, start, wait

pyvista = pytest.importorskip("pyvista")
pytest.importorskip("zarr")

from experiments import convert, evaluate, predict, predicting, report, train  # noqa: E402
from experiments.meshes.sample_arrays import StoredSample  # noqa: E402

TINY = ["model.n_layers=2", "model.n_hidden=16", "model.n_head=2", "model.slice_num=4"]
STEPS = ["train.steps=2", "train.checkpoint_every=2", "train.batch_size=2"]
SPEED, DENSITY = 30.0, 1.2
DYNAMIC = 0.5 * DENSITY * SPEED**2


def body(radius: float):
    return pyvista.Sphere(radius=radius, theta_resolution=10, phi_resolution=8)


def pressure(points: np.ndarray, radius: float) -> np.ndarray:
    """That on a sphere in an ideal flow, in Pa."""
    return (DYNAMIC * (1 - 2.25 * (1 - (points[:, 0] / radius) ** 2))).astype(np.float32)


def write_sample(folder: Path, radius: float) -> None:
    """A surface with pressure on cells, a volume with velocity on points, an STL and numbers."""
    folder.mkdir(parents=True)
    surface = body(radius)
    surface.cell_data["p"] = pressure(np.asarray(surface.cell_centers().points), radius)
    surface.save(folder / "boundary.vtp")
    body(radius).save(folder / "body.stl")
    grid = pyvista.ImageData(dimensions=(6, 5, 4), spacing=(1, 1, 1), origin=(-2.5, -2, -1.5))
    volume = grid.cast_to_unstructured_grid()
    volume.point_data["U"] = (SPEED * np.cos(volume.points * radius)).astype(np.float32)
    volume.save(folder / "volume.vtu")
    numbers = {"stream_velocity": SPEED, "air_density": DENSITY, "radius": radius}
    (folder / "parameters.json").write_text(json.dumps(numbers))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Eight samples as files and as a store."""
    place = tmp_path_factory.mktemp("predict")
    for i in range(8):
        write_sample(place / "files" / f"run_{i}", 0.5 + 0.05 * i)
    result = call(convert.main, place / "files", place / "store", "--workers", "1")
    assert result.code == 0, result.err
    return place


def trained(place: Path, name: str, *overrides: str) -> Path:
    run = place / name
    overrides = [f"data.path={place / 'store'}", *overrides, *TINY, *STEPS]
    result = call(train.main, "data.test=3", *overrides, f"hydra.run.dir={run}")
    assert result.code == 0, result.err
    return run


FLOW = [
    "data.free_stream.density=air_density",
    "data.free_stream.velocity=stream_velocity",
    "data.global_embedding=[radius]",
]


@pytest.fixture(scope="module")
def surface_run(place) -> Path:
    forces = ["data.forces.pressure=p", "+data.forces.directions={drag: [1, 0, 0]}"]
    coefficients = "+data.coefficients={p: pressure}"
    options = ["model=flare", "data=surface", coefficients, *FLOW, *forces]
    return trained(place, "surface_run", *options)


@pytest.fixture(scope="module")
def both_run(place) -> Path:
    options = ["model=geotransolver", "data=surface_volume", "data.resolution=40", *FLOW]
    dropout = ["model.concrete_dropout=true", "model.dropout=0.3"]
    return trained(place, "both_run", *options, *dropout)


def predicted(run: Path, out: Path, *arguments) -> list[dict]:
    result = call(predict.main, run, *arguments, "--out", out)
    assert result.code == 0, result.err
    return json.loads((out / predicting.SUMMARY).read_text())["files"]


def test_a_mesh_is_written_again_with_its_prediction_and_error(place, surface_run, tmp_path):
    file = place / "files" / "run_3" / "boundary.vtp"
    (row,) = predicted(surface_run, tmp_path, file)
    before, after = pyvista.read(file), pyvista.read(tmp_path / "boundary.vtp")
    np.testing.assert_array_equal(after.points, before.points)
    np.testing.assert_array_equal(after.faces, before.faces)
    np.testing.assert_array_equal(after.cell_data["p"], before.cell_data["p"])
    error = after.cell_data["p_pred"] - after.cell_data["p"]
    # Pressures of hundreds of Pa, in float32.
    np.testing.assert_allclose(after.cell_data["p_error"], error, atol=1e-3)
    relative = np.linalg.norm(error) / np.linalg.norm(after.cell_data["p"])
    assert row["relative_l2"]["p"] == pytest.approx(relative, rel=1e-4)
    # In Pa, though the run learned coefficients.
    assert np.abs(after.cell_data["p_pred"]).mean() > 10
    # The drag of a sphere in an ideal flow.
    assert row["forces"]["drag"][1] == pytest.approx(0, abs=1e-3)


def test_a_prediction_is_what_the_evaluation_saw(place, surface_run, tmp_path):
    result = call(evaluate.main, surface_run)
    assert result.code == 0, result.err
    with (surface_run / "samples.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    for row in rows:
        (found,) = predicted(surface_run, tmp_path, place / "store" / row["sample"])
        assert found["relative_l2"]["p"] == pytest.approx(float(row["relative_l2"]), rel=1e-4)
        drag = [float(row[f"drag_{of}"]) for of in ("predicted", "true")]
        assert found["forces"]["drag"] == pytest.approx(drag, abs=1e-5)


def test_fields_that_a_mesh_has_are_compared_where_the_run_was_trained(tmp_path):
    for i in range(4):
        mesh = body(0.5 + 0.1 * i)
        mesh.point_data["p"] = mesh.points[:, 0]
        mesh.cell_data["tau"] = np.asarray(mesh.cell_centers().points)
        (tmp_path / "files").mkdir(exist_ok=True)
        mesh.save(tmp_path / "files" / f"run_{i}.vtp")
    assert call(convert.main, tmp_path / "files", tmp_path / "store", "--workers", "1").code == 0
    run = trained(tmp_path, "run", "model=flare", "data=surface", "data.test=1")
    # Where p is alone it lies on points, yet it was trained on at the centres of cells.
    partial = pyvista.read(tmp_path / "files" / "run_1.vtp")
    partial.cell_data.clear()
    partial.save(tmp_path / "partial.vtp")
    whole, part = predicted(
        run, tmp_path / "out", tmp_path / "files" / "run_1.vtp", tmp_path / "partial.vtp"
    )
    assert list(whole["relative_l2"]) == ["p", "tau_x", "tau_y", "tau_z"]
    assert part["relative_l2"] == {"p": pytest.approx(whole["relative_l2"]["p"], rel=1e-5)}
    written = pyvista.read(tmp_path / "out" / "partial.vtp")
    assert set(written.cell_data.keys()) == {"p_pred", "p_error", "tau_pred"}
    assert not [name for name in written.point_data if name.startswith(("p_", "tau"))]


def test_an_stl_is_a_surface_without_truth(place, surface_run, tmp_path):
    files = [place / "files" / "run_3" / "body.stl", place / "files" / "run_3" / "boundary.vtp"]
    of_stl, _ = predicted(surface_run, tmp_path, *files)
    assert "relative_l2" not in of_stl
    fields = [pyvista.read(tmp_path / name).cell_data for name in ("body.vtp", "boundary.vtp")]
    assert list(fields[0]) == ["p_pred"]
    # An STL has its own corners for each triangle, in its own order of rounding.
    np.testing.assert_allclose(fields[0]["p_pred"], fields[1]["p_pred"], rtol=1e-3, atol=0.1)


@pytest.mark.parametrize("ending", [".npz", ".h5"])
def test_files_of_arrays_are_predicted_as_such(ending, place, surface_run, tmp_path):
    sample = StoredSample(place / "store" / "run_2")
    arrays = {name: sample.read(name) for name in sample.names if name.startswith("surface")}
    numbers = {name: sample.number(name) for name in ("radius", "stream_velocity", "air_density")}
    file = tmp_path / f"mine{ending}"
    if ending == ".npz":
        np.savez(file, **arrays, **numbers, surface_field_names=["p"])
    else:
        with h5py.File(file, "w") as h5:
            for name, values in arrays.items():
                h5[name] = values
            h5.attrs.update(numbers, surface_field_names=["p"])
    rows = predicted(surface_run, tmp_path / "out", file, place / "store" / "run_2")
    assert rows[0]["relative_l2"]["p"] == pytest.approx(rows[1]["relative_l2"]["p"], rel=1e-5)
    if ending == ".npz":
        found = np.load(tmp_path / "out" / "mine.npz")
    else:
        found = h5py.File(tmp_path / "out" / "mine.h5")
    stored = StoredSample(tmp_path / "out" / "run_2")
    for name in ("surface_fields", "surface_p_pred", "surface_p_error"):
        # Of the second in float32, added up in another order.
        np.testing.assert_allclose(found[name][()], stored.read(name), rtol=1e-4, atol=1e-2)
    found.close()


def test_a_folder_of_two_streams_becomes_two_meshes(place, both_run, tmp_path):
    (row,) = predicted(both_run, tmp_path, place / "files" / "run_5")
    assert row["points"] == [body(1).n_cells, 6 * 5 * 4]
    fields = {"surface/p", "volume/U_x", "volume/U_y", "volume/U_z"}
    assert set(row["relative_l2"]) == fields
    volume = pyvista.read(tmp_path / "run_5" / "volume.vtu")
    assert volume.point_data["U_pred"].shape == (120, 3)
    error = volume.point_data["U_pred"] - volume.point_data["U"]
    np.testing.assert_allclose(volume.point_data["U_error"], error, atol=1e-4)
    assert "p_pred" in pyvista.read(tmp_path / "run_5" / "boundary.vtp").cell_data


def test_parts_and_devices_change_nothing(place, both_run, tmp_path):
    file = place / "files" / "run_5"
    predicted(both_run, tmp_path / "a", file)
    predicted(both_run, tmp_path / "b", file, "mesh.points=4", "--points-at-once", "16")
    for name, of, field in (("volume.vtu", "point_data", "U"), ("boundary.vtp", "cell_data", "p")):
        a, b = (getattr(pyvista.read(tmp_path / out / "run_5" / name), of) for out in "ab")
        scale = np.abs(a[f"{field}_pred"]).max()
        np.testing.assert_allclose(a[f"{field}_pred"], b[f"{field}_pred"], atol=2e-6 * scale)


def test_processes_predict_what_one_does(place, both_run, tmp_path):
    files = [place / "files" / f"run_{i}" for i in (5, 6)]
    options = ["--save-state", "--points-at-once", "16", "--mc-dropout-samples", "2"]
    alone = predicted(both_run, tmp_path / "a", *files, "mesh.points=4", *options)
    process = start(
        *("-m", "experiments.launch", "--processes", 2, "--devices-per-process", 2, "--"),
        *("predict", both_run, *files, "mesh.points=4", *options, "--out", tmp_path / "b"),
    )
    result = wait(process, 200)
    assert result.code == 0, result.err
    told = [line for line in result.out.splitlines() if " points in " in line]
    assert [line.partition(" points in ")[0] for line in told] == [
        f"[0] {row['file']}: {sum(row['points']):,}" for row in alone
    ]
    summary = json.loads((tmp_path / "b" / predicting.SUMMARY).read_text())
    assert summary["device_mesh"].endswith("(4 cpu devices of 2 processes)")
    for expected, row in zip(alone, summary["files"], strict=True):
        assert row["relative_l2"] == pytest.approx(expected["relative_l2"], rel=1e-5)
    for name, of, field in (("volume.vtu", "point_data", "U"), ("boundary.vtp", "cell_data", "p")):
        a, b = (getattr(pyvista.read(tmp_path / out / "run_6" / name), of) for out in "ab")
        for part in ("pred", "std"):
            scale = np.abs(a[f"{field}_{part}"]).max()
            np.testing.assert_allclose(
                a[f"{field}_{part}"], b[f"{field}_{part}"], atol=1e-5 * scale
            )
    states = [np.load(tmp_path / out / "run_6.state.npz") for out in "ab"]
    for name in states[0].files:
        np.testing.assert_allclose(states[1][name], states[0][name], rtol=1e-4, atol=1e-5)


def test_further_points_are_predicted_from_a_state(place, surface_run, tmp_path):
    file = place / "files" / "run_3" / "boundary.vtp"
    predicted(surface_run, tmp_path / "a", file, "--save-state")
    whole = pyvista.read(tmp_path / "a" / "boundary.vtp")
    half = pyvista.read(file).extract_cells(range(20)).extract_surface(algorithm=None)
    half.save(tmp_path / "boundary.vtp")
    (tmp_path / "parameters.json").write_text((file.parent / "parameters.json").read_text())
    state = tmp_path / "a" / "boundary.state.npz"
    # The whole body's centroid would be its own: this run has no frame.
    predicted(surface_run, tmp_path / "b", tmp_path / "boundary.vtp", "--state", state)
    some = pyvista.read(tmp_path / "b" / "boundary.vtp").cell_data["p_pred"]
    np.testing.assert_allclose(some, whole.cell_data["p_pred"][:20], rtol=1e-4, atol=1e-2)


def test_draws_of_dropout_give_a_deviation(place, both_run, tmp_path):
    file = place / "files" / "run_5"
    predicted(both_run, tmp_path, file, "--mc-dropout-samples", "3")
    volume = pyvista.read(tmp_path / "run_5" / "volume.vtu").point_data
    assert volume["U_std"].shape == (120, 3)
    assert volume["U_std"].min() > 0


def test_a_run_reports_on_itself(both_run):
    result = call(report.main, both_run)
    assert result.code == 0, result.err
    page = (both_run / report.REPORT_FILE).read_text()
    assert "http://" not in page
    assert "https://" not in page
    for part in ("surface/p", "volume/U_x", "best: ", "worst: ", "image/png;base64"):
        assert part in page
    table = json.loads((both_run / "metrics.json").read_text())
    assert [row["field"] for row in table][-1] == "total"
    assert "total" in result.out


# Bad input ---------------------------------------------------------------------------------------


def refused(run: Path, out: Path, *arguments) -> str:
    before = set(out.glob("*"))
    result = call(predict.main, run, *arguments, "--out", out)
    assert result.code == 2
    assert_one_line(result.err, "expected", "got")
    assert set(out.glob("*")) == before
    return result.err


def test_files_that_cannot_be_predicted_are_named(place, surface_run, both_run, tmp_path):
    out, files = tmp_path / "out", place / "files"
    nothing = call(predict.main, surface_run, files / "nothing.vtp", "--out", out).err
    assert_one_line(nothing, "nothing.vtp: expected a file")
    (tmp_path / "notes.txt").write_text("notes")
    assert "ending in one of" in refused(surface_run, out, tmp_path / "notes.txt")
    (tmp_path / "empty").mkdir()
    assert "files of one sample" in refused(surface_run, out, tmp_path / "empty")
    body(1.0).save(tmp_path / "alone.vtp")
    missing = call(predict.main, surface_run, tmp_path / "alone.vtp", "--out", out).err
    assert_one_line(missing, "alone.vtp", "radius")
    volume = files / "run_1" / "volume.vtu"
    assert_one_line(
        call(predict.main, surface_run, volume, "--out", out).err, "surface_mesh_center"
    )
    same = [files / f"run_{i}" / "boundary.vtp" for i in (1, 2)]
    assert "different names" in refused(surface_run, out, *same)
    assert "another folder" in refused(surface_run, files / "run_1", same[0])
    assert "0 for a model without dropout" in refused(
        surface_run, out, same[0], "--mc-dropout-samples", "4"
    )
    assert "at least 2" in refused(both_run, out, files / "run_1", "--mc-dropout-samples", "1")
    assert "at least 1" in refused(both_run, out, files / "run_1", "--points-at-once", "0")
    assert "at least one file" in refused(both_run, out, "mesh.points=2")
    assert "mesh.data: expected 1" in refused(both_run, out, files / "run_1", "mesh.data=2")


def test_a_run_of_other_data_is_refused(tmp_path):
    from commands import TINY as DARCY

    run = tmp_path / "darcy"
    arguments = [*DARCY, "train.steps=2", f"data.cache_dir={tmp_path / 'cache'}"]
    assert call(train.main, *arguments, f"hydra.run.dir={run}").code == 0
    assert "expected a run on a store" in refused(run, tmp_path / "out", tmp_path)


def test_samples_of_one_layout_do_not_overwrite_each_other(place, both_run, surface_run, tmp_path):
    folders = [place / "files" / f"run_{i}" for i in (1, 2)]
    rows = predicted(both_run, tmp_path / "out", *folders)
    for folder, row in zip(folders, rows, strict=True):
        written = tmp_path / "out" / folder.name / "boundary.vtp"
        assert str(written) in row["written"]
        before = pyvista.read(folder / "boundary.vtp").cell_data["p"]
        np.testing.assert_array_equal(pyvista.read(written).cell_data["p"], before)
    twins = [place / "files" / "run_3" / name for name in ("boundary.vtp", "boundary.stl")]
    body(0.65).save(twins[1])
    result = call(predict.main, surface_run, *twins, "--out", tmp_path / "twins")
    twins[1].unlink()
    assert result.code == 2
    assert_one_line(result.err, "boundary.stl: expected a file whose prediction has a name of its")


def test_a_state_of_another_run_is_refused(place, surface_run, both_run, tmp_path):
    file = place / "files" / "run_3" / "boundary.vtp"
    predicted(both_run, tmp_path / "a", place / "files" / "run_3", "--save-state")
    state = tmp_path / "a" / "run_3.state.npz"
    assert "got one of another run" in refused(surface_run, tmp_path, file, "--state", state)
    both = [file, "--state", state, "--save-state"]
    assert "neither --mc-dropout-samples nor --save-state" in refused(surface_run, tmp_path, *both)


def test_a_disk_that_is_too_small_is_one_line(place, surface_run, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    file = place / "files" / "run_3" / "boundary.vtp"
    result = call(predict.main, surface_run, file, "--out", tmp_path)
    assert result.code == 2
    assert_one_line(result.err, "No space left on device", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_images_are_predicted_as_images(place, both_run, tmp_path):
    folder = tmp_path / "image"
    write_sample(folder, 0.7)
    grid = pyvista.ImageData(dimensions=(6, 5, 4), spacing=(1, 1, 1), origin=(-2.5, -2, -1.5))
    (folder / "volume.vtu").unlink()
    grid.save(folder / "volume.vtk")
    predicted(both_run, tmp_path / "out", folder)
    written = pyvista.read(tmp_path / "out" / "image" / "volume.vtk")
    assert isinstance(written, pyvista.ImageData)
    assert "U_pred" in {*written.point_data, *written.cell_data}
