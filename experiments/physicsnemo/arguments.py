"""Constructor arguments of PhysicsNeMo's models: as a configuration, and of a model of ours."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from experiments.configuration.schema import (
    FlareConfig,
    GeoTransolverConfig,
    ModelConfig,
    TransolverConfig,
)
from experiments.data.description import Description
from experiments.formats.archives import shown
from experiments.models import Model
from flare_jax import FLARE
from geotransolver_jax import GeoTransolver, Transolver

_MODELS = {"FLARE": FLARE, "Transolver": Transolver, "GeoTransolver": GeoTransolver}
# Asked of a class itself, Flax would name no arguments.
_CONSTRUCTORS: dict[str, Callable] = {
    "FLARE": FLARE.__init__,
    "Transolver": Transolver.__init__,
    "GeoTransolver": GeoTransolver.__init__,
}
_CONFIGS = {
    "FLARE": FlareConfig,
    "Transolver": TransolverConfig,
    "GeoTransolver": GeoTransolverConfig,
}
# Arguments that follow from the data; what is structured is also a choice of the configuration.
_OF_DATA = (
    "functional_dim",
    "out_dim",
    "embedding_dim",
    "geometry_dim",
    "global_dim",
    "structured_shape",
)
# Arguments that have one value here, and why.
_FIXED = {
    "use_te": "there is no Transformer Engine here",
    "time_input": "no data here has times",
}


def reference_arguments(model: str) -> list[str]:
    """Names of the arguments of a model of PhysicsNeMo 2.2.2: our positional ones, and `use_te`."""
    parameters = inspect.signature(_CONSTRUCTORS[model]).parameters.values()
    own = inspect.Parameter.POSITIONAL_OR_KEYWORD
    shared = [p.name for p in parameters if p.kind is own and p.name != "self"]
    return [*shared, "use_te"]


def choice(model: str, arguments: Mapping[str, Any]) -> str:
    """The name of our configuration for a model."""
    fa = arguments.get("attention_type") == "GALE_FA"
    return "geotransolver_fa" if fa else model.lower()


def model_settings(model: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of our configuration that a checkpoint's arguments say, with their values.

    Args:
        model: name of the class.
        arguments: of its constructor; those that are missing have the reference's defaults.

    Raises:
        ValueError: names an argument that there is not, or that has no counterpart here.
    """
    unknown = sorted(arguments.keys() - set(reference_arguments(model)))
    if unknown:
        names = ", ".join(map(shown, unknown[:3]))
        raise ValueError(f"args.json: {model} takes no argument {names}")
    for name, reason in _FIXED.items():
        value = arguments.get(name, False)
        if value is not False:
            raise ValueError(
                f"args.json: {name}={shown(str(value))}: expected False, since {reason}"
            )
    kind = _CONFIGS[model]
    defaults = dataclasses.asdict(kind())
    settings = {name: defaults[name] for name in reference_arguments(model) if name in defaults}
    for name, value in arguments.items():
        if name in settings and value is not None:
            _check_kind(name, value, settings[name])
            settings[name] = value
    settings["structured"] = arguments.get("structured_shape") is not None
    if kind is FlareConfig:
        # The reference has no other.
        settings["scale"] = 1.0
    return settings


def _check_kind(name: str, value: Any, like: Any) -> None:
    """Refuses what is no value of an argument's kind; ranges are the model's to check."""

    def matches(value: Any, like: Any) -> bool:
        if isinstance(like, list):
            of = like[0]
            return isinstance(value, list) and all(matches(entry, of) for entry in value)
        if isinstance(like, float):
            return isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(like, str):
            # A configuration would take other characters for a reference to something else.
            return isinstance(value, str) and re.fullmatch(r"\w+", value) is not None
        return type(value) is type(like)

    if not matches(value, like):
        raise ValueError(
            f"args.json: {name}: expected a value such as {like!r}; got {shown(str(value))}"
        )


def model_arguments(model: Model, config: ModelConfig) -> dict[str, Any]:
    """The arguments with which the reference makes the same model.

    Args:
        model: a model; its weights may be shapes alone.
        config: what it was built from.

    Raises:
        ValueError: the reference has no such model.
    """
    scale = getattr(config, "scale", 1.0)
    if scale != 1:
        raise ValueError(f"model.scale: expected 1, as PhysicsNeMo has it; got {scale}")
    arguments = {
        name: getattr(config, name)
        for name in reference_arguments(model_name(model))
        if hasattr(config, name)
    }
    shape = model.structured_shape
    arguments["structured_shape"] = None if shape is None else list(shape)
    if isinstance(model, GeoTransolver):
        outputs = [layer.kernel.shape[-1] for layer in model.project_out]
        arguments |= {
            "functional_dim": _one_or_all(list(model.functional_dims)),
            "out_dim": _one_or_all(outputs),
            "geometry_dim": model.geometry_dim,
            "global_dim": model.global_dim,
        }
    else:
        arguments |= {
            "functional_dim": model.functional_dim,
            "out_dim": model.project_out.kernel.shape[-1],
            "embedding_dim": None if model.unified_pos else model.embedding_dim,
        }
    return arguments | dict.fromkeys(_FIXED, False)


def model_name(model: Model) -> str:
    """Name of the reference's class.

    Raises:
        TypeError: it has none.
    """
    for name, kind in _MODELS.items():
        if isinstance(model, kind):
            return name
    raise TypeError(f"expected one of {', '.join(_MODELS)}; got {type(model).__name__}")


def check_widths(arguments: Mapping[str, Any], of_data: Mapping[str, Any]) -> None:
    """Refuses a checkpoint for other data.

    Args:
        arguments: of the checkpoint.
        of_data: of the model that the data asks for, see `model_arguments`.

    Raises:
        ValueError: names every width that differs, in the file and in the data.
    """
    names = [name for name in _OF_DATA if name in of_data]
    if arguments.get("unified_pos"):
        # It is made of the grid, whatever width is named.
        names.remove("embedding_dim")
    pairs = {name: (arguments.get(name), of_data[name]) for name in names}
    wrong = [
        f"{name} {shown(str(given))} in args.json, {shown(str(wanted))} of the data"
        for name, (given, wanted) in pairs.items()
        if _as_list(given) != _as_list(wanted)
    ]
    if wrong:
        raise ValueError("the model is for other data: " + "; ".join(wrong))


def check_grid(arguments: Mapping[str, Any], data: Description) -> None:
    """Refuses a model of another grid than the data has, before it is built.

    Raises:
        ValueError: names both.
    """
    given = arguments.get("structured_shape")
    if given is not None and _as_list(given) != _as_list(data.structured_shape):
        check_widths({"structured_shape": given}, {"structured_shape": data.structured_shape})


def _one_or_all(values: list) -> Any:
    return values[0] if len(values) == 1 else values


def _as_list(value: Any) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]
