"""How much a file of unknown origin may take: its size is compared before memory is taken."""

import json
import os
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from experiments.messages import one_line

# Far more than any file has that tells of others: names, numbers and settings.
MOST_TEXT = 2**24
# What a few bytes may unpack to, whatever should come out.
UNPACKED_UNSEEN = 2**28
# RFC 1951: 258 bytes of two bits.
DEFLATE_RATIO = 1032
_ZLIB_OR_GZIP = 47
_STEP = 2**20
_CONTAINER = Path("/sys/fs/cgroup/memory.max")


@cache
def machine_memory() -> int:
    """Bytes of memory of this machine, or of the container that this process is in."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(_CONTAINER.read_text()))
    except (OSError, ValueError):  # there is none, or it has no limit
        return physical


def require_room(where: str | Path, what: str, needed: int, most: int | None = None) -> None:
    """Refuses what would take too much memory.

    Args:
        where: the file, for the error.
        what: of it would take memory.
        needed: bytes.
        most: bytes that it may take; by default the machine's memory.

    Raises:
        ValueError: it needs more.
    """
    most = machine_memory() if most is None else most
    if needed > most:
        raise ValueError(f"{where}: expected {what} of at most {most} bytes; got {needed}")


def read_text(path: Path, most: int = MOST_TEXT, encoding: str = "utf-8") -> str:
    """The text of a small file.

    Args:
        path: the file.
        most: bytes that it may have.
        encoding: of its characters.

    Raises:
        OSError: it cannot be read.
        ValueError: it is longer, or of another encoding.
    """
    # A file that is no plain one may have no end, and says nothing of its size.
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path}: expected a text of at most {most} bytes; got more")
    return content.decode(encoding)


def read_json(path: Path, what: str) -> Any:
    """The content of a small JSON file.

    Args:
        path: the file.
        what: it should be, for the error.

    Raises:
        ValueError: it cannot be read, is no JSON, or is too long or too deep.
    """
    try:
        return json.loads(read_text(path))
    except RecursionError as error:
        raise ValueError(f"{path}: expected {what}; got a deep nest") from error
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: expected {what}; got {one_line(error)}") from error


def inflates_within(content: bytes, most: int) -> bool:
    """Whether no more bytes than `most` and `UNPACKED_UNSEEN` come out of zlib's or gzip's packing.

    Damaged bytes are, since their reader says what is wrong with them.
    """
    most = max(most, UNPACKED_UNSEEN)
    # What cannot be more need not be unpacked twice.
    if len(content) * DEFLATE_RATIO <= most:
        return True
    total, stream, left = 0, zlib.decompressobj(_ZLIB_OR_GZIP), content
    while left and total <= most:
        try:
            total += len(stream.decompress(left, _STEP))
        except zlib.error:
            return True
        left = stream.unused_data if stream.eof else stream.unconsumed_tail
        stream = zlib.decompressobj(_ZLIB_OR_GZIP) if stream.eof else stream
    return total <= most
