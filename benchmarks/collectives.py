"""Collectives of a compiled program, read from its optimized text."""

import re
from dataclasses import dataclass
from math import prod

import jax
import numpy as np

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
BYTES |= {"s64": 8, "u64": 8, "f64": 8}
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
# An asynchronous collective is two instructions; its end repeats its start.
_COLLECTIVE = re.compile(
    r"= (?P<result>\(.*?\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|all-to-all|ragged-all-to-all|collective-permute|"
    r"collective-broadcast|reduce-scatter)(?P<start>-start)?\((?P<rest>.*)$"
)


@dataclass(frozen=True)
class Collective:
    """One exchange between devices.

    Attributes:
        kind: its HLO name, `all-reduce` for instance.
        arrays: its results on one device, as in `f32[2,8,64]`; several where they were combined.
        shapes: their shapes.
        size: their bytes.
        attributes: the rest of the instruction.
    """

    kind: str
    arrays: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    size: int
    attributes: str

    @property
    def groups(self) -> frozenset[frozenset[int]]:
        """The devices that exchange with each other, as sets of positions in the mesh.

        Raises:
            ValueError: the program writes them in a way that is not known.
        """
        return _groups(self.attributes)

    def stays_within(self, axes: tuple[int, ...], mesh: jax.sharding.Mesh) -> bool:
        """Whether only devices exchange that differ in no other position than along `axes`."""
        positions = np.indices(mesh.devices.shape).reshape(mesh.devices.ndim, -1).T
        other = [axis for axis in range(mesh.devices.ndim) if axis not in axes]
        return all(
            len({tuple(positions[device][other]) for device in group}) == 1 for group in self.groups
        )


def collectives(text: str) -> list[Collective]:
    """Every collective of a program's text; one in the body of a loop stands once."""
    found = []
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        arrays = ARRAY.findall(match["result"])
        if match["start"] and len(arrays) > 1 and match["kind"] != "all-reduce":
            arrays = arrays[len(arrays) // 2 :]  # the operands come first
        found.append(
            Collective(
                match["kind"],
                tuple(f"{kind}[{dims}]" for kind, dims in arrays),
                tuple(shape_of(dims) for _, dims in arrays),
                sum(BYTES[kind] * prod(shape_of(dims)) for kind, dims in arrays),
                match["rest"],
            )
        )
    return found


def shape_of(dims: str) -> tuple[int, ...]:
    """The shape that HLO writes as `2,8,64`."""
    return tuple(int(size) for size in dims.split(",")) if dims else ()


def _groups(attributes: str) -> frozenset[frozenset[int]]:
    """The ways in which HLO writes groups of devices, and the pairs of a permutation."""
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}", attributes)
    if listed is not None:
        groups = re.findall(r"\{([\d,]*)\}", listed[1])
        return frozenset(frozenset(map(int, group.split(","))) for group in groups)
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota is not None:
        devices = np.arange(prod(shape_of(iota[2]))).reshape(shape_of(iota[2]))
        devices = devices.transpose(shape_of(iota[3])) if iota[3] else devices
        return _as_sets(devices.reshape(shape_of(iota[1])))
    mesh = re.search(
        r"replica_groups=mesh\[([^\]]*)\],?"
        r"(?: device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}",
        attributes,
    )
    if mesh is None:
        raise ValueError(f"collective: expected its groups of devices; got {attributes}")
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
    names, inside = list(sizes), re.findall(r"'(\w+)'", mesh[4])
    devices = np.arange(prod(sizes.values()))
    if mesh[2] is not None:
        devices = devices.reshape(shape_of(mesh[2]))
        devices = devices.transpose(shape_of(mesh[3])) if mesh[3] else devices
    devices = devices.reshape(tuple(sizes.values()))
    order = [names.index(name) for name in names if name not in inside]
    order += [names.index(name) for name in inside]
    return _as_sets(devices.transpose(order).reshape(-1, prod(sizes[name] for name in inside)))


def _as_sets(devices: np.ndarray) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(row.tolist()) for row in devices)
