"""`python -m experiments.evaluate RUN`: the test error of a run, on any device mesh."""

import argparse
from pathlib import Path

import jax

from experiments import config as configs
from experiments.checkpoints import Checkpoints
from experiments.cli import one_line_errors
from experiments.data import load_dataset, statistics_like
from experiments.evaluation import evaluate_split, metrics_of
from experiments.optimizer import make_optimizer
from experiments.run import build_model, describe_mesh, make_device_mesh
from experiments.training import abstract_state, make_evaluation


def evaluate(folder: Path, overrides: list[str], which: str) -> dict:
    """Evaluates the test split with the weights of a run.

    Args:
        folder: the run's folder.
        overrides: changes to its configuration, as in `mesh.points=4`.
        which: `last` or `best` checkpoint.

    Returns:
        The metrics, see `evaluation.metrics_of`.

    Raises:
        FileNotFoundError: there is no run or no checkpoint.
        ValueError: the checkpoint is damaged or of another model.
    """
    config = configs.load(folder, overrides)
    mesh = make_device_mesh(config.mesh)
    dataset = load_dataset(config.data)
    with jax.set_mesh(mesh):
        model = build_model(config.model, dataset.description, config.train.seed)
        checkpoints = Checkpoints(folder, read_only=True)
        step = checkpoints.best() if which == "best" else checkpoints.latest()
        if step is None:
            raise FileNotFoundError(f"{folder}: has no checkpoint yet")
        like = abstract_state(
            model,
            make_optimizer(config.optimizer, config.train.steps),
            statistics_like(dataset.description),
            config.train.seed,
            average=config.optimizer.ema_decay is not None,
        )
        # The optimizer's state is not needed, and may be twice the weights.
        state, _ = checkpoints.restore(step, like._replace(optimizer=None))
        result = evaluate_split(
            make_evaluation(model),
            state.evaluated_params,
            state.statistics,
            dataset.splits["test"],
            model.structured_shape,
            config.train.batch_size,
            quantities=True,
        )
    return metrics_of(result, dataset) | {
        "step": step,
        "device_mesh": describe_mesh(mesh),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.evaluate", description="Test error of a trained run."
    )
    parser.add_argument("run", type=Path, help="the run's folder, as in runs/darcy_flare")
    parser.add_argument("overrides", nargs="*", help="changes, as in mesh.points=4")
    parser.add_argument("--checkpoint", choices=("last", "best"), default="last")
    arguments = parser.parse_args()
    metrics = evaluate(arguments.run, arguments.overrides, arguments.checkpoint)
    width = max(map(len, metrics))
    for name, value in metrics.items():
        shown = f"{value:.6f}" if isinstance(value, float) else value
        print(f"{name:<{width}}  {shown}")


if __name__ == "__main__":
    one_line_errors(main)
