"""Optimizers and learning-rate schedules, all of them Optax's."""

from typing import Any

import jax
import optax
from jaxtyping import Array, PyTree

from experiments.configuration.schema import OPTIMIZERS, SCHEDULES, OptimizerConfig


def make_schedule(config: OptimizerConfig, peak: float, steps: int) -> optax.Schedule:
    """The learning rate as a function of the optimizer step, counted from 0.

    `one_cycle` rises by a cosine to its peak and falls to `final_fraction` of it (Smith and Topin,
    arXiv 1708.07120); `cosine` rises linearly and falls by a cosine; `constant` stays.

    Raises:
        ValueError: the schedule is unknown.
    """
    warmup = config.warmup * steps
    if config.schedule == "one_cycle":
        initial = 25
        return optax.cosine_onecycle_schedule(
            steps,
            peak,
            pct_start=max(config.warmup, 1 / steps),
            div_factor=initial,
            final_div_factor=1 / (initial * config.final_fraction)
            if config.final_fraction
            else 1e9,
        )
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0 if warmup else peak,
            peak_value=peak,
            warmup_steps=int(warmup),
            decay_steps=steps,
            end_value=peak * config.final_fraction,
        )
    if config.schedule == "constant":
        return optax.constant_schedule(peak)
    raise ValueError(
        f"optimizer.schedule: expected one of {', '.join(SCHEDULES)}; got {config.schedule!r}"
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW, or Muon for kernels with AdamW for the rest.

    Under Muon both take Nesterov's step of the momentum, as Optax does by default.

    Only kernels decay: biases, norms and latent queries have no scale to lose.

    Args:
        config: see `OptimizerConfig`.
        steps: optimizer steps of the whole training.

    Raises:
        ValueError: the optimizer or its schedule is unknown.
    """
    schedule = make_schedule(config, config.learning_rate, steps)
    if config.name == "muon":
        update = optax.contrib.muon(
            schedule,
            adam_learning_rate=make_schedule(config, config.adam_learning_rate, steps),
            weight_decay=config.weight_decay,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            muon_weight_dimension_numbers=_matrices,
        )
    elif config.name == "adamw":
        update = optax.adamw(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=_kernels,
        )
    else:
        raise ValueError(
            f"optimizer.name: expected one of {', '.join(OPTIMIZERS)}; got {config.name!r}"
        )
    if config.clip_norm is None:
        return update
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), update)


def _is_kernel(path: tuple[Any, ...]) -> bool:
    return path[-1].key == "kernel"


def _kernels(params: PyTree) -> PyTree:
    return jax.tree_util.tree_map_with_path(lambda path, _: _is_kernel(path), params)


def _matrices(params: PyTree) -> PyTree:
    """Kernels as matrices; any axis before the last two counts the blocks of a stack."""

    def dimensions(path: tuple[Any, ...], param: Array) -> Any:
        if not _is_kernel(path):
            return None
        return optax.contrib.MuonDimensionNumbers(param.ndim - 2, param.ndim - 1)

    return jax.tree_util.tree_map_with_path(dimensions, params)
