"""Checkpoints of PhysicsNeMo, `.mdlus` files: class, arguments and weights of a model."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.files import write_atomically
from experiments.formats.archives import Archive, open_tar, open_zip, shown
from experiments.formats.limits import require_room
from experiments.formats.torch_reading import read_tensors
from experiments.formats.torch_writing import write_tensors

SUFFIX = ".mdlus"
# What PhysicsNeMo 2.2.2 writes, and of the second the only one that it reads for these models.
_PHYSICSNEMO_VERSION = "2.2.2"
_FILE_VERSION = "0.1.0"
# Packages that have had the models; the class alone has never changed its name.
_PACKAGES = ("physicsnemo", "modulus")
_MODULES = {
    "FLARE": "physicsnemo.models.flare.flare",
    "Transolver": "physicsnemo.models.transolver.transolver",
    "GeoTransolver": "physicsnemo.models.geotransolver.geotransolver",
}
_MOST_JSON = 2**16
# Layers of perceptrons by the names that they had before.
_RENAMED = {"linear_pre": "layers.0", "linear_post": "layers.2"}
_KINDS = ("weight", "bias")


class Checkpoint(NamedTuple):
    """What a file holds.

    Attributes:
        model: name of the model's class.
        arguments: of its constructor, by their names.
        tensors: its state dict, by the names of PhysicsNeMo 2.2.2.
    """

    model: str
    arguments: dict[str, Any]
    tensors: dict[str, np.ndarray]


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint: a zip archive, or a tar archive as older versions wrote.

    Nothing of the file is run or written to disk.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is damaged, of another version, or of a model that is not known here.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a {SUFFIX} file; got none")
    require_room(path, "a file", path.stat().st_size)
    content = path.read_bytes()
    # A tar archive ends like the zip archive in it.
    archive = open_tar(content, str(path)) or open_zip(content, str(path))
    arguments, metadata = (_json(archive, name) for name in ("args.json", "metadata.json"))
    version = metadata.get("mdlus_file_version", _FILE_VERSION)
    if version != _FILE_VERSION:
        raise ValueError(
            f"{path}: metadata.json: expected mdlus_file_version {_FILE_VERSION!r}; got "
            f"{shown(str(version))}"
        )
    match arguments:
        case {"__name__": str(name), "__module__": str(module), "__args__": dict(given)}:
            pass
        case _:
            raise ValueError(
                f"{path}: args.json: expected __name__, __module__ and __args__; got others"
            )
    if name not in _MODULES or module.partition(".")[0] not in _PACKAGES:
        raise ValueError(
            f"{path}: args.json: expected one of {', '.join(_MODULES)} of PhysicsNeMo; got "
            f"{shown(f'{module}.{name}')}"
        )
    tensors = read_tensors(archive.read("model.pt"), f"{path}: model.pt")
    return Checkpoint(name, given, _present_names(tensors))


def _json(archive: Archive, name: str) -> dict[str, Any]:
    where = f"{archive.where}: {name}"
    size = archive.sizes.get(name, 0)
    if size > _MOST_JSON:
        raise ValueError(f"{where}: expected at most {_MOST_JSON} bytes; got {size}")
    try:
        content = json.loads(archive.read(name))
    except RecursionError as error:
        raise ValueError(f"{where}: expected JSON; got a deep nest") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: expected JSON; got {shown(str(error))}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{where}: expected a JSON object; got another value")
    return content


def _present_names(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors by the names of today, as PhysicsNeMo itself renames them."""
    renamed = {}
    for name, tensor in tensors.items():
        *parents, layer, kind = ("", *name.split("."))
        # A buffer of no values, by which its modules used to find their device.
        if kind == "device_buffer":
            continue
        present = ".".join([*parents, _RENAMED.get(layer, layer), kind]).removeprefix(".")
        takes = kind in _KINDS and layer in _RENAMED and present not in tensors
        renamed[present if takes else name] = tensor
    return renamed


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint that `physicsnemo.Module.from_checkpoint` reads, whole or not at all."""
    arguments = {
        "__name__": checkpoint.model,
        "__module__": _MODULES[checkpoint.model],
        "__args__": checkpoint.arguments,
    }
    metadata = {
        "physicsnemo_version": _PHYSICSNEMO_VERSION,
        "mdlus_file_version": _FILE_VERSION,
    }

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("model.pt", write_tensors(checkpoint.tensors))
            archive.writestr("args.json", json.dumps(arguments))
            archive.writestr("metadata.json", json.dumps(metadata))

    write_atomically(path, write)
