"""The tutorial of the docs, its commands as they are written there, at a small size."""

import re
import shlex

import pytest
from commands import ROOT, call

pytest.importorskip("pyvista")
pytest.importorskip("zarr")

from experiments import bodies, convert, evaluate, predict, report, train

COMMANDS = {
    "experiments.bodies": (bodies.main, ["--samples=12", "--faces=150"]),
    "experiments.convert": (convert.main, ["--workers=1"]),
    "experiments.train": (
        train.main,
        [
            "model.n_layers=1",
            "model.n_hidden=16",
            "model.n_head=2",
            "model.slice_num=4",
            "train.steps=2",
            "train.checkpoint_every=2",
        ],
    ),
    "experiments.evaluate": (evaluate.main, []),
    "experiments.predict": (predict.main, []),
    "experiments.report": (report.main, []),
}


def tutorial() -> list[list[str]]:
    """The commands of the tutorial, without `python -m`."""
    text = (ROOT / "docs" / "tutorial.md").read_text()
    section = text.partition("\n## Six commands\n")[2]
    (block,) = re.findall(r"```sh\n(.*?)```", section.partition("\n## ")[0], flags=re.DOTALL)
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[2:] for line in lines if line.strip()]


def test_the_commands_of_the_tutorial_lead_to_a_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = tutorial()
    assert [name for name, *_ in commands] == list(COMMANDS)
    for name, *arguments in commands:
        main, smaller = COMMANDS[name]
        result = call(main, *arguments, *smaller)
        assert result.code == 0, f"{name}: {result.err}"
    (page,) = tmp_path.rglob("report.html")
    assert page.stat().st_size > 100_000
    import pyvista

    (mesh,) = (tmp_path / "predicted").glob("*.vtp")
    assert "pressure_pred" in pyvista.read(mesh).cell_data
