"""`python -m experiments.export_physicsnemo RUN OUT.mdlus`: a run's weights for PhysicsNeMo.

`physicsnemo.Module.from_checkpoint` makes the model of the file. It takes and gives what ours does:
normalized values, by the statistics that are written beside it as JSON.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cli import add_run, one_line_errors
from experiments.configuration import configs
from experiments.data.batch import Statistics
from experiments.data.description import Description
from experiments.files import write_json
from experiments.physicsnemo.arguments import model_arguments, model_name
from experiments.physicsnemo.files import SUFFIX, Checkpoint, write_checkpoint
from experiments.physicsnemo.weights import state_dict
from experiments.processes.clusters import require_alone
from experiments.training.trained import restore_run


def export_run(run: Path, out: Path, which: str) -> int:
    """Writes the weights of a run as a checkpoint of PhysicsNeMo, and its statistics beside it.

    Args:
        run: the run's folder.
        out: the `.mdlus` file; the statistics have `.json` behind its name.
        which: `last` or `best` checkpoint.

    Returns:
        Bytes of the file.

    Raises:
        FileNotFoundError: there is no run, no checkpoint, or no folder for the file.
        ValueError: the checkpoint is damaged; the reference has no such model; or `out` is a
            folder or of another name.
    """
    if out.suffix != SUFFIX or out.is_dir():
        raise ValueError(
            f"{out}: expected a file {SUFFIX} to write, as PhysicsNeMo reads; got another"
        )
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out}: expected a folder to write into; got none")
    require_alone("export_physicsnemo")
    config = configs.load(run)
    trained, description = restore_run(run, which)
    model = trained.with_weights()
    arguments = model_arguments(model, config.model)
    tensors = state_dict(model, arguments.get("state_mixing_mode", "weighted"))
    write_checkpoint(out, Checkpoint(model_name(model), arguments, tensors))
    content = {"model": out.name, "run": str(run), "step": trained.step}
    write_json(Path(f"{out}.json"), content | _statistics(trained.state.statistics, description))
    return out.stat().st_size


def _statistics(statistics: Statistics, description: Description) -> dict[str, Any]:
    """Means and deviations by the names of what they are of."""

    def plain(scales: dict[str, Any]) -> dict[str, Any]:
        return {
            name: {part: np.asarray(values).tolist() for part, values in scale._asdict().items()}
            for name, scale in scales.items()
            if scale is not None
        }

    streams = {
        of.name: plain(scales._asdict()) | {"fields": list(of.fields)}
        for of, scales in zip(description.streams, statistics.streams, strict=True)
    }
    shared = plain(
        {"geometry": statistics.geometry, "global_embedding": statistics.global_embedding}
    )
    return {"statistics": {"streams": streams, **shared}, "data": dataclasses.asdict(description)}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.export_physicsnemo",
        description="Writes the weights of a run as a checkpoint of PhysicsNeMo.",
    )
    add_run(parser)
    parser.add_argument("out", type=Path, help="the file, as in darcy.mdlus")
    arguments = parser.parse_args()
    size = export_run(arguments.run, arguments.out, arguments.checkpoint)
    print(f"{arguments.out}: {size:,} bytes; its statistics are in {arguments.out}.json")


if __name__ == "__main__":
    one_line_errors(main)
