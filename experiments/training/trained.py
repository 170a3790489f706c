"""A trained run, brought back from its folder."""

import sys
from pathlib import Path
from typing import NamedTuple

import jax
from flax import nnx

from experiments.building import build_model
from experiments.configuration import configs
from experiments.configuration.schema import ExperimentConfig
from experiments.data.dataset import statistics_like
from experiments.data.description import Description
from experiments.finetuning.tuning import Tuning
from experiments.formats.limits import require_room
from experiments.models import Model
from experiments.training.checkpoints import Checkpoints
from experiments.training.optimizer import make_optimizer
from experiments.training.steps import TrainState, abstract_state
from parallel.parameters import split_weights


class Trained(NamedTuple):
    """A model and its weights on the mesh of the context.

    Attributes:
        model: with weights of no meaning.
        state: without the optimizer's state, which may be twice the weights.
        step: optimizer steps taken.
        best: step of the best checkpoint.
    """

    model: Model
    state: TrainState
    step: int
    best: int | None

    def with_weights(self) -> Model:
        """The model with the weights that are evaluated, in evaluation mode."""
        graph, _, rest = split_weights(self.model)
        model = nnx.merge(graph, self.state.evaluated_params, rest)
        model.eval()
        return model


def restore(folder: Path, config: ExperimentConfig, data: Description, which: str) -> Trained:
    """Reads a checkpoint of a run, onto the mesh of the context.

    Args:
        folder: the run's folder.
        config: its configuration.
        data: description of its data.
        which: `last` or `best` checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is damaged or of another model.
    """

    def build() -> Model:
        return build_model(config.model, data, config.train.seed)

    # Shapes first: what the files of a run ask for may be more than there is memory.
    shapes = jax.tree.leaves(nnx.state(nnx.eval_shape(build), nnx.Param))
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in shapes)
    require_room(folder, "a model with weights", needed)
    model = build()
    checkpoints = Checkpoints(folder, read_only=True)
    like = abstract_state(
        model,
        make_optimizer(config.optimizer, config.train.steps),
        statistics_like(data),
        config.train.seed,
        average=config.optimizer.ema_decay is not None,
        shard=config.mesh.shard_parameters,
        tuning=Tuning(config.finetune, model),
    )
    like = like._replace(optimizer=None)
    if which == "best":
        step = checkpoints.best()
        if step is None:
            raise FileNotFoundError(f"{folder}: has no checkpoint yet")
        state, _ = checkpoints.restore(step, like)
    else:
        step, state, _, problems = checkpoints.restore_newest(like)
        for problem in problems:
            print(f"{problem}; the one before it is used", file=sys.stderr)
    return Trained(model, state, step, checkpoints.best())


def restore_run(run: Path, which: str) -> tuple[Trained, Description]:
    """A run on one device, whatever mesh it was trained on; its data is not needed.

    Args:
        run: the run's folder.
        which: `last` or `best` checkpoint.

    Raises:
        FileNotFoundError: there is no run or no checkpoint.
        ValueError: the checkpoint is damaged or of another model.
    """
    config = configs.load(run)
    if hasattr(config.model, "attention_backend"):
        # A fused kernel is no part of what can be exported; XLA computes the same.
        config.model.attention_backend = "xla"
    description = Description.load(run)
    return restore(run, config, description, which), description
