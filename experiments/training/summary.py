"""What a training ends with: its errors on the test split, in words, as JSON and as a picture."""

import importlib.metadata
import sys
from typing import Any

import numpy as np
from flax import nnx

from experiments.building import describe_mesh
from experiments.files import write_json
from experiments.processes.coordination import by_first
from experiments.results.evaluation import metrics_of
from experiments.training.logs import say
from experiments.training.run import TrainingRun
from geotransolver_jax.concrete_dropout import dropout_rates
from parallel.parameters import split_weights

SUMMARY_FILE = "summary.json"
PICTURE_FILE = "predictions.png"
_PICTURED = 3


def finish(run: TrainingRun) -> dict[str, Any]:
    """Evaluates the test split, draws the picture and writes the summary.

    Args:
        run: a run that has taken its last step.

    Returns:
        What is in `summary.json`.
    """
    test = run.dataset.splits["test"]
    spread = np.linspace(0, len(test) - 1, min(_PICTURED, len(test)), dtype=int).tolist()
    result = run.split("test", spread, quantities=True)
    metrics = metrics_of(result, run.dataset)
    summary = metrics | {
        "training_seconds": round(run.seconds, 1),
        "waiting_seconds": round(run.loader.waited, 1),
        "steps": int(run.state.step),
        "best_checkpoint": run.checkpoints.best(),
        "parameters": run.parameters,
        "trained_parameters": run.tuning.rates.count(run.state.params),
        "device_mesh": describe_mesh(run.mesh),
        "versions": _versions(),
    }
    rates = _dropout_rates(run)
    if rates:
        summary["dropout_rates"] = rates

    def write() -> None:
        # Half a second to import, which no start of a run needs.
        from experiments.pictures.figures import draw_predictions

        draw_predictions(run.folder / PICTURE_FILE, run.dataset, result.predictions)
        write_json(run.folder / SUMMARY_FILE, summary)

    by_first(write)
    error = f"{summary['test_relative_l2']:.4f}{_quantities(metrics)}"
    say(
        f"{run.folder}: test relative L2 {error} on {len(test)} samples after "
        f"{summary['steps']} steps, {summary['training_seconds']:.0f} s of training; see "
        f"{SUMMARY_FILE} and {PICTURE_FILE}"
    )
    return summary


def _dropout_rates(run: TrainingRun) -> dict[str, float]:
    """The learned rates of concrete dropouts, if the model has any."""
    graph, _, rest = split_weights(run.model)
    return dropout_rates(nnx.merge(graph, run.state.evaluated_params, rest))


def _quantities(metrics: dict) -> str:
    """The coefficients of determination, for the closing line."""
    names = [name for name in metrics if name.startswith("test_r2_")]
    return "".join(
        f", R² of the {name.removeprefix('test_r2_').replace('_', ' ')} {metrics[name]:.4f}"
        for name in names
    )


def _versions() -> dict[str, str]:
    packages = ("flare-jax", "jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    versions = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions
