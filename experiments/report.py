"""`python -m experiments.report RUN`: one page of a run's losses, test errors and pictures.

`report.html` in the run's folder needs no other file; the metrics are written beside it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.cli import one_line_errors
from experiments.data.batch import Windows
from experiments.data.dataset import Dataset
from experiments.data.in_memory import AirfoilSplit, GridSplit
from experiments.evaluate import Evaluated, evaluate_run, parse_run
from experiments.pictures.figures import picture
from experiments.pictures.samples import render_points
from experiments.results.metrics_tables import metrics_table
from experiments.results.report_pages import ReportContent, write_report
from experiments.training.logs import read_log

REPORT_FILE = "report.html"


def best_median_worst(errors: Sequence[float]) -> list[int]:
    """The samples of least, middle and greatest error, without repetitions."""
    order = np.argsort(errors, kind="stable")
    return list(dict.fromkeys(int(order[i]) for i in (0, (len(order) - 1) // 2, -1)))


def pictures_of(evaluated: Evaluated) -> list[tuple[str, bytes]]:
    """Captions and pictures of the samples whose predictions were kept."""
    dataset, pictures = evaluated.dataset, []
    names = dataset.splits["test"].names
    errors = list(evaluated.sample_errors.values())
    ranks = dict(zip(best_median_worst(errors), ("best", "median", "worst"), strict=False))
    for index, fields in evaluated.result.predictions.items():
        caption = f"{ranks[index]}: {names[index]}, relative L2 {errors[index]:.4f}"
        drawn = _pictures_of_sample(dataset, index, fields, names[index])
        pictures += [(f"{caption}{rest}", png) for rest, png in drawn]
    return pictures


def _pictures_of_sample(
    dataset: Dataset, index: int, fields: Any, name: str
) -> Iterator[tuple[str, bytes]]:
    split = dataset.splits["test"]
    if isinstance(split, AirfoilSplit | GridSplit):
        yield "", picture(dataset, {index: fields})
        return
    streams = dataset.description.streams
    sample = split.read(index, Windows((slice(None),) * len(streams)))
    for stream, cloud, predicted in zip(streams, sample.clouds, fields, strict=True):
        positions = cloud.embedding if cloud.positions is None else cloud.positions
        # Samples of a split have targets.
        target: Any = cloud.target
        for i, field in enumerate(stream.fields):
            png = render_points(
                positions[:, :3],
                target[:, i],
                predicted[:, i],
                field=field,
                surface=stream.kind == "surface",
                title=name,
            )
            yield f", {field}", png


def report(folder: Path, overrides: list[str], which: str) -> Evaluated:
    """Evaluates a run and writes its page and its metrics; arguments as `evaluate_run`."""
    evaluated = evaluate_run(folder, overrides, which, best_median_worst)
    if jax.process_index() == 0:
        config, facts = evaluated.config, evaluated.facts
        content = ReportContent(
            title=f"{config.data.name} with {config.model.name}",
            facts={
                "run": str(folder),
                "model": config.model.name,
                "parameters": f"{facts['parameters']:,}",
                "trained": f"{facts['step']:,} of {config.train.steps:,} steps",
                "device mesh": facts["device_mesh"],
                "test samples": str(len(evaluated.sample_errors)),
            },
            metrics=evaluated.fields,
            quantities=evaluated.result.quantities,
            sample_names=list(evaluated.sample_errors),
            log=read_log(folder),
            sample_errors=evaluated.sample_errors,
            pictures=pictures_of(evaluated),
        )
        evaluated.write(folder)
        write_report(folder / REPORT_FILE, content)
    return evaluated


def main() -> None:
    """The command."""
    arguments = parse_run("report", "A page on a trained run.")
    evaluated = report(arguments.run, arguments.overrides, arguments.checkpoint)
    if jax.process_index():
        return
    print(metrics_table(evaluated.fields))
    print(f"see {arguments.run / REPORT_FILE}")


if __name__ == "__main__":
    one_line_errors(main)
