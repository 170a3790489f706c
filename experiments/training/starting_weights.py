"""The weights of another run, from which a fine-tuning starts."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

from experiments.configuration import configs
from experiments.configuration.schema import ExperimentConfig, ModelConfig
from experiments.data.batch import Statistics
from experiments.data.description import Description
from experiments.finetuning.weight_groups import Names, names_of
from experiments.models import Model
from experiments.training.trained import restore_run
from parallel.parameters import place_parameters


def take_weights(
    experiment: ExperimentConfig, model: Model, description: Description
) -> Statistics | None:
    """Gives a model the weights of the run that it is to start from, in place.

    Adapters of that run are merged into them; where it kept a moving average, this is what is
    taken.

    Args:
        experiment: its `finetune` names the run, see `FinetuneConfig`.
        model: the model, on the mesh of the context.
        description: of the data that it will be trained on.

    Returns:
        The statistics by which that run normalized; `None` where those of the data are wanted.

    Raises:
        FileNotFoundError: there is no run or no checkpoint.
        ValueError: no run is named; or the weights, or the statistics, do not fit.
    """
    config = experiment.finetune
    if config.start_from is None:
        raise ValueError("finetune.start_from: expected the folder of a run; got none")
    run = Path(config.start_from)
    trained, of_run = restore_run(run, config.checkpoint)
    given = flatten_dict(trained.state.evaluated_params)
    params = flatten_dict(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    other = _other_model(run, experiment.model)
    _refuse_more(run, given, params, other)
    named = {path: _names(path, leaf) for path, leaf in params.items()}
    names = Names(name for of in named.values() for name in of)
    fresh = names.matched("finetune.reset", config.reset)
    for path, leaf in params.items():
        kept = [name not in fresh for name in named[path]]
        if not any(kept):
            continue
        if path not in given or given[path].shape != leaf.shape:
            got = given[path].shape if path in given else "none"
            raise ValueError(
                f"finetune.start_from={run}: expected {named[path][kept.index(True)]} in an array "
                f"of shape {leaf.shape}, or its name in finetune.reset; got {got}{other}"
            )
        new = given[path].astype(leaf.dtype)
        if not all(kept):
            new = jnp.stack([(new if keep else leaf)[i] for i, keep in enumerate(kept)])
        params[path] = new
    nnx.update(model, unflatten_dict(params))
    place_parameters(model)
    if config.normalization == "data":
        return None
    scaled, wanted = ((of.fields, of.widths()) for of in (of_run, description))
    if scaled != wanted:
        raise ValueError(
            f"finetune.normalization: expected data, since {run} is of other quantities, {scaled} "
            f"instead of {wanted}; got run"
        )
    return trained.state.statistics


def _other_model(run: Path, model: ModelConfig) -> str:
    """In which arguments the model of a run is another one, for an error."""
    there, here = (asdict(of) for of in (configs.load(run).model, model))
    changed = [
        f"model.{name} is {here.get(name)} here and {there.get(name)} there"
        for name in here.keys() | there.keys()
        if here.get(name) != there.get(name)
    ]
    return "".join(f"; {text}" for text in sorted(changed))


def _refuse_more(run: Path, given: dict, params: dict, other: str) -> None:
    more = [name for path in given if path not in params for name in _names(path, given[path])]
    if more:
        raise ValueError(
            f"finetune.start_from={run}: expected the weights of this model; got also "
            f"{more[0]}{other}"
        )


def _names(path: tuple[Any, ...], leaf: Array) -> list[str]:
    return names_of(path, leaf.shape)
