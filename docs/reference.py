"""`python docs/reference.py`: writes the pages that are made of the code.

`configuration.md` from the dataclasses of the configuration and the files of `configs/`, `code.md`
from the first lines of all files, `api/*.md` from the public names and the parsers of the commands.
A test compares the pages that are kept with what this writes.
"""

import importlib
import sys
from pathlib import Path

from docstrings import summary
from reference_code import code
from reference_commands import commands
from reference_configuration import configuration

FOLDER = Path(__file__).parent
EXPERIMENTS = (
    "experiments.data.dataset.Split",
    "experiments.data.dataset.Dataset",
    "experiments.data.in_memory.GridSplit",
    "experiments.datasets.load_dataset",
    "experiments.data.description.StreamDescription",
    "experiments.data.description.Description",
    "experiments.data.batch.Windows",
    "experiments.data.batch.Cloud",
    "experiments.data.batch.Sample",
    "experiments.data.batch.Statistics",
    "experiments.data.moments.Moments",
    "experiments.building.build_model",
    "experiments.prediction.model_inputs",
    "experiments.train.train",
    "experiments.evaluate.evaluate",
    "experiments.training.trained.restore",
    "experiments.physicsnemo.weights.load_state_dict",
)


def api(package: str, names: list[str], text: str) -> str:
    """A page of public names: a table that any reader of Markdown sees, then their docstrings."""
    lines = [
        f"# {package}",
        "",
        "<!-- Written by docs/reference.py. -->",
        "",
        text,
        "",
        "| name | in | what it is |",
        "| --- | --- | --- |",
    ]
    for name in names:
        owner, _, own = name.rpartition(".")
        found = getattr(importlib.import_module(owner), own)
        place = sys.modules[found.__module__].__name__.replace(".", "/") + ".py"
        lines.append(f"| `{name}` | `{place}` | {summary(found.__doc__)} |")
    lines += ["", "On a code host, read the docstrings in these files; the site has them below."]
    lines += [f"\n::: {name}" for name in names]
    return "\n".join(lines) + "\n"


def package_api(name: str) -> str:
    """The page of a package's public names."""
    package = importlib.import_module(name)
    return api(name, [f"{name}.{each}" for each in package.__all__], package.__doc__.strip())


def pages() -> dict[str, str]:
    """Every page that is written, by its name under `docs/`."""
    experiments = "Config-driven experiments: what a new data set or model meets, and what"
    experiments += " Python calls instead of the commands."
    return {
        "configuration.md": configuration(),
        "code.md": code(),
        "api/commands.md": commands(),
        "api/parallel.md": package_api("parallel"),
        "api/flare_jax.md": package_api("flare_jax"),
        "api/geotransolver_jax.md": package_api("geotransolver_jax"),
        "api/experiments.md": api("experiments", list(EXPERIMENTS), experiments),
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
