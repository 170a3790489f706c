"""`python -m benchmarks.scaling`: how memory and exchange grow with points and devices.

Compiles a training step (forward, mean-square loss, backward) for 1, 2, 4 and 8 virtual devices
that share out the points: with the same points on each device, and with the same points in all.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

import parallel
from benchmarks.cases import DTYPES, MODELS, Case
from benchmarks.memory import memory_of
from benchmarks.program import Program, text_of
from benchmarks.virtual_devices import use_virtual_devices
from experiments.cli import one_line_errors
from experiments.files import write_json
from parallel import mesh as mesh_lib
from parallel.mesh import DATA, POINTS
from parallel.parameters import split_weights
from parallel.points import padded_size

_DEVICES = (1, 2, 4, 8)
_NOT_POINTS = ("global_embedding",)


def compile_step(case: Case) -> jax.stages.Compiled:
    """The training step of a case, its points split over the mesh of the context."""
    model = case.make_model()
    model.eval()
    graph, weights, rest = split_weights(model)

    def shape(name: str, given: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        batch, points, *widths = given.shape
        if name in _NOT_POINTS:
            return given
        sharding = mesh_lib.sharding(DATA, POINTS, *[None] * len(widths))
        return jax.ShapeDtypeStruct(
            (batch, padded_size(points), *widths), given.dtype, sharding=sharding
        )

    def loss(weights: nnx.State, inputs: dict[str, Any]) -> Array:
        output = nnx.merge(graph, weights, rest)(**inputs)
        return jnp.mean(output.astype(jnp.float32) ** 2)

    inputs = {name: shape(name, given) for name, given in case.input_shapes().items()}
    return jax.jit(jax.value_and_grad(loss)).lower(weights, inputs).compile()


def figures(case: Case, devices: int) -> dict:
    """What one of so many devices holds and exchanges.

    Collectives that run once a layer, or several times, are told apart from those that run once.
    """
    with jax.set_mesh(parallel.make_mesh(points=devices)):
        compiled = compile_step(case)
    memory, exchanged = memory_of(compiled), Program(text_of(compiled)).collectives()
    in_layers = [(found, times) for found, times in exchanged if times >= case.layers]
    return {
        "model": case.model,
        "devices": devices,
        "points": case.points,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "layer_bytes": sum(found.size * times for found, times in in_layers) / case.layers,
        "step_bytes": sum(found.size * times for found, times in exchanged),
        "collectives": sum(times for _, times in exchanged),
    }


def table(rows: list[dict]) -> str:
    """The figures as a Markdown table."""
    lines = [
        (
            "| model | devices | points | points a device | arguments MiB | temporaries MiB | "
            "a layer exchanges, bytes | a step, bytes | collectives a step |"
        ),
        "| --- |" + " ---: |" * 8,
    ]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['devices']} | {row['points']:,} "
            f"| {row['points'] // row['devices']:,} | {row['argument_bytes'] / 2**20:,.1f} "
            f"| {row['temporary_bytes'] / 2**20:,.1f} | {row['layer_bytes']:,.0f} "
            f"| {row['step_bytes']:,} | {row['collectives']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=("flare", "gale", "gale_fa"))
    parser.add_argument("--points", type=int, default=65_536, help="on a device, and in all")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args()
    use_virtual_devices(8)
    tables: dict[str, list[dict]] = {
        "the same points on each device": [],
        "the same points in all": [],
    }
    for (title, rows), grows in zip(tables.items(), (True, False), strict=True):
        for model in options.models:
            for devices in _DEVICES:
                points = options.points * (devices if grows else 1)
                case = Case(model, points, layers=options.layers, dtype=options.dtype)
                rows.append(figures(case, devices))
        print(f"{title}\n\n{table(rows)}\n", flush=True)
    if options.json is not None:
        write_json(options.json, tables)


if __name__ == "__main__":
    one_line_errors(main)
