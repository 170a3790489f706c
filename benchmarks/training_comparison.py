"""`python -m benchmarks.training_comparison --peer PYTHON`: training beside PhysicsNeMo.

Both start from the same weights and see the same batches of Darcy flow, in float32, with the same
AdamW and loss. Ours takes the steps of `experiments.train`; the reference gets weights as a
checkpoint and batches as arrays, in an environment of its own.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
from flax import nnx
from jaxtyping import Float

from experiments.building import build_model, count_parameters
from experiments.cli import one_line_errors
from experiments.configuration.schema import (
    DarcyConfig,
    FlareConfig,
    GeoTransolverConfig,
    ModelConfig,
    OptimizerConfig,
)
from experiments.data.batch import Batch
from experiments.data.batches import Loader
from experiments.data.dataset import Dataset
from experiments.datasets import load_dataset
from experiments.files import write_atomically, write_json
from experiments.models import Model
from experiments.physicsnemo import names as physicsnemo_names
from experiments.physicsnemo.arguments import model_arguments, model_name
from experiments.physicsnemo.files import Checkpoint, write_checkpoint
from experiments.physicsnemo.weights import state_dict
from experiments.prediction import model_inputs
from experiments.training.optimizer import make_optimizer
from experiments.training.steps import initial_state, make_step

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_ROOT = Path(__file__).resolve().parents[1]
_SIZES: dict[str, Any] = dict(n_layers=4, n_hidden=64, n_head=4, slice_num=32)
MODELS = {"FLARE": FlareConfig(**_SIZES), "GeoTransolver": GeoTransolverConfig(**_SIZES)}
OPTIMIZER = OptimizerConfig(
    name="adamw", learning_rate=1e-3, weight_decay=1e-5, clip_norm=None, schedule="constant"
)
_BATCH = 4
_SEED = 0


def compare(config: ModelConfig, dataset: Dataset, steps: int, peer: Path) -> dict:
    """Losses of one model, step by step, on both sides.

    Args:
        config: the model.
        dataset: what it is trained on.
        steps: optimizer steps.
        peer: a Python that has PhysicsNeMo.

    Raises:
        ChildProcessError: the reference failed; the last line of its errors says why.
    """
    model = build_model(config, dataset.description, _SEED)
    loader = Loader(
        dataset.splits["train"], _BATCH, 1, _SEED, 1, structured_shape=model.structured_shape
    )
    batches = [next(loader)[0] for _ in range(steps)]
    with tempfile.TemporaryDirectory() as folder:
        reference = _train_reference(model, config, dataset, batches, peer, Path(folder))
    ours = _train(model, dataset, batches)
    difference = np.abs(ours - reference) / reference
    return {
        "parameters": count_parameters(nnx.state(model, nnx.Param)),
        "largest_relative_difference": float(difference.max()),
        "at_step": int(difference.argmax()) + 1,
        "ours": ours.tolist(),
        "reference": reference.tolist(),
    }


def _train(model: Model, dataset: Dataset, batches: list[Batch]) -> Float[np.ndarray, " S"]:
    optimizer = make_optimizer(OPTIMIZER, len(batches))
    state = initial_state(model, optimizer, dataset.statistics(), _SEED, average=False)
    model.train()
    step = make_step(model, optimizer, None, state)
    losses = []
    for batch in batches:
        state, metrics = step(state, (batch,))
        losses.append(float(metrics.loss))
    return np.array(losses)


def _train_reference(
    model: Model,
    config: ModelConfig,
    dataset: Dataset,
    batches: list[Batch],
    peer: Path,
    folder: Path,
) -> Float[np.ndarray, " S"]:
    checkpoint, data, losses = (
        folder / name for name in ("model.mdlus", "batches.npz", "losses.npz")
    )
    arguments = model_arguments(model, config)
    write_checkpoint(checkpoint, Checkpoint(model_name(model), arguments, state_dict(model)))
    statistics = dataset.statistics()
    inputs = [model_inputs(model, statistics, batch) for batch in batches]
    given = [name for name, value in inputs[0].items() if value is not None]
    (stream,) = statistics.streams
    arrays: dict[str, Any] = {name: np.stack([each[name] for each in inputs]) for name in given}
    np.savez(
        data,
        **arrays,
        target=np.stack([batch.streams[0].target for batch in batches]),
        **stream.target._asdict(),
        learning_rate=OPTIMIZER.learning_rate,
        weight_decay=OPTIMIZER.weight_decay,
        betas=[OPTIMIZER.beta1, OPTIMIZER.beta2],
        decayed=[entry.name for entry in physicsnemo_names.entries(model) if entry.kernel],
    )
    script = Path(__file__).with_name("training_comparison_peer.py")
    command = [peer, script, checkpoint, data, losses]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ChildProcessError(f"{peer}: {lines[-1]}")
    with np.load(losses, allow_pickle=False) as archive:
        return archive["loss"]


def draw(path: Path, results: dict[str, dict]) -> None:
    """Writes the picture of both curves of each model, and of their difference."""
    figure, axes = plt.subplots(
        2, len(results), figsize=(10, 6), sharex=True, squeeze=False, layout="constrained"
    )
    for (name, result), (curves, difference) in zip(results.items(), axes.T, strict=True):
        ours, reference = np.array(result["ours"]), np.array(result["reference"])
        steps = np.arange(1, len(ours) + 1)
        curves.plot(steps, reference, color="tab:orange", linewidth=3, label="PhysicsNeMo 2.2.2")
        curves.plot(steps, ours, color="tab:blue", linewidth=1, label="here")
        curves.set_title(name)
        curves.set_ylabel("relative L2 loss")
        curves.legend()
        # A step at which both agree to the last digit is at the foot of the axis.
        difference.semilogy(steps, np.maximum(np.abs(ours - reference) / reference, 1e-9))
        difference.set_xlabel("step")
        difference.set_ylabel("relative difference")
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=110))
    plt.close(figure)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_comparison",
        description="Training beside PhysicsNeMo, from the same weights on the same batches.",
    )
    parser.add_argument("--peer", type=Path, required=True, help="a Python that has PhysicsNeMo")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--out", type=Path, default=_ROOT / "benchmarks/results/training_comparison.json"
    )
    parser.add_argument(
        "--picture", type=Path, default=_ROOT / "docs/images/training_comparison.png"
    )
    arguments = parser.parse_args()
    data = DarcyConfig(train=_BATCH * arguments.steps, validation=1, test=1)
    dataset = load_dataset(data)
    results = {}
    for name, config in MODELS.items():
        result = results[name] = compare(config, dataset, arguments.steps, arguments.peer)
        print(
            f"{name}: loss {result['ours'][0]:.4f} to {result['ours'][-1]:.4f}, largest relative "
            f"difference {result['largest_relative_difference']:.1e}, at step {result['at_step']}"
        )
    content = {"jax": jax.__version__, "steps": arguments.steps, "batch_size": _BATCH}
    write_json(arguments.out, content | {"models": results})
    draw(arguments.picture, results)


if __name__ == "__main__":
    one_line_errors(main)
