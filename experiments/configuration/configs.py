"""The configuration of an experiment: composed, checked, and kept in its run's folder.

The YAML files under `configs/` are checked against these classes when Hydra composes them.
"""

import dataclasses
import io
import sys
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.configuration.errors import explain, flat, key_names
from experiments.configuration.schema import (
    DATA,
    MODELS,
    ExperimentConfig,
    MeshConfig,
    OptimizerConfig,
)
from experiments.configuration.sweeps import swept
from experiments.configuration.values import check_values
from experiments.files import write_atomically
from experiments.formats.limits import read_text
from experiments.messages import one_line

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
CONFIG_FILE = "config.yaml"
# A hundred times what a run's configuration has.
_LONGEST, _DEEPEST = 2**18, 32


def register_schemas() -> None:
    """Tells Hydra the types of the groups, which their YAML files name, and the names of jobs."""
    store = ConfigStore.instance()
    store.store(name="experiment_schema", node=ExperimentConfig)
    for name, node in MODELS.items():
        store.store(group="model", name=f"{name}_schema", node=node)
    for name, kind in DATA.items():
        store.store(group="data", name=f"{name}_schema", node=kind)
    store.store(group="mesh", name="mesh_schema", node=MeshConfig)
    store.store(group="optimizer", name="optimizer_schema", node=OptimizerConfig)
    OmegaConf.register_new_resolver(
        "swept", lambda overrides: swept(overrides, sys.argv[1:]), replace=True
    )


def typed(config: DictConfig) -> ExperimentConfig:
    """The configuration as dataclasses, its types and values checked.

    Raises:
        ValueError: a key is unknown, a value is of a wrong type or out of range.
    """
    experiment = OmegaConf.structured(ExperimentConfig)
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True)
        for group, kinds in (("model", MODELS), ("data", DATA)):
            setattr(experiment, group, kinds[_kind(group, plain.get(group), kinds)])
        merged: Any = OmegaConf.to_object(OmegaConf.merge(experiment, plain))
    except OmegaConfBaseException as error:
        raise ValueError(explain(error, key_names(OmegaConf.to_container(experiment)))) from error
    check_values(merged)
    return merged


def _kind(group: str, values: Any, kinds: dict[str, type]) -> str:
    if not isinstance(values, dict | None):
        raise ValueError(f"{group}: expected a mapping; got {values!r}")
    name = (values or {}).get("name")
    if name not in list(kinds):
        raise ValueError(f"{group}.name: expected one of {', '.join(kinds)}; got {name!r}")
    return name


def save(config: ExperimentConfig, folder: Path) -> None:
    """Writes the resolved configuration into a run's folder, whole or not at all.

    Which process this is stays out of it: whoever goes on with the run has processes of his own.
    """
    processes = dataclasses.replace(
        config.distributed, coordinator=None, processes=None, process=None
    )
    config = dataclasses.replace(config, distributed=processes)
    write_atomically(
        folder / CONFIG_FILE,
        lambda temporary: OmegaConf.save(OmegaConf.structured(config), temporary),
    )


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
    saved: Any = _read(path)
    try:
        config = typed(saved)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for override in overrides or []:
        saved = OmegaConf.merge(saved, _change(override))
    return typed(saved) if overrides else config


def _read(path: Path) -> DictConfig:
    try:
        text = read_text(path, _LONGEST)
        _require_plain(path, text)
        saved = OmegaConf.load(io.StringIO(text))
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: expected YAML; got {one_line(error)}") from error
    if not isinstance(saved, DictConfig):
        raise ValueError(f"{path}: expected a mapping; got a list")
    if not saved:
        raise ValueError(f"{path}: expected a configuration; got an empty file")
    for key, value in flat(OmegaConf.to_container(saved)).items():
        # What was saved is resolved: this would ask this machine for its environment, say.
        if "${" in str(value):
            shown = repr(str(value)[:80])
            raise ValueError(f"{path}: {key}: expected a value; got the interpolation {shown}")
    return saved


def _require_plain(path: Path, text: str) -> None:
    """Refuses what makes much of a few lines: values that stand for others, and deep nests."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"{path}: expected values; got the alias {event.anchor!r} of others")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ValueError(f"{path}: expected at most {_DEEPEST} levels; got more")


def _change(override: str) -> DictConfig:
    try:
        return OmegaConf.from_dotlist([override])
    except yaml.YAMLError as error:
        raise ValueError(f"{override}: expected key=value; got {one_line(error)}") from error


def difference(saved: ExperimentConfig, current: ExperimentConfig) -> list[str]:
    """Keys that make another experiment: all that differ but those that no weight depends on."""
    in_training = (
        "checkpoint_every",
        "keep",
        "log_every",
        "loader_threads",
        "on_nonfinite",
        "max_skipped",
        "on_bad_sample",
    )
    free = ("mesh.", "distributed.", "data.cache_dir", *(f"train.{key}" for key in in_training))
    before, after = (
        flat(OmegaConf.to_container(OmegaConf.structured(c))) for c in (saved, current)
    )
    return [
        f"{key} ({before.get(key)!r} there, {after.get(key)!r} here)"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(free)
    ]
