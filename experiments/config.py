"""The typed configuration of an experiment: its schema, its errors, and its file in a run's folder.

The YAML files under `configs/` are checked against these classes when Hydra composes them.
"""

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"
CONFIG_FILE = "config.yaml"


@dataclass
class ModelConfig:
    """What every model has.

    Attributes:
        name: which model.
        dtype: type to compute in, `float32` or `bfloat16`.
        param_dtype: type of the weights.
        remat: what is computed again for the gradient: `none` or `block`.
    """

    name: str = MISSING
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: str = "none"


@dataclass
class FlareConfig(ModelConfig):
    """Arguments of `flare_jax.FLARE`; widths of inputs and outputs follow from the data.

    Attributes:
        structured: tell the model the shape of the grid, where the data has one.
    """

    name: str = "flare"
    n_layers: int = 4
    n_hidden: int = 256
    dropout: float = 0.0
    n_head: int = 8
    act: str = "gelu"
    mlp_ratio: int = 4
    slice_num: int = 32
    unified_pos: bool = False
    ref: int = 8
    scale: float = 1.0
    chunk_size: int | None = None
    structured: bool = False


@dataclass
class DataConfig:
    """What every data set has.

    Attributes:
        name: which data set.
        train: number of training samples.
        validation: number of validation samples.
        test: number of test samples.
    """

    name: str = MISSING
    train: int = 1000
    validation: int = 100
    test: int = 200


@dataclass
class DarcyConfig(DataConfig):
    """Darcy flow through a two-valued permeability on the unit square.

    Attributes:
        resolution: grid points along each axis.
        seed: seed of the samples.
        cache_dir: where made samples are kept.
        mat_train: public training file (`..._smooth1.mat`) to read instead of making samples.
        mat_test: public test file (`..._smooth2.mat`).
    """

    name: str = "darcy"
    resolution: int = 32
    seed: int = 0
    cache_dir: str = ".cache/flare_jax"
    mat_train: str | None = None
    mat_test: str | None = None


@dataclass
class MeshConfig:
    """Sizes of the device mesh's axes, see `parallel.make_mesh`; one may be -1.

    Attributes:
        cpu_devices: on a CPU, how many virtual devices to split it into.
    """

    data: int = 1
    points: int = -1
    heads: int = 1
    cpu_devices: int | None = None


@dataclass
class OptimizerConfig:
    """Optimizer and schedule.

    Attributes:
        name: `adamw`, or `muon` (Muon for the matrices, AdamW for the rest).
        learning_rate: peak learning rate.
        adam_learning_rate: peak learning rate of the rest under `muon`.
        weight_decay: decoupled weight decay of kernels.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        clip_norm: largest global norm of a gradient; `null` for no clipping.
        schedule: `one_cycle`, `cosine` (with warm-up) or `constant`.
        warmup: part of the steps in which the rate rises.
        final_fraction: last learning rate, in units of the peak.
        accumulate: batches whose gradients are averaged for one step.
        ema_decay: decay of the moving average of the weights that is evaluated; `null` for none.
    """

    name: str = "adamw"
    learning_rate: float = 1e-3
    adam_learning_rate: float = 1e-3
    weight_decay: float = 1e-5
    beta1: float = 0.9
    beta2: float = 0.999
    clip_norm: float | None = 1.0
    schedule: str = "one_cycle"
    warmup: float = 0.2
    final_fraction: float = 1e-3
    accumulate: int = 1
    ema_decay: float | None = None


@dataclass
class TrainConfig:
    """The training loop.

    Attributes:
        steps: optimizer steps.
        batch_size: samples of a batch, over all devices.
        seed: seed of weights, shuffling and dropout.
        checkpoint_every: steps between checkpoints, each with a pass over the validation split.
        keep: latest checkpoints kept, beside the best one.
        log_every: steps between rows of the logs.
        loader_threads: threads that prepare batches.
    """

    steps: int = 1000
    batch_size: int = 4
    seed: int = 0
    checkpoint_every: int = 250
    keep: int = 2
    log_every: int = 20
    loader_threads: int = 1


@dataclass
class ExperimentConfig:
    """A whole experiment."""

    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


MODELS: dict[str, type[ModelConfig]] = {"flare": FlareConfig}
DATA: dict[str, type[DataConfig]] = {"darcy": DarcyConfig}


def register_schemas() -> None:
    """Tells Hydra the types of the groups; their YAML files name them in their defaults."""
    store = ConfigStore.instance()
    store.store(name="experiment_schema", node=ExperimentConfig)
    for name, node in MODELS.items():
        store.store(group="model", name=f"{name}_schema", node=node)
    for name, node in DATA.items():
        store.store(group="data", name=f"{name}_schema", node=node)
    store.store(group="mesh", name="mesh_schema", node=MeshConfig)
    store.store(group="optimizer", name="optimizer_schema", node=OptimizerConfig)


def typed(config: DictConfig) -> ExperimentConfig:
    """The configuration as dataclasses, its types and values checked.

    Raises:
        ValueError: a key is unknown, a value is of a wrong type or out of range.
    """
    plain = OmegaConf.to_container(config, resolve=True)
    experiment = OmegaConf.structured(ExperimentConfig)
    for group, kinds in (("model", MODELS), ("data", DATA)):
        name = (plain.get(group) or {}).get("name")
        if name not in kinds:
            raise ValueError(f"{group}.name: expected one of {', '.join(kinds)}; got {name!r}")
        setattr(experiment, group, kinds[name])
    try:
        merged = OmegaConf.to_object(OmegaConf.merge(experiment, plain))
    except OmegaConfBaseException as error:
        raise ValueError(explain(error, _keys(OmegaConf.to_container(experiment)))) from error
    _check_values(merged)
    return merged


def _check_values(config: ExperimentConfig) -> None:
    def check(name: str, value: Any, allowed) -> None:
        if value not in allowed:
            raise ValueError(f"{name}: expected one of {', '.join(allowed)}; got {value!r}")

    for name in ("dtype", "param_dtype"):
        check(f"model.{name}", getattr(config.model, name), ("float32", "bfloat16"))
    check("optimizer.name", config.optimizer.name, ("adamw", "muon"))
    check("optimizer.schedule", config.optimizer.schedule, ("one_cycle", "cosine", "constant"))
    positive = {
        "data.train": config.data.train,
        "data.validation": config.data.validation,
        "data.test": config.data.test,
        "optimizer.learning_rate": config.optimizer.learning_rate,
        "optimizer.accumulate": config.optimizer.accumulate,
        "train.steps": config.train.steps,
        "train.batch_size": config.train.batch_size,
        "train.checkpoint_every": config.train.checkpoint_every,
        "train.keep": config.train.keep,
        "train.log_every": config.train.log_every,
    }
    for name, value in positive.items():
        if not value > 0:
            raise ValueError(f"{name}: expected a positive number; got {value}")
    fractions = {
        "optimizer.warmup": config.optimizer.warmup,
        "optimizer.final_fraction": config.optimizer.final_fraction,
    }
    if config.optimizer.ema_decay is not None:
        fractions["optimizer.ema_decay"] = config.optimizer.ema_decay
    for name, value in fractions.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}: expected a number in [0, 1); got {value}")


def save(config: ExperimentConfig, folder: Path) -> None:
    """Writes the resolved configuration into a run's folder, whole or not at all."""
    temporary = folder / f".{CONFIG_FILE}.partial"
    OmegaConf.save(OmegaConf.structured(config), temporary)
    temporary.replace(folder / CONFIG_FILE)


def load(folder: Path, overrides: list[str] | None = None) -> ExperimentConfig:
    """Reads the configuration of a run.

    Args:
        folder: the run's folder.
        overrides: `key=value` changes, for example of the mesh.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: the file or an override is not valid.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: expected a run's folder with {CONFIG_FILE} in it")
    try:
        saved = OmegaConf.load(path)
        if not isinstance(saved, DictConfig):
            raise ValueError(f"{path}: expected a mapping; got {type(saved).__name__}")
        return typed(OmegaConf.merge(saved, OmegaConf.from_dotlist(overrides or [])))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def difference(saved: ExperimentConfig, current: ExperimentConfig) -> list[str]:
    """Keys that make another experiment: all that differ but the mesh and what is only written."""
    free = ("mesh.", "train.log_every", "train.keep", "train.loader_threads", "data.cache_dir")
    before, after = (
        _flat(OmegaConf.to_container(OmegaConf.structured(c))) for c in (saved, current)
    )
    return [
        f"{key} ({before.get(key)!r} there, {after.get(key)!r} here)"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(free)
    ]


def explain(error: Exception, known: list[str]) -> str:
    """One line for an error of Hydra or OmegaConf, with the nearest known key or choice."""
    text = str(error) if error.__cause__ is None else f"{error}\n{error.__cause__}"
    missing = re.search(r"Key '([^']+)' (?:is not in struct|not in '\w+')", text)
    if missing:
        override = re.search(r"Could not override '([^']+)'", text)
        full = re.search(r"full_key: (\S+)", text)
        key = override.group(1) if override else full.group(1) if full else missing.group(1)
        return f"unknown config key {key!r}{_nearest(key, known)}"
    choice = re.search(r"Could not find '([^']+)/([^']+)'", text)
    if choice:
        group, name = choice.groups()
        options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
        options = [option for option in options if not option.endswith("_schema")]
        return f"unknown choice {group}={name}: expected one of {', '.join(options)}"
    override = re.search(r"Error merging override (\S+)", text)
    if override:
        reason = text.splitlines()[1].strip()
        return f"{override.group(1)}: {reason[0].lower()}{reason[1:]}"
    return " ".join(text.split())


def _nearest(key: str, known: list[str]) -> str:
    """The known key that was probably meant: spelled alike, or abbreviated by its initials."""
    group, _, leaf = key.rpartition(".")
    initials = [
        name
        for name in known
        if name.rpartition(".")[0] == group
        and "".join(word[0] for word in name.rpartition(".")[2].split("_")) == leaf
    ]
    near = initials or difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"


def known_keys(overrides: list[str]) -> list[str]:
    """Every key of the configuration that the group choices among `overrides` lead to."""
    from hydra import compose

    groups = {"model", "data", "mesh", "optimizer"}
    chosen = [o for o in overrides if o.partition("=")[0] in groups and "," not in o]
    for attempt in (chosen, []):
        try:
            return _keys(OmegaConf.to_container(compose("config", overrides=attempt)))
        except HydraException:
            continue
    return []


def _flat(tree: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _keys(tree: dict) -> list[str]:
    return list(_flat(tree))
