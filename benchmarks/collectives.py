"""Collectives of a compiled program, read from its optimized text."""

import re
from collections import Counter
from typing import NamedTuple

_KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}
# `name = shapes kind(`: asynchronous ones start and end; the start carries the operands.
_LINE = re.compile(rf"= (?P<shapes>.*?) (?P<kind>{'|'.join(_KINDS)})(?P<start>-start)?\(")
_SHAPE = re.compile(r"(?P<type>[a-z]+\d*)\[(?P<dims>[\d,]*)\]")


class Collective(NamedTuple):
    """One collective of a program.

    Attributes:
        kind: `all-reduce`, `all-gather`, `all-to-all`, `collective-permute` or `reduce-scatter`.
        shapes: its arrays, as in `f32[2,8,64]`.
        size: bytes of these arrays on one device.
    """

    kind: str
    shapes: tuple[str, ...]
    size: int


def collectives(program: str) -> Counter[Collective]:
    """The collectives of a compiled program's text, with how often each stands in it.

    One in the body of a loop stands once, however often the loop runs.
    """
    found: Counter[Collective] = Counter()
    for line in program.splitlines():
        match = _LINE.search(line)
        if not match:
            continue
        shapes = [m.group(0) for m in _SHAPE.finditer(match["shapes"])]
        if match["start"] and len(shapes) > 1 and match["kind"] != "all-reduce":
            shapes = shapes[len(shapes) // 2 :]
        size = sum(_size(shape) for shape in shapes)
        found[Collective(match["kind"], tuple(shapes), size)] += 1
    return found


def _size(shape: str) -> int:
    match = _SHAPE.fullmatch(shape)
    entries = 1
    for dimension in filter(None, match["dims"].split(",")):
        entries *= int(dimension)
    return entries * _BYTES.get(match["type"], 4)
