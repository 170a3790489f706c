"""What a compiled program does each time it runs, read from its optimized text.

Bodies of loops stand in a program once; what they do is counted as often as they run, where that
can be read from the program, and once where it cannot.
"""

import re
from collections import Counter
from math import prod

import jax

from benchmarks.collectives import ARRAY, BYTES, Collective, collectives, shape_of

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<rest>.*)$"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# They move nothing, or what they move is counted where it is done.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call",
    "conditional", "after-all", "partition-id", "replica-id", "opt-barrier", "iota",
    "async-start", "async-done",
}  # fmt: skip
_SLICES = {"dynamic-slice", "slice", "gather"}


def text_of(compiled: jax.stages.Compiled) -> str:
    """The optimized program as text.

    Raises:
        RuntimeError: this platform has none.
    """
    text = compiled.as_text()
    if text is None:
        raise RuntimeError("program: expected the text of the compiled program; got none")
    return text


class Instruction:
    """One line of a program."""

    def __init__(self, match: re.Match):
        self.name, self.op = match["name"], match["op"]
        self.size = _size(match["type"])
        rest = match["rest"]
        self.operands = re.findall(r"%([\w.\-]+)", rest.split(")", 1)[0])
        self.rest = rest
        trips = _TRIPS.search(rest)
        self.trips = int(trips[1]) if trips else None
        condition = re.search(r"condition=%?([\w.\-]+)", rest)
        self.condition = condition[1] if condition else None

    def called(self) -> list[str]:
        """Names of the computations that it runs."""
        names = re.findall(r"(?:body|to_apply|calls)=%?([\w.\-]+)", self.rest)
        for group in re.findall(r"branch_computations=\{([^}]*)\}", self.rest):
            names += re.findall(r"%?([\w.\-]+)", group)
        return names


class Program:
    """A compiled program as its text."""

    def __init__(self, text: str):
        """Reads the text of `jax.stages.Compiled.as_text`."""
        self._instructions: dict[str, list[Instruction]] = {}
        self._lines: dict[str, list[str]] = {}
        self._entry, current = "", None
        for line in text.splitlines():
            start = _COMPUTATION.match(line)
            if start is not None:
                current = start[1]
                self._instructions[current], self._lines[current] = [], []
                self._entry = current if line.startswith("ENTRY") else self._entry
            elif line.startswith("}"):
                current = None
            elif current is not None:
                self._lines[current].append(line)
                match = _INSTRUCTION.match(line)
                if match is not None:
                    self._instructions[current].append(Instruction(match))
        self._runs = self._count_runs()

    def collectives(self) -> list[tuple[Collective, int]]:
        """Every collective, and how often it is done."""
        return [
            (found, count)
            for name, count in self._runs.items()
            for found in collectives("\n".join(self._lines[name]))
        ]

    def bytes_moved(self) -> int:
        """Bytes that its instructions read and write on one device, each array by each of them."""
        return sum(
            count * self._moved(name, instruction)
            for name, count in self._runs.items()
            for instruction in self._instructions[name]
        )

    def _count_runs(self) -> Counter:
        """How often each computation runs, those inside a fusion left out."""
        runs: Counter[str] = Counter()
        waiting = [(self._entry, 1)]
        while waiting:
            name, count = waiting.pop()
            runs[name] += count
            for instruction in self._instructions[name]:
                if instruction.op in ("while", "call", "conditional", "async-start"):
                    times = count * self._trips(instruction)
                    waiting += [
                        (called, times)
                        for called in instruction.called()
                        if called in self._instructions
                    ]
        return runs

    def _trips(self, loop: Instruction) -> int:
        """How often a loop runs: as is written, or the one number in its condition."""
        if loop.trips is not None:
            return loop.trips
        condition = self._lines.get(loop.condition or "", [])
        limits = re.findall(r"s32\[\][^=]* constant\((\d+)\)", "\n".join(condition))
        return int(limits[0]) if len(limits) == 1 else 1

    def _moved(self, computation: str, instruction: Instruction) -> int:
        if instruction.op in _FREE or instruction.op.endswith("-done"):
            return 0
        sizes = {each.name: each.size for each in self._instructions[computation]}
        operands = [sizes.get(name, 0) for name in instruction.operands]
        if instruction.op == "fusion":
            return self._moved_by_fusion(instruction, operands)
        if instruction.op in _SLICES:
            return 2 * instruction.size
        if instruction.op == "dynamic-update-slice":
            return 2 * operands[1]
        return instruction.size + sum(operands)

    def _moved_by_fusion(self, fusion: Instruction, operands: list[int]) -> int:
        """Of an array that is sliced or written into in place, the part alone."""
        inside = [each for name in fusion.called() for each in self._instructions.get(name, [])]
        sizes = {each.name: each.size for each in inside}
        moved, written = 0, fusion.size
        parameters = [each for each in inside if each.op == "parameter"]
        for parameter in parameters:
            index = int(parameter.rest.split(")", 1)[0])
            names = _views(parameter.name, inside)
            users = [
                each
                for each in inside
                if each.op != "bitcast" and names.intersection(each.operands)
            ]
            whole = operands[index] if index < len(operands) else parameter.size
            read = 0
            for user in users:
                if user.op in _SLICES and user.operands[0] in names:
                    read += user.size
                elif user.op == "dynamic-update-slice" and user.operands[0] in names:
                    update = sizes.get(user.operands[1], 0)
                    written = max(0, written - whole) + update
                else:
                    read += whole
            moved += min(read, whole)
        return moved + written


def _views(name: str, instructions: list[Instruction]) -> set[str]:
    """Names under which an array is read: its own, and those of its bitcasts."""
    names = {name}
    for each in instructions:  # In the order of their definition.
        if each.op == "bitcast" and each.operands[0] in names:
            names.add(each.name)
    return names


def _size(type_text: str) -> int:
    return sum(BYTES.get(kind, 1) * prod(shape_of(dims)) for kind, dims in ARRAY.findall(type_text))
