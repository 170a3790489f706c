"""`python -m benchmarks.compile_for h200:8`: compiles a training step for a machine not here.

Prints what one device holds and every collective of the step.
"""

import argparse
import os
import time
from collections import Counter

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.collectives import collectives
from benchmarks.topologies import target_mesh
from experiments.cli import one_line_errors
from experiments.data import Batch, Statistics
from experiments.optimizer import make_optimizer
from experiments.schema import OptimizerConfig
from experiments.training import abstract_state, make_step
from flare_jax import FLARE
from parallel import mesh as mesh_lib
from parallel.mesh import DATA, POINTS
from parallel.points import padded_size

_INPUTS, _POSITIONS, _OUTPUTS = 3, 3, 4


def compile_step(arguments: argparse.Namespace) -> jax.stages.Compiled:
    """Compiles the training step of `experiments.training` for the target's mesh."""
    model = FLARE(
        functional_dim=_INPUTS,
        embedding_dim=_POSITIONS,
        out_dim=_OUTPUTS,
        n_layers=arguments.layers,
        n_hidden=arguments.width,
        n_head=arguments.heads_of_model,
        slice_num=arguments.latents,
        dtype=arguments.dtype,
        remat=arguments.remat,
        rngs=nnx.Rngs(0),
    )
    mesh = target_mesh(arguments.target, arguments.data, arguments.points, arguments.heads)
    optimizer = make_optimizer(OptimizerConfig(), steps=1000)
    statistics = Statistics(
        *(
            jax.ShapeDtypeStruct((width,), jnp.float32)
            for width in (_INPUTS, _INPUTS, _POSITIONS, _POSITIONS, _OUTPUTS, _OUTPUTS)
        )
    )
    with jax.set_mesh(mesh):
        state = abstract_state(model, optimizer, statistics, 0, average=False)
        points = padded_size(arguments.num_points)

        def array(*shape: int, dtype=jnp.float32):
            axes = (DATA, POINTS, *[None] * (len(shape) - 2))
            return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh_lib.sharding(*axes))

        size = arguments.batch
        batch = Batch(
            array(size, points, _INPUTS),
            array(size, points, _POSITIONS),
            array(size, points, _OUTPUTS),
            array(size, points, dtype=jnp.bool_),
        )
        step = make_step(model, optimizer, None, state)
        return step.lower(state, (batch,)).compile()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_for", description=__doc__)
    parser.add_argument("target", help="h200:8, h200:256, tpu:v5e:8x8, ...")
    parser.add_argument("--data", type=int, default=1, help="size of the mesh axis data")
    parser.add_argument("--points", type=int, default=8, help="size of the mesh axis points")
    parser.add_argument("--heads", type=int, default=1, help="size of the mesh axis heads")
    parser.add_argument("--num-points", type=int, default=1_000_000, help="points of a sample")
    parser.add_argument("--batch", type=int, default=1, help="samples of a batch")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads-of-model", type=int, default=8)
    parser.add_argument("--latents", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--remat", choices=("none", "block"), default="none")
    arguments = parser.parse_args()

    started = time.perf_counter()
    compiled = compile_step(arguments)
    memory, seconds = compiled.memory_analysis(), time.perf_counter() - started
    print(
        f"{arguments.target}: data={arguments.data} points={arguments.points} "
        f"heads={arguments.heads}; FLARE, {arguments.layers} blocks of width {arguments.width}, "
        f"{arguments.latents} latents, {arguments.dtype}, remat {arguments.remat}; "
        f"{arguments.batch} x {arguments.num_points:,} points; compiled in {seconds:.0f} s\n"
    )
    print("| per device | MiB |\n| --- | ---: |")
    for name, size in (
        ("arguments (weights, optimizer, batch)", memory.argument_size_in_bytes),
        ("outputs in donated arguments", memory.alias_size_in_bytes),
        ("temporaries", memory.temp_size_in_bytes),
    ):
        print(f"| {name} | {size / 2**20:,.1f} |")
    print("\n| collective | arrays | bytes | in the program |\n| --- | --- | ---: | ---: |")
    found = Counter((c.kind, " ".join(c.arrays), c.size) for c in collectives(compiled.as_text()))
    for (kind, arrays, size), count in sorted(found.items()):
        print(f"| {kind} | {arrays} | {size:,} | {count} |")


if __name__ == "__main__":
    one_line_errors(main)
