"""The map of the code: what each file holds, from the first lines of the files themselves."""

import ast
import re
import tomllib
from pathlib import Path

from docstrings import summary

ROOT = Path(__file__).parents[1]
PACKAGES = ("parallel", "flare_jax", "geotransolver_jax", "experiments", "benchmarks")
_COMMAND = re.compile(r"^`python -m [^`]+`: ")

_WALK = """
## One batch, from disk to gradient

1. `experiments/datasets.py` makes the data set that the configuration names; a `Split` of it reads
   windows of samples (`experiments/meshes/dataset.py`, or `experiments/data/in_memory.py`).
2. `experiments/data/batches.py` asks, in threads, for the windows that this process holds
   (`experiments/data/placement.py`), pads them and lays them out on the device mesh
   (`parallel/placement.py`): a `Batch` (`experiments/data/batch.py`) of arrays and a mask.
3. `experiments/training/steps.py` is one compiled function of state and batch. In it,
   `experiments/prediction.py` normalizes the inputs and calls the model.
4. The model (`flare_jax/transformer.py`, `geotransolver_jax/geotransolver.py`) checks what it is
   called with (`inputs.py` beside it) and runs the blocks, compiled once whatever their number
   (`flare_jax/block.py`).
5. An attention layer maps its points into heads and sums them into latents or slices, a chunk of
   points at a time; the shards merge these (`parallel/streaming/`), and the points get them back.
   Gradients take the same way back, each reduced once.
6. `experiments/training/steps.py` takes the relative L2 of the fields, the gradient, and Optax's
   step; `experiments/training/run.py` logs, validates and saves around it.
"""


def code() -> str:
    """The page."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    lines = [
        "# Map of the code",
        "",
        "<!-- Written by docs/reference.py from the first line of each file. -->",
        "",
        "Imports run one way, which `make lint` holds: each line below may import from those under",
        "it; those with `|` between them do not know each other.",
    ]
    for contract in contracts:
        title = contract["name"].capitalize()
        lines += ["", f"{title}:", "", "```text", *contract["layers"], "```"]
    lines += [_WALK.rstrip()]
    for package in PACKAGES:
        for folder in sorted({path.parent for path in (ROOT / package).rglob("*.py")}):
            lines += _package(folder)
    return "\n".join(lines) + "\n"


def _package(folder: Path) -> list[str]:
    name = folder.relative_to(ROOT).as_posix()
    lines = ["", f"## {name}", "", _first_line(folder / "__init__.py"), ""]
    lines += ["| file | what it holds |", "| --- | --- |"]
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            lines.append(f"| `{path.name}` | {_first_line(path)} |")
    return lines


def _first_line(path: Path) -> str:
    """The first line of a docstring, without the command that it may begin with."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    line = _COMMAND.sub("", summary(text))
    return line[0].upper() + line[1:]
