"""`python -m experiments.evaluate RUN`: the test error of a run, on any device mesh.

It is printed, and written into the run's folder: `metrics.json`, `metrics.csv`, `samples.csv`.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from experiments.building import cache_neighbors, count_parameters, describe_mesh, make_device_mesh
from experiments.cli import add_run, one_line_errors
from experiments.configuration import configs
from experiments.configuration.schema import ExperimentConfig
from experiments.data.dataset import Dataset
from experiments.data.description import Description
from experiments.datasets import load_dataset
from experiments.processes.distributed import together
from experiments.results.evaluation import SplitResult, evaluate_split, field_table, metrics_of
from experiments.results.metrics_tables import metrics_table, write_metrics
from experiments.training.steps import make_evaluation
from experiments.training.trained import restore


class Evaluated(NamedTuple):
    """A run and its errors on the test split.

    Attributes:
        config: of the run, with the changes that were asked for.
        dataset: its data.
        result: errors of all samples.
        facts: what else there is to say of the run, by name.
    """

    config: ExperimentConfig
    dataset: Dataset
    result: SplitResult
    facts: dict[str, Any]

    @property
    def fields(self) -> list[dict[str, Any]]:
        """The table of errors, field by field."""
        return field_table(self.result.errors, self.dataset.fields)

    @property
    def sample_errors(self) -> dict[str, float]:
        """Relative L2 error of each sample by its name, the mean over the fields."""
        names = self.dataset.splits["test"].names
        errors = self.result.errors.relative_l2.mean(1)
        return dict(zip(names, errors.tolist(), strict=True))

    def write(self, folder: Path) -> None:
        """Writes the metrics into a folder."""
        names = list(self.sample_errors)
        write_metrics(folder, self.fields, self.result.quantities, names, self.sample_errors)


def evaluate_run(
    folder: Path,
    overrides: list[str],
    which: str,
    pictured: Callable[[Sequence[float]], Sequence[int]] | None = None,
) -> Evaluated:
    """Evaluates the test split with the weights of a run.

    Args:
        folder: the run's folder.
        overrides: changes to its configuration, as in `mesh.points=4`.
        which: `last` or `best` checkpoint.
        pictured: chooses samples whose predictions are kept by the errors of all.

    Raises:
        FileNotFoundError: there is no run or no checkpoint.
        ValueError: the checkpoint is damaged or of another model, or the data are no longer what
            it was trained on.
    """
    config = configs.load(folder, overrides)
    with together(config.distributed):
        return _evaluate_run(folder, config, which, pictured)


def _evaluate_run(
    folder: Path,
    config: ExperimentConfig,
    which: str,
    pictured: Callable[[Sequence[float]], Sequence[int]] | None,
) -> Evaluated:
    mesh = make_device_mesh(config.mesh)
    dataset = load_dataset(config.data)
    cache_neighbors(config, dataset)
    _require_like(folder, dataset.description)
    with jax.set_mesh(mesh):
        trained = restore(folder, config, dataset.description, which)
        evaluate = make_evaluation(trained.model)

        def run(**options: Any) -> SplitResult:
            return evaluate_split(
                evaluate,
                trained.state.evaluated_params,
                trained.state.statistics,
                dataset.splits["test"],
                trained.model.structured_shape,
                config.train.batch_size,
                **options,
            )

        result = run(quantities=True)
        if pictured is not None:
            chosen = pictured(result.errors.relative_l2.mean(1))
            result = result._replace(predictions=run(samples=chosen, pictured=chosen).predictions)
    facts = {
        "step": trained.step,
        "parameters": count_parameters(nnx.state(trained.model, nnx.Param)),
        "device_mesh": describe_mesh(mesh),
    }
    return Evaluated(config, dataset, result, facts)


def _require_like(folder: Path, data: Description) -> None:
    """Refuses data of other names or widths than a run was trained on; grids may differ."""
    before = dataclasses.replace(Description.load(folder), structured_shape=data.structured_shape)
    problem = before.difference(data)
    if problem:
        raise ValueError(f"{folder}: expected data as it was trained on; got {problem}")


def evaluate(folder: Path, overrides: list[str], which: str) -> dict:
    """The metrics of a run, see `evaluation.metrics_of`; arguments as `evaluate_run`."""
    evaluated = evaluate_run(folder, overrides, which)
    return _metrics(evaluated)


def _metrics(evaluated: Evaluated) -> dict[str, Any]:
    facts = {name: evaluated.facts[name] for name in ("step", "device_mesh")}
    return metrics_of(evaluated.result, evaluated.dataset) | facts


def parse_run(command: str, description: str) -> argparse.Namespace:
    """What a command that evaluates a run is given: `run`, `overrides`, `checkpoint`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{command}", description=description
    )
    add_run(parser)
    parser.add_argument("overrides", nargs="*", default=[], help="changes, as in mesh.points=4")
    return parser.parse_intermixed_args()


def main() -> None:
    """The command."""
    arguments = parse_run("evaluate", "Test error of a trained run.")
    evaluated = evaluate_run(arguments.run, arguments.overrides, arguments.checkpoint)
    if jax.process_index():
        return
    metrics = _metrics(evaluated)
    width = max(map(len, metrics))
    for name, value in metrics.items():
        shown = f"{value:.6f}" if isinstance(value, float) else value
        print(f"{name:<{width}}  {shown}")
    print(f"\n{metrics_table(evaluated.fields)}")
    evaluated.write(arguments.run)


if __name__ == "__main__":
    one_line_errors(main)
