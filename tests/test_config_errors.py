"""What a configuration of a store may get wrong is said with what would be right."""

import pytest
from commands import assert_one_line, call

from experiments import evaluate, train


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.coefficients={p: pressure}", "data.coefficients: expected +data.coefficients=..., "),
        ("data.coefficients.p=pressure", "expected +data.coefficients.p=..., which adds names"),
        ("data.forces.directions={drag: [1, 0, 0]}", "expected +data.forces.directions=..., which"),
        (
            "data.streams.surface.targets=surface_fields.p",
            "expected a list, as in data.streams.surface.targets=[surface_fields.p]; got surface_",
        ),
        ("data.zzz=1", "data.path, data.validation_path, data.test_path, data.streams.*, data.geo"),
        ("data.zzz=1", "data.frame.*, data.free_stream.*, data.coefficients.*, data.forces.*, dat"),
        ("data.path=nowhere", "data.path=nowhere: expected a store, as experiments.convert makes "),
        ("data.test_path=nowhere", "data.path=store: expected a store, as experiments.convert ma"),
    ],
)
def test_a_store_that_is_asked_for_wrongly(override, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call(train.main, "data=surface", override, "hydra.run.dir=run")
    assert result.code == 2
    assert_one_line(result.err, message)


def test_a_mesh_that_is_too_large_tells_the_key(tmp_path):
    folder = f"hydra.run.dir={tmp_path / 'run'}"
    result = call(train.main, "mesh.cpu_devices=8", "mesh.points=9", folder)
    assert_one_line(result.err, "there are only 8 (cpu)", ", or set mesh.cpu_devices")


def test_a_run_is_all_that_evaluation_needs(monkeypatch):
    result = call(evaluate.main)
    assert result.code == 2
    assert result.err.endswith("the following arguments are required: run\n")
