"""What a mesh file says of its sizes and of other files, looked at before VTK believes it.

VTK takes memory for as many points as a file's header says, and ends the whole process where there
is not as much; and it follows the blocks of a `.vtm` to any file of the machine.
"""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.parsers import expat

from experiments.formats.archives import shown, stays_inside
from experiments.formats.limits import machine_memory

_BLOCKS = ".vtm"
_XML_ENDINGS = (".vtp", ".vtu", ".vts", ".vti", ".vtr", _BLOCKS)
_STEP = 2**20
_COUNT = "NumberOf"
_REFERENCES = ("file", "Source")
_OF_POINTS, _OF_CELLS = ("Points", "PointData", "Coordinates"), ("Cells", "CellData")
# Bytes of a coordinate, an offset, and whatever has a type that does not say.
_NUMBER = 8
# A binary STL: a title, a number of triangles, and each of them.
_STL_TITLE, _STL_START, _STL_TRIANGLE = 80, 84, 50


def require_declared(path: Path) -> None:
    """Refuses a mesh file that says it holds more than there is, or names files elsewhere.

    Raises:
        OSError: it cannot be read.
        ValueError: it says it holds more than the machine's memory, or than the file; has
            definitions of its own, as of entities; or names a file outside of its folder.
    """
    ending = path.suffix.lower()
    if ending == ".stl":
        _require_triangles(path)
    elif ending in _XML_ENDINGS:
        for name in _Declared(path).references:
            block = path.parent / name
            if block.suffix.lower() in _XML_ENDINGS and block.is_file():
                _Declared(block)
    else:
        path.open("rb").close()


def _require_triangles(path: Path) -> None:
    with path.open("rb") as file:
        title = file.read(_STL_TITLE)
        count = int.from_bytes(file.read(_STL_START - _STL_TITLE), "little")
        held = (os.fstat(file.fileno()).st_size - _STL_START) // _STL_TRIANGLE
    # Text begins with this word, and so do some titles.
    if not title.lstrip().startswith(b"solid") and count > held:
        raise ValueError(f"{max(held, 0)} of {count} triangles")


class _Declared:
    """Reads the elements of a file, up to the data that are appended to them.

    Attributes:
        references: names of other files.
    """

    def __init__(self, path: Path) -> None:
        self.references: list[str] = []
        self._open: list[Any] = []
        self._path, self._needed, self._ended = path, 0, False
        self._points = self._cells = 0
        parser = expat.ParserCreate()
        parser.StartElementHandler = self._start
        parser.EndElementHandler = lambda name: self._open.pop()
        parser.StartDoctypeDeclHandler = self._refuse_definitions
        with path.open("rb") as file:
            try:
                while not self._ended and (content := file.read(_STEP)):
                    parser.Parse(content)
            except expat.ExpatError:
                return  # what follows the elements is no XML, nor is a damaged file

    def _refuse_definitions(self, *_: object) -> None:
        raise ValueError("definitions of its own (DOCTYPE)")

    def _start(self, name: str, attributes: Mapping[str, str]) -> None:
        self._ended = self._ended or name == "AppendedData"
        if self._ended:
            return
        for key in _REFERENCES:
            if key in attributes:
                self._refer(attributes[key])
        counts = {
            key: self._number(key, value)
            for key, value in attributes.items()
            if key.startswith(_COUNT)
        }
        if name == "Piece":
            self._begin_piece(counts, attributes.get("Extent"))
        elif name in ("DataArray", "Array"):
            self._add(counts, attributes.get("type", ""))
        elif "WholeExtent" in attributes:
            self._extent(attributes["WholeExtent"])
        self._open.append(name)

    def _refer(self, name: str) -> None:
        if not stays_inside(name):
            raise ValueError(f"a block outside of its folder, {shown(name)}")
        self.references.append(name)

    def _number(self, key: str, text: str) -> int:
        if not re.fullmatch(r"\s*\d{1,18}\s*", text):
            raise ValueError(f"{key} {shown(text)}")
        return int(text)

    def _extent(self, text: str) -> tuple[int, int]:
        """Points and cells of a part of a grid."""
        if not re.fullmatch(r"\s*(-?\d{1,10}\s+){5}-?\d{1,10}\s*", text):
            raise ValueError(f"extent {shown(text)}")
        numbers = list(map(int, text.split()))
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        steps = [max(0, last - first) for first, last in pairs]
        points = math.prod(step + 1 for step in steps)
        self._require(points * _NUMBER, "points")
        return points, math.prod(max(1, step) for step in steps)

    def _begin_piece(self, counts: Mapping[str, int], extent: str | None) -> None:
        if extent is not None:
            self._points, self._cells = self._extent(extent)
            return
        self._points = counts.get("NumberOfPoints", 0)
        self._cells = sum(count for key, count in counts.items() if key != "NumberOfPoints")
        self._require((self._points + self._cells) * _NUMBER, "points and cells")

    def _add(self, counts: Mapping[str, int], kind: str) -> None:
        parts = counts.get("NumberOfComponents", 1)
        inside = self._open[-1] if self._open else ""
        if "NumberOfTuples" in counts:
            rows = counts["NumberOfTuples"]
        else:
            rows = self._points if inside in _OF_POINTS else self._cells
        bits = re.search(r"\d+$", kind)
        self._needed += parts * rows * (int(bits[0]) // 8 if bits else _NUMBER)
        self._require(self._needed, "values")

    def _require(self, needed: int, what: str) -> None:
        if needed > machine_memory():
            raise ValueError(f"{what} that take {needed} bytes, more than there is memory")
