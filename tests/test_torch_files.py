"""Files of PyTorch are read without running anything of them, and written as PyTorch reads them."""

import io
import os
import pickle
import pickletools
import struct
import sys
import zipfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from commands import assert_one_line

from experiments.formats.torch_reading import read_tensors
from experiments.formats.torch_writing import write_tensors

EMPTY = b"ccollections\nOrderedDict\n)R"
FLOATS = np.arange(12, dtype=np.float32)


def op(value) -> bytes:
    """Operations that leave a plain value on the stack."""
    return pickle.dumps(value, 2)[2:-1]


def tensor(size, stride, *, offset=0, storage="FloatStorage", key="0", count=12) -> bytes:
    """Operations that leave a tensor on the stack, as `torch.save` writes them."""
    identity = op("storage") + f"ctorch\n{storage}\n".encode() + op(key) + op("cpu") + op(count)
    rest = op(offset) + op(tuple(size)) + op(tuple(stride)) + op(False) + EMPTY
    return b"ctorch._utils\n_rebuild_tensor_v2\n((" + identity + b"tQ" + rest + b"tR"


def state_dict(*entries: bytes) -> bytes:
    """A pickle of tensors named `w0`, `w1`, ..."""
    items = b"".join(op(f"w{i}") + entry for i, entry in enumerate(entries))
    return b"\x80\x02" + EMPTY + b"(" + items + b"u."


def packed(program: bytes, storages=None, **others: bytes) -> bytes:
    """The zip archive of a pickle and storages."""
    storages = {"0": FLOATS.tobytes()} if storages is None else storages
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        for name, value in others.items():
            archive.writestr(f"archive/{name}", value)
        for key, values in storages.items():
            archive.writestr(f"archive/data/{key}", values)
    return content.getvalue()


def read(program: bytes, storages=None, **others: bytes) -> dict[str, np.ndarray]:
    return read_tensors(packed(program, storages, **others), "model.pt")


def assert_refused(content: bytes, *parts: str) -> None:
    with pytest.raises(ValueError, match=r"^model\.pt: ") as error:
        read_tensors(content, "model.pt")
    assert_one_line(str(error.value), *parts)
    assert len(str(error.value)) < 300


def test_tensors_lie_where_offset_and_strides_say():
    program = state_dict(
        tensor((3, 4), (4, 1)),
        tensor((4, 3), (1, 4)),
        tensor((2, 2), (6, 2), offset=1),
        tensor((), (), offset=7),
        tensor((0, 5), (5, 1)),
    )
    tensors = read(program)
    grid = FLOATS.reshape(3, 4)
    expected = [grid, grid.T, [[1, 3], [7, 9]], 7, np.empty((0, 5))]
    for i, values in enumerate(expected):
        np.testing.assert_array_equal(tensors[f"w{i}"], values)
        assert tensors[f"w{i}"].dtype == np.float32
    assert not tensors["w0"].flags.writeable


@pytest.mark.parametrize(
    ("storage", "dtype"),
    [
        ("DoubleStorage", np.float64),
        ("HalfStorage", np.float16),
        ("BFloat16Storage", jnp.bfloat16),
        ("LongStorage", np.int64),
        ("BoolStorage", np.bool_),
    ],
)
@pytest.mark.parametrize("order", ["little", "big", None])
def test_storages_of_every_type_and_byte_order(storage, dtype, order):
    values = np.array([0, 1, 1.5, 3], np.float32).astype(dtype)
    swapped = order == ("big" if sys.byteorder == "little" else "little")
    bits = values.view(f"u{values.itemsize}")
    content = (bits.byteswap() if swapped else bits).tobytes()
    others = {} if order is None else {"byteorder": order.encode()}
    program = state_dict(tensor((4,), (1,), storage=storage, count=4))
    given = read(program, {"0": content}, **others)["w0"]
    assert given.dtype == dtype
    np.testing.assert_array_equal(given, values)


def test_parameters_and_what_a_state_dict_carries_besides():
    parameter = b"ctorch._utils\n_rebuild_parameter\n(" + tensor((12,), (1,)) + op(True) + EMPTY
    versions = op({"_metadata": {"": {"version": 1}, "ln": {"version": 1}}})
    program = state_dict(parameter + b"tR").removesuffix(b".") + versions + b"b."
    np.testing.assert_array_equal(read(program)["w0"], FLOATS)


class Call:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda marker: Call(os.system, f"touch {marker}"), "system"),
        (lambda marker: Call(eval, f"open({str(marker)!r}, 'w')"), "eval"),
        (lambda marker: Call(open, str(marker), "w"), "open"),
        (lambda marker: {"w": np.ones(3)}, "_reconstruct"),
        (lambda marker: {"w": Path("x")}, "Path"),
        (lambda marker: {"w": slice(3)}, "slice"),
    ],
    ids=["system", "eval", "open", "numpy", "path", "slice"],
)
def test_nothing_that_a_pickle_asks_for_is_called(make, name, protocol, tmp_path):
    marker = tmp_path / "marker"
    content = packed(pickle.dumps(make(marker), protocol))
    # Newer protocols have operations that a state dict has not.
    assert_refused(content, "expected")
    if protocol == 2:
        assert_refused(content, "expected nothing but tensors", name)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("program", "parts"),
    [
        (b"\x80\x02ctorch\nFloatStorage.__init__\n)R.", ["torch.FloatStorage.__init__"]),
        (b"\x80\x02ctorch\nload\n)R.", ["torch.load"]),
        (b"\x80\x02(S'id'\nios\nsystem\n.", ["operations of a state dict", "STRING"]),
        (b"\x80\x02(ios\nsystem\n.", ["INST"]),
        (b"\x80\x02ccollections\nOrderedDict\n)\x81.", ["NEWOBJ"]),
        (b"\x80\x02ccollections\nOrderedDict\n(K\x01tR.", ["parts of a tensor"]),
        (b"\x80\x02ccollections\nOrderedDict\n}b.", ["attributes of a dictionary alone"]),
        (b"\x80\x02}(K\x01K\x02tK\x03s.", ["names as keys"]),
        (b"\x80\x02K\x01K\x02K\x03s.", ["entries of a dictionary"]),
        (b"\x80\x02}" + op("w") + op(1) + b"s.", ["'w': expected a tensor"]),
        (b"\x80\x02(K\x01K\x02t.", ["tensors by their names"]),
        (b"\x80\x02K\x01Q.", ["identity of a storage"]),
        (b"\x80\x02" + op(("storage", "x", "0", "cpu", 1)) + b"Q.", ["identity of a storage"]),
        (
            b"\x80\x02(" + tensor((12,), (1,)) + b"K\x01K\x02K\x03K\x04tQ.",
            ["identity of a storage"],
        ),
        (state_dict(tensor((12,), (1,))[:-2] + op(True) + b"tR"), ["parts of a tensor"]),
        (state_dict(tensor((12,), (1,))[:-2] + tensor((12,), (1,)) + b"tR"), ["parts of a tensor"]),
        (b"\x80\x02h\x05.", ["a value is missing"]),
        (b"\x80\x02R.", ["a value is missing"]),
        (b"\x80\x02t.", ["a value is missing"]),
        (b"\x80\x02b.", ["a value is missing"]),
        (b"\x80\x02K", ["the pickle is damaged"]),
        (b"\x80\x02X\xff\xff\xff\x7fx", ["the pickle is damaged"]),
        (b"\x80\x02}", ["the pickle is damaged"]),
        (b"", ["the pickle is damaged"]),
        (b"\xff\xfe\n\n", ["the pickle is damaged"]),
    ],
)
def test_pickle_of_another_kind_is_refused(program, parts):
    assert_refused(packed(program), *parts)


def test_nest_that_would_take_forever_to_hash_is_refused_at_once():
    nest = b")" + b"q\x00h\x00\x86" * 60
    assert_refused(packed(b"\x80\x02}" + nest + b"K\x01s."), "names as keys")


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        (tensor((12,), (1,), count=2**60), ["storage '0'", str(2**60), "got 48"]),
        (tensor((12,), (1,), count=-1), ["identity of a storage"]),
        (tensor((12,), (1,), key="1"), ["storage '1'", "got None"]),
        (tensor((12,), (1,), key="../../etc/passwd"), ["got None"]),
        (tensor((12,), (1,), storage="UntypedStorage"), ["torch.UntypedStorage"]),
        (tensor((13,), (1,)), ["inside the 12 values", "sizes '13'"]),
        (tensor((3, 4), (4, 2)), ["inside the 12 values"]),
        (tensor((12,), (1,), offset=1), ["inside the 12 values"]),
        (tensor((2**40,), (0,)), ["inside the 12 values", str(2**40)]),
        (tensor((2**2000,) * 16, (0,) * 16), ["inside the 12 values"]),
        (tensor((12,), (-1,), offset=11), ["offset, sizes and strides"]),
        (tensor((12,), (1,), offset=-1), ["offset, sizes and strides"]),
        (tensor((12,), (1, 1)), ["offset, sizes and strides"]),
        (tensor((1,) * 100, (1,) * 100), ["offset, sizes and strides"]),
        (tensor((True,), (1,)), ["offset, sizes and strides"]),
    ],
)
def test_tensor_outside_its_storage_is_refused(entry, parts):
    assert_refused(packed(state_dict(entry)), *parts)


def test_storage_has_one_type():
    entries = tensor((12,), (1,)), tensor((12,), (1,), storage="IntStorage")
    assert_refused(packed(state_dict(*entries)), "storage '0' is of two types")


def test_archive_of_another_kind_is_refused():
    good = packed(state_dict(tensor((12,), (1,))))
    assert_refused(b"", "expected a zip archive")
    assert_refused(pickle.dumps({"w": 1}), "expected a zip archive")
    assert_refused(good[: len(good) // 2], "expected a zip archive")
    assert_refused(packed(b"", byteorder=b"middle"), "byteorder")
    empty = io.BytesIO()
    zipfile.ZipFile(empty, "w").close()
    assert_refused(empty.getvalue(), "expected one data.pkl in a folder; got 0")


def test_damaged_values_are_noticed():
    good = packed(state_dict(tensor((12,), (1,))))
    place = good.index(FLOATS.tobytes())
    assert_refused(good[:place] + b"\x01" + good[place + 1 :], "'archive/data/0' is damaged")


def test_sizes_are_believed_only_as_far_as_the_archive_is_long():
    good = packed(state_dict(tensor((12,), (1,))))
    place = good.rindex(b"PK\x01\x02")
    wrong = good[: place + 20] + struct.pack("<II", 2**31, 2**31) + good[place + 28 :]
    assert_refused(wrong, "of the archive; got 2147")
    compressed = io.BytesIO()
    with zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**6))
    assert_refused(compressed.getvalue(), "stored as they are", "'archive/data.pkl'")


@pytest.mark.parametrize(
    "name", ["../data.pkl", "/tmp/data.pkl", "C:\\x\\data.pkl", "a\\..\\..\\b"]
)
def test_names_stay_in_the_archive(name):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", state_dict())
        archive.writestr(name, b"")
    assert_refused(content.getvalue(), "names inside the archive's folder")


def test_no_two_entries_have_one_name():
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", state_dict())
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("archive/data.pkl", state_dict())
    assert_refused(content.getvalue(), "each name once")


def test_what_is_written_comes_back_bitwise():
    generator = np.random.default_rng(0)
    tensors = {
        "a.weight": generator.standard_normal((3, 4, 5)).astype(np.float32),
        "a.transposed": generator.standard_normal((3, 4)).astype(np.float32).T,
        "scalar": np.float32(-0.0),
        "empty": np.empty((4, 0), np.float32),
        "ünïcode": np.array([np.nan, np.inf, 1e-45], np.float32),
    }
    given = read_tensors(write_tensors(tensors), "model.pt")
    assert list(given) == list(tensors)
    for name, values in tensors.items():
        assert given[name].shape == np.shape(values)
        assert given[name].tobytes() == np.asarray(values).tobytes()


def test_only_float32_is_written():
    with pytest.raises(TypeError, match="w: expected float32; got float64"):
        write_tensors({"w": np.ones(3)})


def test_written_pickle_has_only_what_pytorch_reads_as_weights():
    with zipfile.ZipFile(io.BytesIO(write_tensors({"w": FLOATS}))) as archive:
        program = archive.read("archive/data.pkl")
        assert archive.namelist()[0] == "archive/data.pkl"
        assert archive.read("archive/version") == b"3\n"
    names = {argument for opcode, argument, _ in pickletools.genops(program) if opcode.code == "c"}
    assert names == {
        "collections OrderedDict",
        "torch._utils _rebuild_tensor_v2",
        "torch FloatStorage",
    }
    # It checks what the operations take from the stack and leave there.
    pickletools.dis(program, io.StringIO())
