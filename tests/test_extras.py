"""Commands and configurations that need an extra say how it is installed."""

import sys

import pytest
from commands import call

from experiments import bodies, convert, predict, train


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (bodies.main, ["bodies"]),
        (convert.main, ["files", "store"]),
        (predict.main, ["run", "file.vtp", "--out", "out"]),
        (train.main, ["data=surface", "data.path=store", "hydra.run.dir=run"]),
    ],
    ids=["bodies", "convert", "predict", "train"],
)
def test_a_missing_extra_is_named_with_its_command(command, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pyvista", None)
    for name in [name for name in sys.modules if name.startswith("experiments.meshes")]:
        monkeypatch.delitem(sys.modules, name)
    result = call(command, *arguments)
    assert result.code == 2
    assert "expected the extra `meshes` (python -m pip install " in result.err
    assert result.err.endswith("-e '.[meshes]'); got no package pyvista\n")
    assert result.err.count("\n") == 1
