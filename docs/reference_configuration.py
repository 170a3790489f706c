"""The page of all keys, from the dataclasses of the configuration and from `configs/`."""

import dataclasses
import re
import typing
from collections.abc import Iterator
from types import UnionType
from typing import Any

import hydra
import yaml
from docstrings import sections, summary
from omegaconf import MISSING, OmegaConf

from experiments.configuration import configs, schema
from experiments.configuration.values import range_of
from flare_jax import FLARE
from geotransolver_jax import GeoTransolver, Transolver
from parallel import make_mesh

# Where keys are explained that a dataclass only hands on.
HANDED_ON = {
    schema.FlareConfig: FLARE.__init__,
    schema.TransolverConfig: Transolver.__init__,
    schema.GeoTransolverConfig: GeoTransolver.__init__,
    schema.MeshConfig: make_mesh,
}


def meaning(kind: type, name: str) -> str:
    """What a key means, from the class that has it or from what it is handed to.

    Raises:
        ValueError: neither says.
    """
    for each in kind.__mro__:
        text = sections(each.__dict__.get("__doc__")).get("Attributes", {}).get(name)
        if text:
            return text
    text = sections(getattr(HANDED_ON.get(kind), "__doc__", None)).get("Args", {}).get(name)
    if not text:
        raise ValueError(f"{kind.__name__}.{name}: expected a line that explains it; got none")
    return text


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of the configuration: its place, type, default and meaning."""

    name: str
    type: str
    default: Any
    meaning: str


def keys(kind: type, prefix: str) -> Iterator[Key]:
    """All keys of a dataclass, those of dataclasses in it by their path."""
    hints = typing.get_type_hints(kind)
    for each in dataclasses.fields(kind):
        hint, name = hints[each.name], f"{prefix}.{each.name}"
        inner = (*typing.get_args(hint), hint)
        nested = [one for one in inner if dataclasses.is_dataclass(one)]
        if nested:
            place = name if nested[0] is hint else f"{name}.NAME"
            yield from keys(nested[0], place)
            continue
        default = each.default
        if each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        yield Key(name, type_name(hint), default, meaning(kind, each.name))


def type_name(hint: Any) -> str:
    """A type as YAML's user reads it."""
    if isinstance(hint, UnionType):
        return " or ".join(map(type_name, typing.get_args(hint)))
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return f"mapping to {type_name(arguments[1])}"
    names = {type(None): "null", Any: "number or name", str: "text", bool: "true or false"}
    names |= {float: "number", int: "integer"}
    return names[hint]


def shown(value: Any) -> str:
    """A value as it is written on the command line."""
    if value == MISSING:
        return "needed"
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n")
    return f"`{text.strip()}`"


def choices(group: str) -> dict[str, tuple[str, dict]]:
    """The files of a group: what their first line says, and their values."""
    found = {}
    for path in sorted((configs.CONFIG_DIR / group).glob("*.yaml")):
        text = path.read_text()
        comment = re.match(r"(?:# .*\n)+", text)[0].replace("# ", "").split("\n")
        values = yaml.safe_load(text)
        del values["defaults"]
        found[path.stem] = (" ".join(comment).strip(), values)
    return found


def composed(overrides: list[str]) -> dict:
    """A whole configuration as plain values."""
    configs.register_schemas()
    with hydra.initialize_config_dir(str(configs.CONFIG_DIR), version_base="1.3"):
        return OmegaConf.to_container(hydra.compose("config", overrides))


def at(values: dict, path: list[str]) -> Any:
    """What a nested mapping holds at a path, or `MISSING`."""
    for part in path:
        if not isinstance(values, dict) or part not in values:
            return MISSING
        values = values[part]
    return values


def table(kind: type, group: str, names: list[str], used: dict[str, dict]) -> list[str]:
    """Rows of a class: the default is what the files give, where they all give the same."""
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for key in keys(kind, group):
        path = key.name.split(".")[1:]
        given = [at(used[name][group], path) for name in names]
        default = shown(key.default)
        if "NAME" in path:
            default = "needed" if key.default == MISSING else default
        elif all(value == given[0] for value in given):
            default = shown(given[0])
        else:
            default = "by choice"
        limit = range_of(key.name)
        text = key.meaning.rstrip(".").replace("|", "\\|")
        text += f" ({limit[2]})" if limit else ""
        lines.append(f"| `{key.name}` | {key.type} | {default} | {text} |")
    return lines


def configuration() -> str:
    """The page of all keys."""
    lines = [
        "# Configuration",
        "",
        "<!-- Written by docs/reference.py. -->",
        "",
        "Every key of `python -m experiments.train`, made from `configs/` and",
        "`experiments/configuration/schema.py`. `group=choice` takes a file of a group,",
        "`group.key=value` changes a value;",
        "the default is that of the choice. [Experiments](experiments.md) says how to use them.",
        "",
        "The default experiment is " + defaults() + ".",
    ]
    kinds = {"model": schema.MODELS, "data": schema.DATA}
    plain = {each.name: each.type for each in dataclasses.fields(schema.ExperimentConfig)}
    for group, held in plain.items():
        lines += ["", f"## {group}", "", summary(held.__doc__)]
        files = choices(group)
        used = {name: composed([f"{group}={name}"]) for name in files} or {"": composed([])}
        if files:
            lines += ["", "| choice | what it is |", "| --- | --- |"]
            lines += [f"| `{group}={name}` | {files[name][0]} |" for name in files]
        if group not in kinds:
            lines += ["", *table(held, group, list(used), used)]
            lines += by_choice(group, files, list(files))
            continue
        for kind in dict.fromkeys(kinds[group].values()):
            names = [name for name in files if kinds[group][files[name][1]["name"]] is kind]
            title = ", ".join(f"`{group}={name}`" for name in names)
            lines += ["", f"### {kind.__name__}", "", f"{summary(kind.__doc__)} Choices: {title}."]
            lines += ["", *table(kind, group, names, used)]
            lines += by_choice(group, files, names)
    return "\n".join(lines) + "\n"


def by_choice(group: str, files: dict, names: list[str]) -> list[str]:
    """What the files of one class set, each its own way."""
    if len(names) < 2:
        return []
    lines = ["", "| choice | sets |", "| --- | --- |"]
    values = {name: flat(files[name][1], group) for name in names}
    for name in names:
        entries = [
            f"`{key}={shown(value)[1:-1]}`"
            for key, value in values[name].items()
            if any(other.get(key) != value for other in values.values())
        ]
        lines.append(f"| `{group}={name}` | {', '.join(entries)} |")
    return lines


def flat(values: dict, prefix: str) -> dict[str, Any]:
    """Values of nested mappings by their paths."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        place = f"{prefix}.{name}"
        found |= flat(value, place) if isinstance(value, dict) else {place: value}
    return found


def defaults() -> str:
    """The choices of `configs/config.yaml`."""
    values = yaml.safe_load((configs.CONFIG_DIR / "config.yaml").read_text())["defaults"]
    pairs = [item for item in values if isinstance(item, dict)]
    chosen = [f"`{k}={v}`" for pair in pairs for k, v in pair.items() if " " not in k]
    return ", ".join(chosen)
