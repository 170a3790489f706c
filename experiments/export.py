"""`python -m experiments.export RUN OUT`: a run as one program that runs where JAX is.

The program is one of `jax.export`: weights and statistics are constants of it, and it takes and
gives arrays in the units of the data. The numbers of points and samples are symbolic. A program is
traced once and compiled once more for each shape that it is called with.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import export
from jaxtyping import Array, Float, PyTree

from experiments.cli import add_run, one_line_errors
from experiments.configuration import configs
from experiments.configuration.schema import StoreConfig
from experiments.data.batch import Batch, Statistics, Stream
from experiments.data.description import Description
from experiments.files import write_atomically, write_json
from experiments.models import Model
from experiments.prediction import COORDINATES, predict
from experiments.processes.clusters import require_alone
from experiments.training.trained import restore_run
from geotransolver_jax import GeoTransolver
from parallel import mesh as mesh_lib
from parallel.parameters import split_weights

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_UNITS = "those of the data that the run was trained on"

# Arrays `(B, N, C)` by their names, those of one of several streams as in `surface.embedding`.
Inputs = dict[str, Float[Array, "B _ C"]]


def export_model(
    model: Model,
    statistics: Statistics,
    description: Description,
    platforms: Sequence[str] | None = None,
) -> export.Exported:
    """The program of a model: what `prediction.predict` makes of clouds without padding.

    Args:
        model: the model; it is exported as it evaluates.
        statistics: by which it normalizes.
        description: of the data that it is for.
        platforms: for which the program is made, of `PLATFORMS`; by default this process's.

    Returns:
        A program of one dictionary, see `input_shapes`. It returns the fields in their units, one
        array `(B, N, C)`, or for several streams a dictionary of them.
    """
    platforms = platforms or [export.default_export_platform()]
    graph, weights, rest = split_weights(model)

    def made_for(platform: str) -> Callable[..., PyTree]:
        def run(weights: PyTree, statistics: Statistics, inputs: Inputs) -> PyTree:
            model = nnx.merge(graph, weights, rest)
            model.eval()
            # How long chunks are, and in what order products are made, is the platform's.
            with mesh_lib.tracing_for(platform):
                fields = predict(model, statistics, _batch(inputs, description))
            names = [stream.name for stream in description.streams]
            return dict(zip(names, fields, strict=True)) if len(names) > 1 else fields[0]

        return run

    made = {platform: made_for(platform) for platform in platforms}

    @jax.jit
    def program(inputs: Inputs) -> PyTree:
        return jax.lax.platform_dependent(weights, statistics, inputs, **made)

    return export.export(program, platforms=list(made))(input_shapes(model, description))


def input_shapes(model: Model, description: Description) -> dict[str, jax.ShapeDtypeStruct]:
    """What a program takes, by the names of `Batch` and `Stream`.

    The batch is `B`, points are `N`, or `N0`, `N1`, ... of several streams, and those of the
    geometry `M`; a model of a grid has the points of the grid.
    """
    several = len(description.streams) > 1
    grid = None if model.structured_shape is None else math.prod(model.structured_shape)
    scope = export.SymbolicScope()

    def shape(name: str, width: int) -> jax.ShapeDtypeStruct:
        dimensions = f"B, {name if grid is None else grid}, {width}"
        return jax.ShapeDtypeStruct(export.symbolic_shape(dimensions, scope=scope), jnp.float32)

    shapes = {}
    for i, stream in enumerate(description.streams):
        widths = {"embedding": stream.embedding, "fx": stream.fx}
        if stream.positions and getattr(model, "include_local_features", False):
            widths["positions"] = COORDINATES
        for name, width in widths.items():
            if width:
                shapes[_name(description, i, name)] = shape(f"N{i}" if several else "N", width)
    if description.geometry is not None and isinstance(model, GeoTransolver):
        shapes["geometry"] = shape("M", description.geometry)
    if description.global_embedding is not None:
        tokens, width = description.global_embedding
        dimensions = export.symbolic_shape(f"B, {tokens}, {width}", scope=scope)
        shapes["global_embedding"] = jax.ShapeDtypeStruct(dimensions, jnp.float32)
    return shapes


def _name(description: Description, index: int, name: str) -> str:
    several = len(description.streams) > 1
    return f"{description.streams[index].name}.{name}" if several else name


def _batch(inputs: Inputs, description: Description) -> Batch:
    streams = []
    # What is predicted is not read.
    target: Any = None
    for i in range(len(description.streams)):
        embedding = inputs[_name(description, i, "embedding")]
        fx, positions = (inputs.get(_name(description, i, name)) for name in ("fx", "positions"))
        streams.append(Stream(embedding, target, fx, positions))
    return Batch(
        tuple(streams), inputs.get("geometry"), global_embedding=inputs.get("global_embedding")
    )


def describe(exported: export.Exported, description: Description) -> dict[str, Any]:
    """What a program is called with and gives, as JSON."""

    def array(shape: jax.core.ShapedArray) -> dict[str, Any]:
        sizes = [str(size) if export.is_symbolic_dim(size) else size for size in shape.shape]
        return {"shape": sizes, "dtype": str(shape.dtype), "units": _UNITS}

    (inputs,), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    several = len(description.streams) > 1
    fields = {
        stream.name: array(outputs[stream.name] if several else outputs)
        | {"fields": list(stream.fields)}
        for stream in description.streams
    }
    return {
        "inputs": {name: array(shape) for name, shape in inputs.items()},
        "output": fields if several else next(iter(fields.values())),
        "platforms": list(exported.platforms),
        "jax": jax.__version__,
        "calling_convention_version": exported.calling_convention_version,
    }


def write_program(run: Path, out: Path, which: str, platforms: Sequence[str] | None) -> int:
    """Exports a run into a file, and what it is beside it, as JSON.

    Args:
        run: the run's folder.
        out: the program; the other file has `.json` behind its name.
        which: `last` or `best` checkpoint.
        platforms: see `export_model`.

    Returns:
        Bytes of the program.

    Raises:
        FileNotFoundError: there is no run, no checkpoint, or no folder for the program.
        ValueError: the checkpoint is damaged or of another model; `out` is a folder; or this is
            one of several processes, of which each would write it.
    """
    require_alone("export")
    if out.is_dir():
        raise ValueError(f"{out}: expected a file to write; got a folder")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out}: expected a folder to write into; got none")
    trained, description = restore_run(run, which)
    exported = export_model(
        trained.with_weights(), trained.state.statistics, description, platforms
    )
    program = exported.serialize()
    write_atomically(out, lambda temporary: temporary.write_bytes(program))
    content = {"program": out.name, "run": str(run), "step": trained.step}
    config = configs.load(run)
    if isinstance(config.data, StoreConfig):
        # What is done to a file's arrays before the program sees them, and to what it gives.
        kept = ("streams", "geometry", "global_embedding", "frame", "free_stream", "coefficients")
        content["data"] = {name: dataclasses.asdict(config.data)[name] for name in kept}
    write_json(Path(f"{out}.json"), content | describe(exported, description))
    return len(program)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.export",
        description="Writes a trained run as a program that needs JAX alone.",
    )
    add_run(parser)
    parser.add_argument("out", type=Path, help="the program's file, as in darcy.jaxexport")
    parser.add_argument(
        "--platforms", nargs="+", choices=PLATFORMS, help="by default this machine's"
    )
    arguments = parser.parse_args()
    size = write_program(arguments.run, arguments.out, arguments.checkpoint, arguments.platforms)
    print(f"{arguments.out}: {size:,} bytes; see {arguments.out}.json")


if __name__ == "__main__":
    one_line_errors(main)
