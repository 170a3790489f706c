"""What a compiled program exchanges and holds, read from its HLO text."""

import re
from collections import Counter
from dataclasses import dataclass
from math import prod

import jax
import numpy as np
from conftest import COMPILE_FAST

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_BYTES |= {"s64": 8, "u64": 8, "f64": 8}
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
# An asynchronous collective is two instructions; its end repeats its start.
_COLLECTIVE = re.compile(
    r"= (?P<result>\(.*?\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|all-to-all|ragged-all-to-all|collective-permute|"
    r"collective-broadcast|reduce-scatter)(?:-start)?\((?P<rest>.*)$"
)


@dataclass(frozen=True)
class Collective:
    """One exchange between devices.

    Attributes:
        kind: its HLO name, `all-reduce` for instance.
        shapes: the shapes of its results on one device; several where they were combined.
        size: bytes of its results.
        groups: the devices that exchange with each other, as sets of positions in the mesh.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    size: int
    groups: frozenset[frozenset[int]]

    def stays_within(self, axes: tuple[int, ...], mesh: jax.sharding.Mesh) -> bool:
        """Whether only devices exchange that differ in no other position than along `axes`."""
        positions = np.indices(mesh.devices.shape).reshape(mesh.devices.ndim, -1).T
        other = [axis for axis in range(mesh.devices.ndim) if axis not in axes]
        return all(
            len({tuple(positions[device][other]) for device in group}) == 1 for group in self.groups
        )


def compile_for(function, *arguments) -> jax.stages.Compiled:
    """The program of a function for arguments that may be shapes only; it need not run."""
    return jax.jit(function).lower(*arguments).compile(COMPILE_FAST)


def text_of(function, *arguments) -> str:
    """What one device runs, loops and fusions included."""
    return compile_for(function, *arguments).as_text()


def collectives(text: str) -> list[Collective]:
    """Every collective of a program, those inside loops as well."""
    found = []
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        if match is not None:
            arrays = _ARRAY.findall(match["result"])
            found.append(
                Collective(
                    match["kind"],
                    tuple(_shape(dims) for _, dims in arrays),
                    sum(_BYTES[kind] * prod(_shape(dims)) for kind, dims in arrays),
                    _groups(match["rest"]),
                )
            )
    return found


def total_size(collectives: list[Collective]) -> int:
    """Bytes of the results of all."""
    return sum(collective.size for collective in collectives)


def shapes_of(collectives: list[Collective]) -> Counter:
    """How often each kind exchanges each shape, however the compiler combined them."""
    return Counter((each.kind, shape) for each in collectives for shape in each.shapes)


def array_shapes(text: str) -> set[tuple[int, ...]]:
    """Shapes of all arrays that a program names, also inside its loops and fusions."""
    return {_shape(dims) for kind, dims in _ARRAY.findall(text) if kind in _BYTES}


def _shape(dims: str) -> tuple[int, ...]:
    return tuple(int(size) for size in dims.split(",")) if dims else ()


def _groups(attributes: str) -> frozenset[frozenset[int]]:
    """The three ways in which HLO writes groups of devices, and the pairs of a permutation."""
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}", attributes)
    if listed is not None:
        groups = re.findall(r"\{([\d,]*)\}", listed[1])
        return frozenset(frozenset(map(int, group.split(","))) for group in groups)
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota is not None:
        devices = np.arange(prod(_shape(iota[2]))).reshape(_shape(iota[2]))
        devices = devices.transpose(_shape(iota[3])) if iota[3] else devices
        return _as_sets(devices.reshape(_shape(iota[1])))
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes)
    assert mesh is not None, f"unknown groups of devices: {attributes}"
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
    names, inside = list(sizes), re.findall(r"'(\w+)'", mesh[2])
    devices = np.arange(prod(sizes.values())).reshape(tuple(sizes.values()))
    order = [names.index(name) for name in names if name not in inside]
    order += [names.index(name) for name in inside]
    return _as_sets(devices.transpose(order).reshape(-1, prod(sizes[name] for name in inside)))


def _as_sets(devices: np.ndarray) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(row.tolist()) for row in devices)
