"""Tensors as a file that `torch.load` reads, also with `weights_only=True`: without PyTorch.

The counterpart of `experiments.formats.torch_reading`, which says what such a file is.
"""

import io
import struct
import sys
import zipfile
from collections.abc import Mapping

import numpy as np

_FOLDER = "archive"
# Version of the layout; PyTorch has written 3 since 1.6.
_VERSION = b"3\n"
_EMPTY_ORDERED_DICT = b"ccollections\nOrderedDict\n)R"


def write_tensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The content of a file that holds a state dict.

    Args:
        tensors: float32 arrays by their names.

    Raises:
        TypeError: an array is of another type.
    """
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    # NumPy makes a contiguous scalar an array of one axis.
    arrays = {name: array.reshape(np.shape(tensors[name])) for name, array in arrays.items()}
    for name, array in arrays.items():
        if array.dtype != np.float32:
            raise TypeError(f"{name}: expected float32; got {array.dtype}")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{_FOLDER}/data.pkl", _program(arrays))
        archive.writestr(f"{_FOLDER}/byteorder", sys.byteorder)
        for key, array in enumerate(arrays.values()):
            archive.writestr(f"{_FOLDER}/data/{key}", array.tobytes())
        archive.writestr(f"{_FOLDER}/version", _VERSION)
    return content.getvalue()


def _program(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The pickle, of protocol 2: an ordered dictionary of tensors, each on a storage of its own."""
    entries = b"".join(
        _text(name) + _tensor(str(key), array) for key, (name, array) in enumerate(arrays.items())
    )
    return b"\x80\x02" + _EMPTY_ORDERED_DICT + b"(" + entries + b"u."


def _tensor(key: str, array: np.ndarray) -> bytes:
    """A call of PyTorch's function that makes a tensor of a storage."""
    strides = [stride // array.itemsize for stride in array.strides]
    storage = _tuple(
        _text("storage"), b"ctorch\nFloatStorage\n", _text(key), _text("cpu"), _number(array.size)
    )
    requires_grad = b"\x89"
    arguments = _tuple(
        storage + b"Q",
        _number(0),
        _tuple(*map(_number, array.shape)),
        _tuple(*map(_number, strides)),
        requires_grad,
        _EMPTY_ORDERED_DICT,
    )
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R"


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _number(number: int) -> bytes:
    if number < 2**31:
        return b"J" + struct.pack("<i", number)
    return b"\x8a\x08" + struct.pack("<q", number)
