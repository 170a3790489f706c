"""Shapes and types of arrays, checked in every call of a public function by its annotations.

The import hook of jaxtyping would check private and nested functions as well. Nested ones it
decorates again in each trace, and test modules took up to a fifth longer.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import types
import warnings

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep585DeprecationWarning
from jaxtyping import jaxtyped

PACKAGES = ("parallel", "flare_jax", "geotransolver_jax")
_KINDS = types.FunctionType | staticmethod | classmethod | property
# An integer serves as a float.
_check = jaxtyped(typechecker=beartype(conf=BeartypeConf(is_pep484_tower=True)))


def check_calls() -> None:
    """Puts the check around all public functions and methods, wherever these were imported to."""
    modules = [module for package in PACKAGES for module in _modules(package)]
    # Flax annotates with a name that the standard library deprecates.
    with warnings.catch_warnings(
        action="ignore", category=BeartypeDecorHintPep585DeprecationWarning
    ):
        checked = _checked(modules)
    for module in modules:
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and value in checked:
                setattr(module, name, checked[value])


def _checked(modules: list[types.ModuleType]) -> dict[types.FunctionType, types.FunctionType]:
    """Public functions of modules, checked; methods are replaced where they are."""
    checked = {}
    for module in modules:
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isclass(value):
                _check_methods(value)
            elif inspect.isfunction(value):
                checked[value] = _check(value)
    return checked


def _check_methods(kind: type) -> None:
    # JAX makes dataclasses of whatever stands for arrays in a tree, of layouts say.
    special = {"__call__"} if dataclasses.is_dataclass(kind) else {"__call__", "__init__"}
    for name, member in list(vars(kind).items()):
        public = not name.startswith("_") or name in special
        if public and isinstance(member, _KINDS):
            setattr(kind, name, _check(member))


def _modules(package: str) -> list[types.ModuleType]:
    found = importlib.import_module(package)
    inside = pkgutil.walk_packages(found.__path__, f"{package}.")
    return [found, *(importlib.import_module(module.name) for module in inside)]
