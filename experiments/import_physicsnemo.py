"""`python -m experiments.import_physicsnemo MODEL.mdlus OUT`: a run with weights of PhysicsNeMo.

The run is one of the data that the overrides name, before its first step: it can be evaluated,
predicted with, and trained on. The file is read without PyTorch, and nothing of it is run.
"""

import argparse
import contextlib
import dataclasses
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import jax
import numpy as np
from flax import nnx
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.building import build_model, count_parameters, make_device_mesh
from experiments.cli import one_line_errors
from experiments.configuration import configs
from experiments.configuration.errors import explain, known_keys
from experiments.configuration.schema import ExperimentConfig
from experiments.data.batch import Scale, Statistics
from experiments.data.batches import Loader
from experiments.data.dataset import Dataset, statistics_like
from experiments.data.description import Description
from experiments.datasets import load_dataset
from experiments.finetuning.tuning import Tuning
from experiments.messages import one_line
from experiments.models import Model
from experiments.physicsnemo import names as physicsnemo_names
from experiments.physicsnemo.arguments import (
    check_grid,
    check_widths,
    choice,
    model_arguments,
    model_settings,
)
from experiments.physicsnemo.files import Checkpoint, read_checkpoint
from experiments.physicsnemo.weights import load_state_dict
from experiments.training.checkpoints import Checkpoints
from experiments.training.optimizer import make_optimizer
from experiments.training.steps import initial_state

NORMALIZATIONS = ("data", "identity")


def import_checkpoint(
    path: Path, out: Path, overrides: Sequence[str] = (), normalization: str = "data"
) -> tuple[ExperimentConfig, int]:
    """Makes a run of a checkpoint.

    Args:
        path: the `.mdlus` file.
        out: folder of the run; made, or empty of runs.
        overrides: of the configuration, as `experiments.train` takes them; not of the model's
            arguments, which the file has.
        normalization: `data`, statistics of the training split as in training; or `identity`, for
            weights that were trained on data that is scaled already.

    Returns:
        The run's configuration, and its number of weights.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or of a model that there is not here or that is not one of
            the data; an override is not valid; or the folder holds a run.
    """
    if (out / configs.CONFIG_FILE).exists() or (out / "checkpoints").exists():
        raise ValueError(f"{out}: expected a folder without a run; got one with a run in it")
    checkpoint = read_checkpoint(path)
    with _naming(path):
        settings = model_settings(checkpoint.model, checkpoint.arguments)
        _check_layers(checkpoint.tensors, settings["n_layers"])
    config = run_config(checkpoint, settings, overrides)
    mesh, dataset = make_device_mesh(config.mesh), load_dataset(config.data)
    with jax.set_mesh(mesh):
        with _naming(path):
            model = fitted_model(checkpoint, config, dataset.description)
        _write_run(out, config, model, dataset, normalization)
    return config, count_parameters(nnx.state(model, nnx.Param))


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors within are the file's."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {one_line(error)}") from error


def run_config(
    checkpoint: Checkpoint, settings: Mapping[str, Any], overrides: Sequence[str]
) -> ExperimentConfig:
    """The configuration of a run of a checkpoint's model.

    Args:
        checkpoint: the checkpoint.
        settings: what it says of the model, see `model_settings`.
        overrides: of the rest.

    Raises:
        ValueError: an override is not valid.
    """
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if key in {"model", *(f"model.{name}" for name in settings)}:
            raise ValueError(f"{override}: expected no override of what the file's args.json says")
        if key == "finetune.start_from":
            raise ValueError(f"{override}: expected no other weights than those of the file")
    plain = _composed([f"model={choice(checkpoint.model, settings)}", *overrides])
    plain["model"] |= settings
    return configs.typed(OmegaConf.create(plain))


def _composed(overrides: list[str]) -> dict[str, Any]:
    configs.register_schemas()
    with hydra.initialize_config_dir(str(configs.CONFIG_DIR), version_base="1.3"):
        try:
            composed: Any = OmegaConf.to_container(hydra.compose("config", overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(explain(error, known_keys(overrides))) from error
    return composed


def fitted_model(checkpoint: Checkpoint, config: ExperimentConfig, data: Description) -> Model:
    """The model of a run, with the weights of a checkpoint, on the mesh of the context.

    Raises:
        ValueError: the model is one of other data, or the weights are not its own.
    """
    check_grid(checkpoint.arguments, data)

    def build() -> Model:
        return build_model(config.model, data, config.train.seed)

    # Shapes first: what the arguments ask for may be more than there is memory.
    shapes = nnx.eval_shape(build)
    check_widths(checkpoint.arguments, model_arguments(shapes, config.model))
    _check_number(shapes, checkpoint.tensors)
    model = build()
    load_state_dict(model, checkpoint.tensors)
    for entry in physicsnemo_names.entries(model):
        if not np.isfinite(checkpoint.tensors[entry.name]).all():
            raise ValueError(f"model.pt: expected finite weights; got others in {entry.name}")
    return model


def _write_run(
    out: Path, config: ExperimentConfig, model: Model, dataset: Dataset, normalization: str
) -> None:
    identity = normalization == "identity"
    state = initial_state(
        model,
        make_optimizer(config.optimizer, config.train.steps),
        identity_statistics(dataset) if identity else dataset.statistics(),
        config.train.seed,
        average=config.optimizer.ema_decay is not None,
        tuning=Tuning(config.finetune, model),
    )
    loader = Loader(
        dataset.splits["train"],
        config.train.batch_size,
        config.optimizer.accumulate,
        config.train.seed,
        config.train.loader_threads,
        model.structured_shape,
    )
    extra = {
        "loader": loader.position,
        "seconds": 0.0,
        "waited": 0.0,
        "config": dataclasses.asdict(config),
    }
    out.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(out, config.train.keep)
    problems = checkpoints.save(0, state, extra, None)
    problem = checkpoints.settle()
    checkpoints.close()
    if problems or problem:
        raise ValueError(problem or problems[0])
    # Last: a folder with a configuration and no checkpoint would train from random weights.
    dataset.description.save(out)
    configs.save(config, out)


def identity_statistics(dataset: Dataset) -> Statistics:
    """Mean 0 and deviation 1 of everything."""
    return jax.tree.map(
        lambda scale: Scale(
            np.zeros(scale.mean.shape, np.float32), np.ones(scale.deviation.shape, np.float32)
        ),
        statistics_like(dataset.description),
        is_leaf=lambda node: isinstance(node, Scale),
    )


def _check_layers(tensors: Mapping[str, np.ndarray], layers: int) -> None:
    """Each block is built, were it only in shapes."""
    blocks = {int(m[1]) for m in (re.match(r"blocks\.(\d{1,9})\.", name) for name in tensors) if m}
    held = max(blocks, default=-1) + 1
    if held != layers:
        raise ValueError(
            f"args.json: n_layers: expected {held}, as model.pt has blocks; got {layers}"
        )


def _check_number(shapes: Model, tensors: Mapping[str, np.ndarray]) -> None:
    """What differs a little is named tensor by tensor when the weights are loaded."""
    wanted = sum(math.prod(entry.shape) for entry in physicsnemo_names.entries(shapes))
    held = sum(tensor.size for tensor in tensors.values())
    if wanted > 4 * held:
        raise ValueError(
            f"args.json: expected a model of the {held} weights of model.pt; got one of {wanted}"
        )


def _to_go_on(out: Path, config: ExperimentConfig, overrides: Sequence[str]) -> str:
    """The command that trains the run."""
    model = dataclasses.asdict(config.model)
    name = model.pop("name")
    composed = _composed([f"model={name}", *overrides])["model"]
    changed = [
        f"model.{key}={_value(value)}" for key, value in model.items() if value != composed[key]
    ]
    words = [f"hydra.run.dir={out}", f"model={name}", *changed, *overrides]
    return shlex.join(["python", "-m", "experiments.train", *words])


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_value, value))}]"
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.import_physicsnemo",
        description="Makes a run of a checkpoint of PhysicsNeMo.",
    )
    parser.add_argument("model", type=Path, help="a .mdlus file")
    parser.add_argument("out", type=Path, help="the run's folder, which is made")
    parser.add_argument("overrides", nargs="*", help="as of experiments.train: data=darcy ...")
    parser.add_argument(
        "--normalization",
        choices=NORMALIZATIONS,
        default="data",
        help="statistics of the training split, or none for data that is scaled already",
    )
    arguments = parser.parse_intermixed_args()
    config, parameters = import_checkpoint(
        arguments.model, arguments.out, arguments.overrides, arguments.normalization
    )
    print(f"{arguments.out}: {config.model.name} with {parameters:,} parameters, at step 0")
    print(f"to train it: {_to_go_on(arguments.out, config, arguments.overrides)}")


if __name__ == "__main__":
    one_line_errors(main)
