"""The page of the commands, from their parsers."""

import argparse
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from docstrings import summary

COMMANDS = (
    "experiments.bodies",
    "experiments.convert",
    "experiments.evaluate",
    "experiments.report",
    "experiments.predict",
    "experiments.export",
    "experiments.import_physicsnemo",
    "experiments.export_physicsnemo",
    "experiments.launch",
    "benchmarks.plan",
    "benchmarks.models",
    "benchmarks.measure",
    "benchmarks.scaling",
    "benchmarks.partitioning",
    "benchmarks.radius_search",
    "benchmarks.large_sample",
    "benchmarks.loading",
    "benchmarks.training_comparison",
)
# Defaults that differ from machine to machine.
OF_THE_MACHINE = {("experiments.convert", "--workers"): "all cores"}


class _Made(Exception):
    """Carries a parser out of a command."""


def parser_of(main: Callable, arguments: list[str] | None = None) -> Any:
    """The parser that a command makes, or, with arguments, what it makes of these.

    The command is left where it parses; nothing of it runs.
    """
    true_parse = argparse.ArgumentParser.parse_args
    true_intermixed = argparse.ArgumentParser.parse_intermixed_args

    def leave(true: Callable) -> Callable:
        def parse(self, args=None, namespace=None):
            raise _Made(self if arguments is None else true(self, arguments))

        return parse

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", leave(true_parse)),
        mock.patch.object(argparse.ArgumentParser, "parse_intermixed_args", leave(true_intermixed)),
    ):
        try:
            main()
        except _Made as made:
            return made.args[0]
    raise ValueError(f"{main.__module__}: expected a command that parses arguments; got none")


def takes_arguments(main: Callable) -> bool:
    """Whether a command parses anything."""
    return "parse" in inspect.getsource(main)


def command(name: str) -> list[str]:
    """What a command is for, and its arguments."""
    module = importlib.import_module(name)
    lines = ["", f"## {name}", ""]
    text = summary(module.__doc__)
    if not takes_arguments(module.main):
        return [*lines, text, "", f"`python -m {name}` takes no arguments."]
    parser = parser_of(module.main)
    if parser.description and parser.description != module.__doc__:
        text = parser.description
    lines += [text, "", "| argument | default | meaning |", "| --- | --- | --- |"]
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        argument = ", ".join(action.option_strings) or action.dest.upper()
        if action.choices:
            argument += " " + ",".join(map(str, action.choices))
        if action.nargs in ("+", "*"):
            argument += " ..."
        default = action.default
        if default is None or action.nargs == 0 or not action.option_strings:
            default = ""
        elif isinstance(default, Path):
            default = default.name
        elif isinstance(default, list | tuple):
            default = " ".join(map(str, default))
        default = OF_THE_MACHINE.get((name, argument), default)
        lines.append(f"| `{argument}` | {default} | {action.help or ''} |")
    return lines


def commands() -> str:
    """The page of the commands."""
    lines = [
        "# Commands",
        "",
        "<!-- Written by docs/reference.py from the parsers of the commands. -->",
        "",
        "Every command of `experiments` and `benchmarks`; `--help` prints the same. Bad input ends",
        "a command with one line and exit code 2; [Several hosts](../clusters.md) has all codes.",
        "",
        "## experiments.train",
        "",
        "Trains. Its arguments are those of Hydra: `key=value` of the",
        "[configuration](../configuration.md), `group=choice`, and `-m` for a sweep over",
        "comma-separated values; `--cfg job` prints the configuration, `--help` the groups.",
    ]
    for name in COMMANDS:
        lines += command(name)
    return "\n".join(lines) + "\n"
