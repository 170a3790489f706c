"""Zip and tar archives of unknown origin, read entry by entry in memory.

Nothing is written to disk, and no more memory is taken than the archive is long.
"""

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import PurePosixPath, PureWindowsPath

from experiments.messages import one_line

_SHOWN = 80
# What the standard library raises for bytes that are no archive, beside its own errors.
_DAMAGED = (
    zipfile.BadZipFile,
    tarfile.TarError,
    ValueError,
    OSError,
    EOFError,
    RuntimeError,
    OverflowError,
    MemoryError,
)


def shown(text: str) -> str:
    """Text of a file as an error shows it: short, and in one line whatever it holds."""
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


class Archive:
    """Entries of an archive by their names, sizes known before anything is read.

    Attributes:
        where: what an error names.
        sizes: bytes of each entry.
    """

    def __init__(self, where: str, entries: list[tuple[str, int]], length: int, read: Callable):
        """Checks what the archive says of itself.

        Args:
            where: what an error names.
            entries: names and sizes, in order.
            length: bytes of the archive.
            read: reads the entry of a name.

        Raises:
            ValueError: a name leaves the archive's folder or is there twice; or entries are larger
                than the archive.
        """
        self.where, self.sizes, self._read = where, dict(entries), read
        for name, _ in entries:
            if not stays_inside(name):
                raise ValueError(
                    f"{where}: expected names inside the archive's folder; got {shown(name)}"
                )
        if len(self.sizes) < len(entries):
            raise ValueError(f"{where}: expected each name once; got one twice")
        declared = sum(self.sizes.values())
        if declared > length:
            raise ValueError(
                f"{where}: expected entries of at most the {length} bytes of the archive; got "
                f"{declared}"
            )

    def read(self, name: str) -> bytes:
        """The content of an entry.

        Raises:
            ValueError: it is not there, or damaged.
        """
        if name not in self.sizes:
            raise ValueError(f"{self.where}: expected an entry {shown(name)}; got none")
        try:
            content = self._read(name)
        except _DAMAGED as error:
            raise ValueError(f"{self.where}: {shown(name)} is damaged: {_reason(error)}") from error
        if len(content) != self.sizes[name]:
            raise ValueError(
                f"{self.where}: {shown(name)} is damaged: expected {self.sizes[name]} bytes; got "
                f"{len(content)}"
            )
        return content


def open_zip(content: bytes, where: str) -> Archive:
    """A zip archive whose entries are stored as they are, as PyTorch and PhysicsNeMo write it.

    Raises:
        ValueError: it is none; or entries are compressed or encrypted, so that their size says
            little of the memory that they take.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
    except _DAMAGED as error:
        raise ValueError(f"{where}: expected a zip archive; got {_reason(error)}") from error
    entries = archive.infolist()
    for entry in entries:
        stored = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1
        if not stored or entry.file_size != entry.compress_size:
            raise ValueError(
                f"{where}: expected entries that are stored as they are; got "
                f"{shown(entry.filename)} compressed or encrypted"
            )
    sizes = [(entry.filename, entry.file_size) for entry in entries if not entry.is_dir()]
    return Archive(where, sizes, len(content), archive.read)


def open_tar(content: bytes, where: str) -> Archive | None:
    """A tar archive without compression, or `None` where the bytes are none.

    Raises:
        ValueError: entries are links, devices or have holes; or the archive is damaged.
    """
    try:
        archive = tarfile.open(fileobj=io.BytesIO(content), mode="r:")  # noqa: SIM115
    except tarfile.TarError:
        return None
    try:
        members = archive.getmembers()
    except _DAMAGED as error:
        raise ValueError(f"{where}: the tar archive is damaged: {_reason(error)}") from error
    for member in members:
        if not (member.isdir() or member.isreg()) or member.issparse():
            raise ValueError(f"{where}: expected plain files; got {shown(member.name)}")
    files = {member.name: member for member in members if member.isreg()}
    sizes = [(member.name, member.size) for member in members if member.isreg()]

    def read(name: str) -> bytes:
        file = archive.extractfile(files[name])
        assert file is not None, "these are regular files"
        return file.read()

    return Archive(where, sizes, len(content), read)


def stays_inside(name: str) -> bool:
    """Whether a relative path leads to nothing outside of its folder."""
    paths = PurePosixPath(name), PureWindowsPath(name)
    return not any(path.is_absolute() or path.drive or ".." in path.parts for path in paths)


def _reason(error: Exception) -> str:
    return one_line(error)[:_SHOWN]
