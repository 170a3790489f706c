"""How much a packed chunk of a Zarr array unpacks to, known before it is unpacked.

Zarr unpacks whatever a chunk's file holds, and looks at the size afterwards: a file of 30 KB may
stand for a gigabyte. Here the packed bytes are asked first.
"""

import bz2
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import zarr
from zarr.codecs._v2 import V2Codec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, NDBuffer
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.registry import fully_qualified_name, register_pipeline

from experiments.formats.limits import UNPACKED_UNSEEN, inflates_within

_STEP = 2**20
# RFC 8878.
_FRAME = 0xFD2FB528
_SKIPPABLE = range(0x184D2A50, 0x184D2A60)
_LARGEST_BLOCK = 2**17


def _blosc_within(content: memoryview, most: int) -> bool:
    """Its header says the size, and blosc keeps to it."""
    return int.from_bytes(content[4:8], "little") <= most


def _lz4_within(content: memoryview, most: int) -> bool:
    """As blosc's, by numcodecs' header."""
    return int.from_bytes(content[:4], "little") <= most


def _bz2_within(content: memoryview, most: int) -> bool:
    total, stream, left = 0, bz2.BZ2Decompressor(), bytes(content)
    try:
        while total <= most and not stream.eof and (left or not stream.needs_input):
            total += len(stream.decompress(left, _STEP))
            left = b""
    except OSError:  # its reader says what is wrong
        return True
    return total <= most


def _zstd_within(content: memoryview, most: int) -> bool:
    """Each block makes 128 KB at most; what a frame's header says is taken in advance."""
    place, total = 0, 0

    def number(length: int) -> int:
        nonlocal place
        value = int.from_bytes(content[place : place + length], "little")
        place += length
        return value

    while place + 4 < len(content) and total <= most:
        magic = number(4)
        if magic in _SKIPPABLE:
            length = number(4)
            place += length
            continue
        if magic != _FRAME:
            break  # damaged: its reader says so
        flags = number(1)
        single = flags >> 5 & 1
        place += (0 if single else 1) + (0, 1, 2, 4)[flags & 3]
        declared = number((single, 2, 4, 8)[flags >> 6])
        made, last = 0, False
        while not last and place + 3 <= len(content) and made <= most:
            block = number(3)
            last, kind, length = bool(block & 1), block >> 1 & 3, block >> 3
            made += length if kind < 2 else _LARGEST_BLOCK
            place += 1 if kind == 1 else length
        place += 4 * (flags >> 2 & 1)
        total += max(made, declared)
    return total <= most


# Whether packed bytes, of whatever type, unpack to no more than so many.
_WITHIN: dict[str, Callable[[Any, int], bool]] = {
    "blosc": _blosc_within,
    "bz2": _bz2_within,
    "gzip": inflates_within,
    "lz4": _lz4_within,
    "zlib": inflates_within,
    "zstd": _zstd_within,
}


@dataclass(frozen=True)
class BoundedPipeline(BatchedCodecPipeline):
    """Zarr's own way from bytes to arrays, that looks at packed bytes before it unpacks them."""

    @property
    def _packing(self) -> str | None:
        if isinstance(self.array_bytes_codec, V2Codec):
            compressor = self.array_bytes_codec.compressor
            return None if compressor is None else compressor.codec_id
        names = (str(codec.to_dict()["name"]) for codec in self.bytes_bytes_codecs)
        names = (name.removeprefix("numcodecs.") for name in names)
        return next((name for name in names if name in _WITHIN), None)

    async def decode_batch(
        self, chunk_bytes_and_specs: Iterable[tuple[Buffer | None, ArraySpec]]
    ) -> Iterable[NDBuffer | None]:
        """Unpacks chunks.

        Raises:
            ValueError: one would unpack to more than its values.
        """
        batch = list(chunk_bytes_and_specs)
        within = _WITHIN.get(self._packing or "")
        for content, chunk in batch:
            if within is None or content is None:
                continue
            expected = math.prod(chunk.shape) * chunk.dtype.to_native_dtype().itemsize
            # A shard has the places of its chunks besides.
            most = max(2 * expected, UNPACKED_UNSEEN)
            if not within(memoryview(content.as_numpy_array().data), most):
                raise ValueError(f"a chunk that unpacks to more than its {expected} bytes")
        return await super().decode_batch(batch)


# Chunks inside of shards are read by whatever pipeline is set when they are.
register_pipeline(BoundedPipeline)
zarr.config.set({"codec_pipeline.path": fully_qualified_name(BoundedPipeline)})
