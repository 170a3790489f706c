"""What a compiled program exchanges and holds, read from its HLO text."""

from collections import Counter

import jax

from benchmarks.collectives import ARRAY, BYTES, Collective, collectives, shape_of

__all__ = ["array_shapes", "collectives", "compile_for", "shapes_of", "text_of", "total_size"]


def compile_for(function, *arguments) -> jax.stages.Compiled:
    """The program of a function for arguments that may be shapes only; it need not run."""
    return jax.jit(function).lower(*arguments).compile()


def text_of(function, *arguments) -> str:
    """What one device runs, loops and fusions included."""
    return compile_for(function, *arguments).as_text()


def total_size(collectives: list[Collective]) -> int:
    """Bytes of the results of all."""
    return sum(collective.size for collective in collectives)


def shapes_of(collectives: list[Collective]) -> Counter:
    """How often each kind exchanges each shape, however the compiler combined them."""
    return Counter((each.kind, shape) for each in collectives for shape in each.shapes)


def array_shapes(text: str) -> set[tuple[int, ...]]:
    """Shapes of all arrays that a program names, also inside its loops and fusions."""
    return {shape_of(dims) for kind, dims in ARRAY.findall(text) if kind in BYTES}
