"""The values of a configuration: in which range each may be."""

import math
import sys
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from experiments.configuration.errors import flat
from experiments.configuration.schema import (
    AIRFOIL_SHAPES,
    BENCHMARKS,
    COEFFICIENTS,
    OPTIMIZERS,
    SCHEDULES,
    AirfoilConfig,
    BenchmarkConfig,
    DistributedConfig,
    ExperimentConfig,
    FinetuneConfig,
    StoreConfig,
)

_ABOVE_ZERO = (math.nextafter(0, 1), sys.float_info.max, "a positive number")
_NOT_NEGATIVE = (0, sys.float_info.max, "a number of at least 0")
_FRACTION = (0, math.nextafter(1, 0), "a number in [0, 1)")
_ATTACK = (math.nextafter(-90, 0), math.nextafter(90, 0), "an angle within 90 degrees of 0")
# JAX would take a larger seed and drop its upper bits.
_SEED = (0, 2**32 - 1, "an integer in [0, 2**32)")
# By key; without its group where every group means the same by it.
RANGES = {
    "seed": _SEED,
    "model.concrete_dropout_weight": _NOT_NEGATIVE,
    "model.scale": _ABOVE_ZERO,
    "data.train": _ABOVE_ZERO,
    "data.validation": _ABOVE_ZERO,
    "data.test": _ABOVE_ZERO,
    "data.resolution": _ABOVE_ZERO,
    "data.geometry_resolution": _ABOVE_ZERO,
    "data.points": _ABOVE_ZERO,
    "data.max_points": _ABOVE_ZERO,
    "data.surface_points": (32, sys.float_info.max, "a number of at least 32"),
    "data.angles": _ABOVE_ZERO,
    "data.min_angle": _ATTACK,
    "data.max_angle": _ATTACK,
    "optimizer.learning_rate": _ABOVE_ZERO,
    "optimizer.adam_learning_rate": _ABOVE_ZERO,
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "optimizer.beta1": _FRACTION,
    "optimizer.beta2": _FRACTION,
    "optimizer.clip_norm": _ABOVE_ZERO,
    "optimizer.warmup": _FRACTION,
    "optimizer.final_fraction": _FRACTION,
    "optimizer.accumulate": _ABOVE_ZERO,
    "optimizer.ema_decay": _FRACTION,
    "train.steps": _ABOVE_ZERO,
    "train.batch_size": _ABOVE_ZERO,
    "train.checkpoint_every": _ABOVE_ZERO,
    "train.keep": _ABOVE_ZERO,
    "train.log_every": _ABOVE_ZERO,
    "train.loader_threads": _NOT_NEGATIVE,
    "distributed.processes": _ABOVE_ZERO,
    "distributed.process": _NOT_NEGATIVE,
    "distributed.timeout": _ABOVE_ZERO,
    "distributed.heartbeat_timeout": (5, 86400, "from 5 to 86400 seconds"),
    "train.max_skipped": _NOT_NEGATIVE,
    "finetune.lora_rank": _NOT_NEGATIVE,
    "finetune.lora_alpha": _ABOVE_ZERO,
}


def range_of(key: str) -> tuple[float, float, str] | None:
    """The least and the greatest value of a key, and the range in words; `None` for any value."""
    return RANGES.get(key, RANGES.get(key.partition(".")[2]))


def check_values(config: ExperimentConfig) -> None:
    """Refuses values out of range.

    Raises:
        ValueError: names the first of them.
    """

    def check(name: str, value: Any, allowed: Collection) -> None:
        if value not in allowed:
            raise ValueError(f"{name}: expected one of {', '.join(allowed)}; got {value!r}")

    for name in ("dtype", "param_dtype"):
        check(f"model.{name}", getattr(config.model, name), ("float32", "bfloat16"))
    if isinstance(config.data, AirfoilConfig):
        check("data.shapes", config.data.shapes, AIRFOIL_SHAPES)
    if isinstance(config.data, BenchmarkConfig):
        check("data.problem", config.data.problem, BENCHMARKS)
    if config.data.train is None and not isinstance(config.data, StoreConfig):
        raise ValueError("data.train: expected a positive number; got None")
    if isinstance(config.data, StoreConfig):
        if not config.data.streams:
            raise ValueError("data.streams: expected at least one stream; got none")
        for column, kind in config.data.coefficients.items():
            check(f"data.coefficients.{column}", kind, COEFFICIENTS)
    for name in ("on_nonfinite", "on_bad_sample"):
        check(f"train.{name}", getattr(config.train, name), ("stop", "skip"))
    check("optimizer.name", config.optimizer.name, OPTIMIZERS)
    check("optimizer.schedule", config.optimizer.schedule, SCHEDULES)
    for name, value in flat(asdict(config)).items():
        limit = range_of(name)
        if limit is None or value is None:
            continue
        low, high, words = limit
        # Written so that a NaN is out of range.
        if not low <= value <= high:
            raise ValueError(f"{name}: expected {words}; got {value}")
    _check_finetuning(config.finetune)
    _check_processes(config.distributed)


def _check_finetuning(config: FinetuneConfig) -> None:
    plain = FinetuneConfig()
    for name, allowed in (("checkpoint", ("last", "best")), ("normalization", ("run", "data"))):
        if getattr(config, name) not in allowed:
            raise ValueError(
                f"finetune.{name}: expected one of {', '.join(allowed)}; got "
                f"{getattr(config, name)!r}"
            )
    for entry in config.learning_rates:
        rate_of(entry)
    needs = {
        "start_from": ("checkpoint", "normalization", "reset"),
        "lora_rank": ("lora_alpha", "lora_layers"),
    }
    for switch, names in needs.items():
        for name in names:
            if not getattr(config, switch) and getattr(config, name) != getattr(plain, name):
                raise ValueError(f"finetune.{name}: expected finetune.{switch} beside it; got none")
    if config.unfreeze and not config.freeze and not config.lora_rank:
        raise ValueError("finetune.unfreeze: expected finetune.freeze beside it; got none")


def rate_of(entry: str) -> tuple[str, float]:
    """Pattern and factor of an entry of `finetune.learning_rates`.

    Raises:
        ValueError: it is none.
    """
    pattern, _, text = entry.rpartition("=")
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not pattern or not 0 <= factor < math.inf:
        raise ValueError(
            "finetune.learning_rates: expected PATTERN=FACTOR with a factor of at least 0; got "
            f"{entry!r}"
        )
    return pattern, factor


def _check_processes(config: DistributedConfig) -> None:
    coordinator, processes, process = config.coordinator, config.processes, config.process
    if coordinator is None or processes is None or process is None:
        given = {"coordinator": coordinator, "processes": processes, "process": process}
        missing = [f"distributed.{name}" for name, value in given.items() if value is None]
        if len(missing) == len(given):
            return
        raise ValueError(
            "distributed: expected all or none of coordinator, processes and process; got no "
            f"{' and no '.join(missing)}"
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"distributed.coordinator: expected HOST:PORT; got {coordinator!r}")
    if process >= processes:
        raise ValueError(
            f"distributed.process: expected less than distributed.processes={processes}; "
            f"got {process}"
        )
