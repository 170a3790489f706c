"""Arrays kept on disk: one archive that appears whole, says what it holds, and is checked."""

import hashlib
import os
import uuid
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from experiments.formats.npy_files import read_npz


def require_folder(cache_dir: Path) -> Path:
    """The folder of a cache, made if missing.

    Raises:
        NotADirectoryError: `cache_dir` is a file.
        ValueError: it can't be made.
    """
    cache_dir = Path(cache_dir)
    if cache_dir.exists() and not cache_dir.is_dir():
        raise NotADirectoryError(f"cache_dir: expected a folder, got the file {cache_dir}")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cache_dir: expected a folder that can be made; got {cache_dir} ({error.strerror})"
        ) from error
    return cache_dir


def write_arrays(path: Path, meta: str, arrays: Mapping[str, Shaped[np.ndarray, "..."]]) -> None:
    """Writes an archive that appears under its name only when complete.

    Args:
        path: the `.npz` file; its folder is made if missing.
        meta: all that the arrays depend on.
        arrays: by their names, none of them "meta" or "sha256".
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own for each writer, in the folder where a rename is atomic.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    named: dict[str, Any] = dict(arrays)
    try:
        with partial.open("xb") as file:
            np.savez(
                file,
                meta=np.array(meta),
                sha256=np.array(_checksum(meta, arrays.values())),
                **named,
            )
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_arrays(
    path: Path, expected_meta: str, names: Iterable[str], kind: str
) -> dict[str, Shaped[np.ndarray, "..."]]:
    """Reads an archive of `write_arrays` and checks every byte of its arrays.

    Args:
        path: the `.npz` file.
        expected_meta: all that the arrays should depend on.
        names: of the arrays, in the order in which they were written.
        kind: what the arrays are, for messages.

    Raises:
        ValueError: the file is truncated, altered, or holds something else; names the file.
    """

    def bad_cache(what: str) -> ValueError:
        return ValueError(f"{kind} cache {path}: {what}; delete it to make it again")

    if not zipfile.is_zipfile(path):
        raise bad_cache("expected a complete .npz archive, got a truncated or foreign file")
    try:
        archive = read_npz(path)
        meta, checksum = str(archive["meta"]), str(archive["sha256"])
        arrays = {name: archive[name] for name in names}
        altered = _checksum(meta, arrays.values()) != checksum
    except Exception as error:  # damaged bytes reach many decoders, each with errors of its own
        raise bad_cache(f"expected a readable {kind} archive, got {error!r}") from error
    if altered:
        raise bad_cache("expected arrays that match their SHA-256 checksum, got altered ones")
    if meta != expected_meta:
        raise bad_cache(f"expected samples of {expected_meta}, got {meta}")
    return arrays


def _checksum(meta: str, arrays: Iterable[Shaped[np.ndarray, "..."]]) -> str:
    digest = hashlib.sha256(meta.encode())
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
