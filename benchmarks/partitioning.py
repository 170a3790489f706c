"""`python -m benchmarks.partitioning`: what the compiler does with sharded points by itself.

Compiles the pieces of a layer, forward and backward, on 8 virtual devices that share out the
points, and prints the collectives and temporary bytes. Where the compiler does well a piece is
left to it; where it does not, `parallel/` has an island, printed beside it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

import parallel
from benchmarks.collectives import collectives
from benchmarks.memory import memory_of
from benchmarks.program import text_of
from benchmarks.virtual_devices import use_virtual_devices
from experiments.training.steps import relative_l2
from flare_jax.heads import HeadLinear, HeadScores, LatentWeights
from flare_jax.linear import linear
from flare_jax.mixer import flare_mixer
from parallel import mesh as mesh_lib
from parallel.mesh import DATA, POINTS

_BATCH, _POINTS, _WIDTH, _HEADS, _LATENTS = 1, 65_536, 128, 8, 64


def _layer_norm(x: Array, scale: Array) -> Array:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale


def _dense_mixer(x: Array, weights: LatentWeights, value: HeadLinear, output: HeadLinear) -> Array:
    x = jnp.einsum("bnc,hcd->bnhd", x, weights.point.kernel) + weights.point.bias
    values = jnp.einsum("bnhd,hde->bnhe", x, value.kernel) + value.bias
    scores = jnp.einsum("hsd,bnhd->bhsn", weights.scores.kernel, x)
    scores = scores + weights.scores.bias[..., None]
    latents = jnp.einsum("bhsn,bnhd->bhsd", jax.nn.softmax(scores, -1), values)
    y = jnp.einsum("bhsn,bhsd->bnhd", jax.nn.softmax(scores, 2), latents)
    return jnp.einsum("bnhd,hdc->bnc", y, output.kernel) + output.bias


def _pieces() -> dict[str, tuple[Callable, tuple]]:
    """Name, function and abstract arguments of each piece."""
    width = _WIDTH // _HEADS

    def points(*rest: int) -> Any:
        axes = (DATA, POINTS, *[None] * len(rest))
        sharding = mesh_lib.sharding(*axes)
        return jax.ShapeDtypeStruct((_BATCH, _POINTS, *rest), jnp.float32, sharding=sharding)

    def weight(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=mesh_lib.sharding())

    mixer = (
        points(_WIDTH),
        LatentWeights(
            HeadLinear(weight(_HEADS, _WIDTH, width), weight(_HEADS, width)),
            HeadScores(weight(_HEADS, _LATENTS, width), weight(_HEADS, _LATENTS)),
        ),
        HeadLinear(weight(_HEADS, width, width), weight(_HEADS, width)),
        HeadLinear(weight(_HEADS, width, _WIDTH), weight(1, _WIDTH)),
    )
    slices = (points(_HEADS, _LATENTS), points(_HEADS, width))
    return {
        "linear layer": (linear, (points(_WIDTH), weight(_WIDTH, _WIDTH), weight(_WIDTH))),
        "layer norm": (_layer_norm, (points(_WIDTH), weight(_WIDTH))),
        "relative L2 loss": (relative_l2, (points(4), points(4))),
        "FLARE layer, left to the compiler": (_dense_mixer, mixer),
        "FLARE layer, island": (flare_mixer, mixer),
        "slice sums, left to the compiler": (_dense_slice_sums, slices),
        "slice sums, island": (parallel.slice_sums, slices),
    }


def _dense_slice_sums(weights: Array, values: Array) -> tuple[Array, Array]:
    return jnp.einsum("bnhs,bnhd->bhsd", weights, values), weights.sum(1)


def main() -> None:
    """The command."""
    use_virtual_devices(8)
    print(
        f"8 devices, {_POINTS:,} points of width {_WIDTH}, {_HEADS} heads, {_LATENTS} latents, "
        "float32; forward and all gradients\n"
    )
    print("| piece | collectives | bytes | temporary MiB a device |\n| --- | --- | ---: | ---: |")
    with jax.set_mesh(parallel.make_mesh(points=8)):
        for name, (function, arguments) in _pieces().items():

            def step(
                cotangent: PyTree, *arguments: PyTree, function: Callable = function
            ) -> tuple[PyTree, PyTree]:
                output, pull_back = jax.vjp(function, *arguments)
                return output, pull_back(cotangent)

            cotangent = jax.eval_shape(function, *arguments)
            compiled = jax.jit(step).lower(cotangent, *arguments).compile()
            found = collectives(text_of(compiled))
            listed = "; ".join(f"{c.kind} {' '.join(c.arrays)}" for c in found)
            size = sum(collective.size for collective in found)
            temporary = memory_of(compiled).temp_size_in_bytes / 2**20
            print(f"| {name} | {listed or 'none'} | {size:,} | {temporary:,.1f} |")


if __name__ == "__main__":
    main()
