"""What is wrong with a configuration, in one line for its user."""

import difflib
import re
from typing import Any

from hydra import compose
from hydra.errors import HydraException
from omegaconf import OmegaConf

# Behind the name of a group: any key in it.
_ANY = ".*"


def explain(error: Exception, known: list[str]) -> str:
    """One line for an error of Hydra or OmegaConf, with the nearest known key or choice."""
    text = str(error) if error.__cause__ is None else f"{error}\n{error.__cause__}"
    missing = re.search(r"Key '([^']+)' (?:is not in struct|not in '\w+')", text)
    if missing:
        override = re.search(r"Could not override '([^']+)'", text)
        full = re.search(r"full_key: (\S+)", text)
        key = override.group(1) if override else full.group(1) if full else missing.group(1)
        if key in known or any(name == f"{key}{_ANY}" for name in known) or _parent(key) in known:
            return f"{key}: expected +{key}=..., which adds names of your own; got no +"
        return f"unknown config key {key!r}{_nearest(key, known)}"
    choice = re.search(r"Could not find '([^']+)/([^']+)'", text)
    if choice:
        group, name = choice.groups()
        options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
        options = [option for option in options if not option.endswith("_schema")]
        return f"unknown choice {group}={name}: expected one of {', '.join(options)}"
    override = re.search(r"Error merging override (\S+)", text)
    if override:
        return _blame(override.group(1), text.splitlines()[1])
    full = re.search(r"full_key: (\S+)", text)
    return _blame(full.group(1), text.splitlines()[0]) if full else " ".join(text.split())


def _blame(key: str, reason: str) -> str:
    reason = reason.strip()
    if "is not a ListConfig" in reason:
        key, _, value = key.partition("=")
        shown = f", as in {key}=[{value}]" if value else ""
        return f"{key}: expected a list{shown}; got {value or 'none'}"
    return f"{key}: {reason[0].lower()}{reason[1:]}"


def _parent(key: str) -> str:
    """The name that stands for all keys beside one."""
    return key.rpartition(".")[0] + _ANY


def _nearest(key: str, known: list[str]) -> str:
    """The known key that was probably meant: without its group, by initials, or spelled alike."""
    groups = list(dict.fromkeys(name.partition(".")[0] for name in known))
    group, _, leaf = key.rpartition(".")
    candidates = [name for name in known if group in ("", name.rpartition(".")[0])]
    for name in candidates:
        own = name.rpartition(".")[2]
        if leaf in (own, "".join(word[0] for word in own.split("_"))):
            return f"; did you mean {name!r}?"
    near = difflib.get_close_matches(key, known if group else [*groups, *known], n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    beside = [_beside(name, group) for name in known if name.startswith(f"{group}.")]
    return f"; known are {', '.join(dict.fromkeys(beside) if group and beside else groups)}"


def _beside(name: str, group: str) -> str:
    """What stands for a key in a list of those of a group: itself, or the group that it is in."""
    own, _, deeper = name.removeprefix(f"{group}.").partition(".")
    return f"{group}.{own}{_ANY if deeper else ''}"


def known_keys(overrides: list[str]) -> list[str]:
    """Every key of the configuration that the group choices among `overrides` lead to."""
    groups = {"model", "data", "mesh", "optimizer"}
    chosen = [o for o in overrides if o.partition("=")[0] in groups and "," not in o]
    for attempt in (chosen, []):
        try:
            return key_names(OmegaConf.to_container(compose("config", overrides=attempt)))
        except HydraException:
            continue
    return []


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries by their dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = value
    return leaves


def key_names(tree: Any) -> list[str]:
    """The dotted keys of nested dictionaries; `key.*` for a dictionary that has none yet."""
    names = []
    for key, value in tree.items():
        if isinstance(value, dict):
            names += [f"{key}.{name}" for name in key_names(value)] or [f"{key}{_ANY}"]
        else:
            names.append(key)
    return names
