"""Tensors of a file that `torch.save` wrote, as NumPy arrays: without PyTorch, and calling nothing.

Such a file (since PyTorch 1.6) is a zip archive: a pickle that builds the object, and beside it the
storages of its tensors as raw bytes. A pickle is a program. It is not run here: its operations are
decoded one by one, and those that a state dict is made of are followed, on plain values. No name
in it is ever looked up, so that nothing that it asks for can be imported or called.
"""

import math
import pickletools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments.formats.archives import Archive, open_zip, shown
from experiments.formats.limits import MOST_TEXT
from experiments.messages import one_line

# Storage classes of PyTorch and what they hold.
_DTYPES = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": jnp.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}
_ORDERED_DICT = "collections OrderedDict"
_TENSOR = "torch._utils _rebuild_tensor_v2"
_PARAMETER = "torch._utils _rebuild_parameter"
_GLOBALS = {_ORDERED_DICT, _TENSOR, _PARAMETER, *(f"torch {name}" for name in _DTYPES)}
# Far more than a tensor has; NumPy has its own limit.
_MOST_AXES = 16
_MOST_PLACES = 2**48


class _Global(NamedTuple):
    """A name that the pickle refers to, and nothing behind it."""

    name: str


class _Mark:
    """Where a list of operands begins on the stack."""


def read_tensors(content: bytes, where: str) -> dict[str, np.ndarray]:
    """The tensors of a saved state dict by their names.

    Args:
        content: of the file.
        where: what an error names.

    Returns:
        Arrays that share the memory of their storages and cannot be written to.

    Raises:
        ValueError: the file is damaged, or holds anything but tensors by names.
    """
    archive = open_zip(content, where)
    pickles = [name for name in archive.sizes if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError(f"{where}: expected one data.pkl in a folder; got {len(pickles)}")
    storages = _Storages(archive, pickles[0].removesuffix("data.pkl"))
    size = archive.sizes[pickles[0]]
    if size > MOST_TEXT:
        # Each of its operations may make an object, far larger than the operation.
        raise ValueError(f"{where}: expected a data.pkl of at most {MOST_TEXT} bytes; got {size}")
    machine = _Machine(storages, where)
    return machine.run(archive.read(pickles[0]))


class _Storages:
    """The storages of an archive, each read once."""

    def __init__(self, archive: Archive, folder: str):
        self._archive, self._folder = archive, folder
        self._known: dict[str, np.ndarray] = {}
        order = f"{folder}byteorder"
        # Files from before PyTorch 2.1 do not say it; they are taken for little-endian there too.
        self._order = archive.read(order) if order in archive.sizes else b"little"
        if self._order not in (b"little", b"big"):
            raise ValueError(f"{archive.where}: byteorder: expected little or big")

    def read(self, identity: Any) -> np.ndarray:
        """The values that a persistent identity `("storage", class, key, device, size)` names."""
        where = self._archive.where
        match identity:
            # Kinds come before values: to compare an array is no yes or no.
            case (str(kind), _Global(name), str(key), str(), int(size)) if (
                kind == "storage" and size >= 0
            ):
                dtype = _DTYPES.get(name.removeprefix("torch "))
            case _:
                raise ValueError(f"{where}: expected the identity of a storage; got another")
        if dtype is None:
            raise ValueError(f"{where}: expected the class of a storage; got {shown(name)}")
        dtype = np.dtype(dtype)
        if key in self._known:
            if self._known[key].dtype != dtype:
                raise ValueError(f"{where}: storage {shown(key)} is of two types")
            return self._known[key]
        entry = f"{self._folder}data/{key}"
        given = self._archive.sizes.get(entry)
        if given != size * dtype.itemsize:
            raise ValueError(
                f"{where}: storage {shown(key)}: expected the bytes of "
                f"{shown(str(size))} x {dtype}; got {given}"
            )
        # NumPy swaps no bfloat16: bits are put in order before they are given their meaning.
        sign = "<" if self._order == b"little" else ">"
        bits = np.frombuffer(self._archive.read(entry), f"{sign}u{dtype.itemsize}")
        values = bits.astype(bits.dtype.newbyteorder("="), copy=False).view(dtype)
        values.flags.writeable = False
        self._known[key] = values
        return values


class _Machine:
    """Follows the operations of a pickle as far as a state dict needs them."""

    def __init__(self, storages: _Storages, where: str):
        self._storages, self._where = storages, where
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, program: bytes) -> dict[str, np.ndarray]:
        """What the program leaves behind: tensors by their names."""
        try:
            for name, argument in self._operations(program):
                self._follow(name, argument)
        except IndexError as error:
            raise self._refusal("the pickle is damaged: a value is missing") from error
        match self._stack:
            case [dict(tensors)]:
                pass
            case _:
                raise self._refusal("expected tensors by their names; got another object")
        for name, tensor in tensors.items():
            if not isinstance(tensor, np.ndarray):
                raise self._refusal(f"{shown(name)}: expected a tensor; got another object")
        return tensors

    def _operations(self, program: bytes) -> Iterator[tuple[str, Any]]:
        """Names and arguments of the operations, up to the one that ends the program."""
        try:
            for opcode, argument, _ in pickletools.genops(program):
                yield opcode.name, argument
        except ValueError as error:
            reason = shown(one_line(error))
            raise self._refusal(f"the pickle is damaged: {reason}") from error

    def _refusal(self, text: str) -> ValueError:
        return ValueError(f"{self._where}: {text}")

    def _follow(self, operation: str, argument: Any) -> None:
        stack = self._stack
        match operation:
            case "PROTO" | "STOP":
                pass
            case "GLOBAL":
                if argument not in _GLOBALS:
                    name = shown(argument.replace(" ", "."))
                    raise self._refusal(f"expected nothing but tensors; the pickle asks for {name}")
                stack.append(_Global(argument))
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[operation])
            case "MARK":
                stack.append(_Mark())
            case "EMPTY_TUPLE" | "EMPTY_DICT":
                stack.append(() if operation == "EMPTY_TUPLE" else {})
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._pop(int(operation[-1]))))
            case "TUPLE":
                stack.append(tuple(self._pop_to_mark()))
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                if argument not in self._memo:
                    raise IndexError
                stack.append(self._memo[argument])
            case "SETITEM":
                self._set_items(self._pop(2))
            case "SETITEMS":
                self._set_items(self._pop_to_mark())
            case "BINPERSID":
                stack.append(self._storages.read(stack.pop()))
            case "REDUCE":
                function, arguments = self._pop(2)
                stack.append(self._made(function, arguments))
            case "BUILD":
                # What a state dict carries besides its entries: versions of its modules.
                self._pop(1)
                if not isinstance(stack[-1], dict):
                    raise self._refusal("expected attributes of a dictionary alone; got others")
            case _:
                raise self._refusal(f"expected the operations of a state dict; got {operation}")

    def _pop(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise IndexError
        values = self._stack[-count:]
        del self._stack[-count:]
        return values

    def _pop_to_mark(self) -> list[Any]:
        values = []
        while not isinstance(value := self._stack.pop(), _Mark):
            values.append(value)
        return values[::-1]

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise self._refusal("expected entries of a dictionary; got others")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # To hash a nest of tuples may take forever.
            if not isinstance(key, str):
                raise self._refusal("expected names as keys; got others")
            target[key] = value

    def _made(self, function: Any, arguments: Any) -> Any:
        match function, arguments:
            case _Global(name), () if name == _ORDERED_DICT:
                return {}
            case _Global(name), (np.ndarray() as tensor, bool(), dict()) if name == _PARAMETER:
                return tensor
            case (
                _Global(name),
                (
                    np.ndarray() as storage,
                    offset,
                    tuple(size),
                    tuple(stride),
                    bool(),
                    dict(),
                    *rest,
                ),
            ) if name == _TENSOR and not any(map(_says_something, rest)):
                return self._tensor(storage, offset, size, stride)
        raise self._refusal("expected the parts of a tensor; got others")

    def _tensor(self, storage: np.ndarray, offset: Any, size: tuple, stride: tuple) -> np.ndarray:
        numbers = (offset, *size, *stride)
        if (
            storage.ndim != 1
            or len(size) != len(stride)
            or len(size) > _MOST_AXES
            or not all(type(number) is int and number >= 0 for number in numbers)
        ):
            raise self._refusal("expected offset, sizes and strides of a tensor; got others")
        count, last = 1, offset
        for length, step in zip(size, stride, strict=True):
            count, last = count * length, last + (length - 1) * step
        # NumPy has an error of its own for an array of no values that is longer.
        if count == 0 and math.prod(filter(None, size)) >= _MOST_PLACES:
            raise self._refusal("expected sizes of a tensor; got larger ones")
        if count == 0:
            return np.empty(size, storage.dtype)
        # Strides of zero would let few values stand for any number of them.
        if last >= len(storage) or count > len(storage):
            # Both may be longer than Python turns into digits.
            raise self._refusal(
                f"expected a tensor inside the {len(storage)} values of its storage; got sizes "
                f"{shown(', '.join(map(str, size)))}"
            )
        steps = [step * storage.itemsize for step in stride]
        return np.lib.stride_tricks.as_strided(storage[offset:], size, steps, writeable=False)


def _says_something(metadata: Any) -> bool:
    """Whether a tensor is more than its values: conjugated or negated, say."""
    return metadata is not None and not (isinstance(metadata, dict) and not metadata)
