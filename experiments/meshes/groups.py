"""Zarr groups of unknown origin: opened, and read within the machine's memory.

Zarr believes what metadata say of codecs and sizes. Here only codecs of numbers are taken, and
sizes are compared before memory is.
"""

import math
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import ByteRequest
from zarr.codecs import ShardingCodec
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore

from experiments.formats.limits import MOST_TEXT, machine_memory
from experiments.meshes.unpacking import BoundedPipeline  # noqa: F401  sets it

METADATA = ("zarr.json", ".zgroup", ".zarray", ".zattrs")
_PACKING = {"blosc", "bz2", "gzip", "lz4", "zlib", "zstd"}
# None of these makes objects.
_OTHERS = {
    "astype",
    "bitround",
    "bytes",
    "crc32",
    "crc32c",
    "delta",
    "adler32",
    "fixedscaleoffset",
    "fletcher32",
    "quantize",
    "sharding_indexed",
    "shuffle",
    "transpose",
    "vlen-bytes",
    "vlen-utf8",
}
_PREFIX = "numcodecs."
# An offset and a length of each chunk of a shard.
_PLACE = 16
# Numbers of rows, and where they begin.
_COUNTS = 16


class _PlainFiles(LocalStore):
    """A folder of which only plain files are read, none of them larger than memory."""

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        try:
            found = (self.root / key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise ValueError(f"{key} that is no plain file")
        most = MOST_TEXT if key.rpartition("/")[2] in METADATA else machine_memory()
        if byte_range is None and found.st_size > most:
            raise ValueError(f"{key} of {found.st_size} bytes, more than {most}")
        return await super().get(key, prototype, byte_range)


def is_group(path: Path) -> bool:
    """Whether a folder is a group, of Zarr's format 2 or 3."""
    return any((path / name).is_file() for name in ("zarr.json", ".zgroup"))


def open_group(path: Path) -> tuple[dict[str, Any], dict[str, zarr.Array]]:
    """Attributes and arrays of a group, by their names; nothing of the arrays is read.

    Raises:
        ValueError: an array is packed by what makes other than numbers and strings of it, or in
            chunks larger than memory; damaged metadata raise errors of their own.
    """
    # Consolidated metadata could name arrays outside of the folder.
    group = zarr.open_group(_PlainFiles(path, read_only=True), mode="r", use_consolidated=False)
    arrays = dict(group.arrays())
    for name, array in arrays.items():
        _require_codecs(name, array)
        _require_chunks(name, array)
    return dict(group.attrs), arrays


def _require_codecs(name: str, array: zarr.Array) -> None:
    ids = [codec_id.removeprefix(_PREFIX) for codec_id in _codecs(array)]
    for codec_id in ids:
        if codec_id not in _PACKING | _OTHERS:
            raise ValueError(f"array {name!r} with codec {codec_id!r}")
    if len(_PACKING & set(ids)) > 1 or any(ids.count(each) > 1 for each in _PACKING):
        raise ValueError(f"array {name!r} packed more than once")


def _codecs(array: zarr.Array) -> Iterator[str]:
    metadata = array.metadata
    if metadata.zarr_format == 2:
        codecs = [*(metadata.filters or ()), metadata.compressor]
        yield from (codec.codec_id for codec in codecs if codec is not None)
        return
    yield from _names(metadata.codecs)


def _names(codecs: Any) -> Iterator[str]:
    for codec in codecs:
        yield codec.to_dict()["name"]
        if isinstance(codec, ShardingCodec):
            yield from _names(codec.codecs)


def _require_chunks(name: str, array: zarr.Array) -> None:
    needed = math.prod(array.chunks) * array.dtype.itemsize
    if array.shards is not None:
        chunks = zip(array.shards, array.chunks, strict=True)
        needed = max(needed, _PLACE * math.prod(shard // chunk for shard, chunk in chunks))
    if needed > machine_memory():
        raise ValueError(f"array {name!r} in chunks that take {needed} bytes")


def require_memory(array: zarr.Array, rows: slice | np.ndarray) -> None:
    """Refuses rows of an array that would take more than the machine's memory.

    Raises:
        ValueError: they would.
    """
    if not array.shape:
        return
    count = len(range(*rows.indices(array.shape[0]))) if isinstance(rows, slice) else len(rows)
    needed = count * math.prod(array.shape[1:]) * array.dtype.itemsize
    if not isinstance(rows, slice):
        # Zarr counts the rows of every chunk that there is.
        needed += _COUNTS * -(-array.shape[0] // array.chunks[0])
    if needed > machine_memory():
        raise ValueError(f"{count} rows that take {needed} bytes")
