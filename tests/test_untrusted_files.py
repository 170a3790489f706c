"""Files of unknown origin are data: none runs code, leads elsewhere, or takes memory by its word.

Each test makes a file that tries. What is damaged by accident is in the tests of its own reader.
"""

import ast
import contextlib
import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from functools import cache
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.io
from commands import ROOT, TINY, assert_one_line, call, compose
from test_torch_files import packed, read, state_dict, tensor

from experiments.configuration import configs
from experiments.configuration.hydra_arguments import require_values
from experiments.data.description import Description, StreamDescription
from experiments.formats import limits
from experiments.formats.matlab_files import read_variable
from experiments.formats.torch_reading import read_tensors
from experiments.physicsnemo.files import read_checkpoint
from experiments.problems import airfoil_files
from experiments.problems.array_cache import read_arrays as read_cache
from experiments.problems.benchmark_files import load_benchmark
from experiments.training import logs
from experiments.training.trained import restore

pyvista = pytest.importorskip("pyvista")
zarr = pytest.importorskip("zarr")

from experiments.meshes import files  # noqa: E402
from experiments.meshes.arrays import read_arrays  # noqa: E402
from experiments.meshes.sample_arrays import StoredSample  # noqa: E402
from experiments.meshes.samples import Source, read_sample  # noqa: E402
from experiments.meshes.store import create_store, write_sample  # noqa: E402

PACKAGES = ("benchmarks", "experiments", "flare_jax", "geotransolver_jax", "parallel")
BOMB = 2**29
# What a test may take beside: libraries that load, and the packed bytes.
LITTLE = 2**27


class Marked:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def attack(tmp_path):
    """A pickle whose code leaves a file; none may be there at the end."""
    marker = tmp_path / "marker"
    yield pickle.dumps(Marked(marker))
    assert not marker.exists()


def status(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{key}:")[2].split()[0]) * 2**10


@pytest.fixture
def little():
    """Little memory is taken within, at any time; of most bytes, if asked for."""

    @contextlib.contextmanager
    def watch(most: int = LITTLE):
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pytest.skip("this system does not tell the peak of memory anew")
        before = status("VmRSS")
        yield
        assert status("VmHWM") - before < most

    return watch


@cache
def bomb(wbits: int = zlib.MAX_WBITS) -> bytes:
    """Zeros packed to a thousandth, made without holding them."""
    stream, zeros = zlib.compressobj(9, zlib.DEFLATED, wbits), bytes(2**20)
    parts = [stream.compress(zeros) for _ in range(BOMB // len(zeros))]
    return b"".join([*parts, stream.flush()])


@cache
def zstd_bomb() -> bytes:
    """One frame without its size, of blocks that say one byte for each 128 KB."""
    blocks = [(2**17 << 3 | 1 << 1 | (i == BOMB // 2**17 - 1)) for i in range(BOMB // 2**17)]
    packed_blocks = b"".join(block.to_bytes(3, "little") + b"\0" for block in blocks)
    return b"\x28\xb5\x2f\xfd\x00\x58" + packed_blocks


def refusal(path: Path, action) -> str:
    """The one line by which a file is refused."""
    with pytest.raises(ValueError, match="expected") as error:
        action()
    assert_one_line(str(error.value), str(path))
    assert len(str(error.value).replace(str(path), "")) < 500
    return str(error.value)


# What no source does ------------------------------------------------------------------------------

UNPICKLERS = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "torch")
RUNNERS = ("eval", "exec", "__import__")


def calls(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {keyword.arg: keyword.value for keyword in node.keywords}


@pytest.mark.parametrize("package", PACKAGES)
def test_sources_call_nothing_that_runs_what_it_reads(package):
    sources = sorted((ROOT / package).rglob("*.py"))
    assert sources
    for path in sources:
        # A peer that trains the reference, which is PyTorch; it reads no file of tensors.
        allowed = {"torch"} if path.name.endswith("_peer.py") else set()
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                modules = [getattr(node, "module", None) or "", *names]
                imported = {module.partition(".")[0] for module in modules}
                assert not imported & set(UNPICKLERS) - allowed, f"{path}: {imported}"
        for name, options in calls(tree):
            assert name not in RUNNERS, f"{path}: {name}"
            assert not name.endswith(("hydra.utils.instantiate", "hydra.utils.call")), path
            assert not name.endswith(("yaml.load", "yaml.unsafe_load", "torch.load")), path
            assert not name.endswith("export.deserialize"), path
            if name in ("np.load", "numpy.load", "np.lib.format.read_array"):
                assert ast.unparse(options["allow_pickle"]) == "False", f"{path}: {name}"


# Arrays of NumPy ----------------------------------------------------------------------------------


def declaring(shape: tuple[int, ...], descr: str = "<f8") -> bytes:
    """An array whose header says more than follows it."""
    file = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + bytes(80)


def npz(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


@pytest.mark.parametrize("shape", [(10**15,), (2**31, 2**31)], ids=["long", "wide"])
def test_cache_that_declares_more_than_memory_is_refused(shape, tmp_path, little):
    path = npz(tmp_path / "cache.npz", {"meta": declaring(()), "a": declaring(shape)})
    with little():
        text = refusal(path, lambda: read_cache(path, "", ["a"], "Darcy"))
    assert "expected a readable Darcy archive" in text


def test_cache_of_objects_is_refused(tmp_path, attack):
    content = declaring((1,), "|O")[:-80] + attack
    path = npz(tmp_path / "cache.npz", {"meta": content, "sha256": content, "a": content})
    refusal(path, lambda: read_cache(path, "", ["a"], "Darcy"))


def test_name_in_an_archive_cannot_leave_a_store(tmp_path):
    content = io.BytesIO()
    np.save(content, np.zeros(3))
    path = npz(tmp_path / "7.npz", {"../../evil": content.getvalue()})
    text = refusal(path, lambda: read_sample(Source("7", arrays=(path,))))
    assert "expected names of arrays; got '......evil'" in text
    create_store(tmp_path / "deep" / "store")
    with pytest.raises(ValueError, match=r"\.\."):
        write_sample(tmp_path / "deep" / "store", "7", {"../../evil": np.zeros(3)}, {})
    assert not list(tmp_path.rglob("evil*"))


def test_published_file_that_declares_more_than_it_has_is_refused(tmp_path, little):
    np.save(tmp_path / "Random_UnitCell_sigma_10.npy", np.zeros((4, 8)))
    path = tmp_path / "Random_UnitCell_XY_10.npy"
    for content in (declaring((10**6, 2, 10**6)), declaring((1,), "|O")):
        path.write_bytes(content)
        with little():
            refusal(path, lambda: load_benchmark("elasticity", tmp_path, {"train": 1}))


# HDF5 ---------------------------------------------------------------------------------------------


def hdf5(path: Path, fill) -> Path:
    with h5py.File(path, "w") as file:
        fill(file)
    return path


def elsewhere(path: Path, kind: str):
    """Has a data set `coeff` read the file of another."""
    secret = hdf5(path.with_name("secret.h5"), lambda file: file.update({"s": np.arange(4.0)}))
    raw = path.with_name("secret.bin")
    raw.write_bytes(np.arange(4.0).tobytes())

    def fill(file):
        if kind == "raw":
            file.create_dataset("coeff", (4,), "f8", external=[(str(raw), 0, 32)])
        elif kind == "virtual":
            layout = h5py.VirtualLayout((4,), "f8")
            layout[:] = h5py.VirtualSource(secret, "s", (4,))
            file.create_virtual_dataset("coeff", layout)
        else:
            file["coeff"] = h5py.ExternalLink(secret, "/s")

    return hdf5(path, fill)


@pytest.mark.parametrize("kind", ["raw", "virtual", "link"])
@pytest.mark.parametrize("ending", [".h5", ".mat"])
def test_hdf5_reads_no_other_file(kind, ending, tmp_path):
    path = elsewhere(tmp_path / f"sample{ending}", kind)
    if ending == ".mat":
        text = refusal(path, lambda: read_variable(path, "coeff"))
        assert "another file" in text
    else:
        text = refusal(path, lambda: read_arrays(path))
        # A link is left out, as all are.
        assert ("another file" if kind != "link" else "got none") in text


def packed_dataset(file, content: bytes, **options):
    dataset = file.create_dataset(
        "coeff", (1000,), "f4", maxshape=(None,), compression="gzip", **options
    )
    dataset.id.write_direct_chunk((0,), content)


HDF5_BOMBS = {
    "short chunk": (lambda file: packed_dataset(file, bomb(), chunks=(1000,)), "a chunk of "),
    "long chunk": (
        lambda file: packed_dataset(file, bomb(), chunks=(2**18,)),
        "a chunk that unpacks to more than",
    ),
    "declared chunk": (
        lambda file: file.create_dataset("coeff", (9,), "f8", chunks=(10**8,), maxshape=(None,)),
        "chunks of 800000000 bytes",
    ),
    "declared shape": (
        lambda file: file.create_dataset("coeff", (10**14,), "f8", chunks=(1000,)),
        "800000000000000",
    ),
}


@pytest.mark.parametrize("ending", [".h5", ".mat"])
@pytest.mark.parametrize("kind", HDF5_BOMBS)
def test_hdf5_takes_the_memory_of_its_values(kind, ending, tmp_path, little, monkeypatch):
    fill, part = HDF5_BOMBS[kind]
    if kind == "declared chunk":
        monkeypatch.setattr("experiments.formats.hdf5_files.machine_memory", lambda: 2**29)
    path = hdf5(tmp_path / f"a{ending}", fill)
    with little():
        text = refusal(
            path,
            lambda: read_variable(path, "coeff") if ending == ".mat" else read_arrays(path),
        )
    assert part in text


def test_hdf5_packed_twice_is_refused(tmp_path):
    def fill(file):
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_chunk((4,))
        plan.set_deflate(9)
        plan.set_deflate(9)
        space = h5py.h5s.create_simple((4,))
        h5py.h5d.create(file.id, b"coeff", h5py.h5t.NATIVE_FLOAT, space, plan)

    path = hdf5(tmp_path / "a.h5", fill)
    assert "packed more than once" in refusal(path, lambda: read_arrays(path))


def test_hdf5_names_that_repeat_one_long_text_are_refused(tmp_path, little):
    def fill(file):
        file["p"] = np.zeros(3)
        # One after another, so that HDF5 holds one copy of each and reads all.
        names = file.create_dataset("p_field_names", (4000,), h5py.string_dtype())
        names[:] = ["x" * 2**13] * 4000

    path = hdf5(tmp_path / "a.h5", fill)
    with little():
        assert "names of more than" in refusal(path, lambda: read_arrays(path))


def test_hdf5_packed_as_usual_is_read(tmp_path):
    values = np.random.default_rng(0).random((400, 300))
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        options = dict(compression="gzip", shuffle=True, fletcher32=True)
        file.create_dataset("p", data=values, chunks=(400, 300), **options)
    np.testing.assert_array_equal(read_arrays(path).arrays["p"], values.astype(np.float32))


# MATLAB -------------------------------------------------------------------------------------------


def element(kind: int, content: bytes) -> bytes:
    return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)


def matlab(path: Path, content: bytes) -> Path:
    header = b"MATLAB 5.0 MAT-file".ljust(116) + bytes(8) + struct.pack("<H", 0x100) + b"IM"
    path.write_bytes(header + content)
    return path


def packed_variable(declared: int) -> bytes:
    """A variable `coeff` of 2 x 2 that says it has `declared` bytes, which are there, packed."""
    start = element(6, struct.pack("<II", 6, 0)) + element(5, struct.pack("<2i", 2, 2))
    start += element(1, b"coeff") + struct.pack("<II", 9, declared)
    stream, zeros = zlib.compressobj(9), bytes(2**20)
    parts = [stream.compress(struct.pack("<II", 14, len(start) + declared) + start)]
    parts += [stream.compress(zeros) for _ in range(declared // len(zeros))]
    content = b"".join([*parts, stream.flush()])
    return struct.pack("<II", 15, len(content)) + content


def test_matlab_variable_unpacks_to_its_values_alone(tmp_path, little):
    path = matlab(tmp_path / "a.mat", packed_variable(BOMB))
    # To look for names, SciPy unpacks 128 KB at a time, whatever comes out.
    with little(3 * LITTLE):
        text = refusal(path, lambda: read_variable(path, "coeff"))
    assert "that unpacks to more than its (2, 2) values" in text


@pytest.mark.parametrize(
    "value",
    [np.array([1, [2]], object), {"a": 1.0}, scipy.sparse.csc_array(np.eye(3))],
    ids=["cell", "struct", "sparse"],
)
def test_matlab_variable_is_an_array_of_numbers(value, tmp_path):
    path = tmp_path / "a.mat"
    scipy.io.savemat(path, {"coeff": value})
    assert "of kind" in refusal(path, lambda: read_variable(path, "coeff"))


@pytest.mark.parametrize("compressed", [False, True])
def test_matlab_variable_packed_as_usual_is_read(compressed, tmp_path):
    values = np.random.default_rng(0).random((300, 400))
    path = tmp_path / "a.mat"
    scipy.io.savemat(path, {"sol": values[:2], "coeff": values}, do_compression=compressed)
    np.testing.assert_array_equal(read_variable(path, "coeff"), values)


# Zarr ---------------------------------------------------------------------------------------------

ZLIB, LITTLE_ENDIAN = {"id": "zlib", "level": 1}, {"endian": "little"}
BYTES = {"name": "bytes", "configuration": LITTLE_ENDIAN}


def group_of_2(path: Path, chunk: bytes = bytes(16), **metadata) -> Path:
    """A sample of format 2 with one array."""
    (path / "a").mkdir(parents=True)
    (path / ".zgroup").write_text('{"zarr_format": 2}')
    usual = dict(zarr_format=2, shape=[4], chunks=[4], dtype="<f4", order="C")
    usual |= dict(compressor=None, filters=None, fill_value=0)
    (path / "a" / ".zarray").write_text(json.dumps(usual | metadata))
    (path / "a" / "0").write_bytes(chunk)
    return path


def group_of_3(path: Path, chunk: bytes = bytes(16), codecs=(BYTES,), **metadata) -> Path:
    """Likewise of format 3."""
    (path / "a" / "c").mkdir(parents=True)
    group = dict(zarr_format=3, node_type="group", attributes={})
    (path / "zarr.json").write_text(json.dumps(group))
    usual = dict(zarr_format=3, node_type="array", shape=[4], data_type="float32", fill_value=0)
    usual["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": [4]}}
    usual["chunk_key_encoding"] = {"name": "default", "configuration": {"separator": "/"}}
    usual |= dict(codecs=list(codecs), attributes={})
    (path / "a" / "zarr.json").write_text(json.dumps(usual | metadata))
    (path / "a" / "c" / "0").write_bytes(chunk)
    return path


def sharded(path: Path, chunk: bytes, codec: str) -> Path:
    """A shard of two chunks, of which the first is given."""
    inner = [BYTES, {"name": codec, "configuration": {"level": 1}}]
    if codec == "zstd":
        inner[1]["configuration"]["checksum"] = False
    configuration = dict(chunk_shape=[4], codecs=inner, index_codecs=[BYTES])
    codecs = [{"name": "sharding_indexed", "configuration": configuration}]
    grid = {"name": "regular", "configuration": {"chunk_shape": [8]}}
    index = struct.pack("<4Q", 0, len(chunk), 2**64 - 1, 2**64 - 1)
    return group_of_3(path, chunk + index, codecs, shape=[8], chunk_grid=grid)


PICKLES = {
    "filter": lambda path, code: group_of_2(path, code, filters=[{"id": "pickle"}]),
    "compressor": lambda path, code: group_of_2(path, code, compressor={"id": "pickle"}),
    "packed": lambda path, code: group_of_2(
        path, zlib.compress(code), filters=[{"id": "pickle"}], compressor=ZLIB
    ),
    "objects": lambda path, code: group_of_2(path, code, dtype="|O", filters=[{"id": "pickle"}]),
    "format 3": lambda path, code: group_of_3(path, code, [BYTES, {"name": "numcodecs.pickle"}]),
}


@pytest.mark.parametrize("kind", PICKLES)
def test_zarr_unpickles_nothing(kind, tmp_path, attack):
    path = PICKLES[kind](tmp_path / "run", attack)
    assert "expected a Zarr group" in refusal(path, lambda: StoredSample(path).read("a"))


@pytest.mark.parametrize("codec", ["json2", "msgpack2", "categorize", "base64"])
def test_zarr_takes_codecs_of_numbers_alone(codec, tmp_path):
    options = {"categorize": {"labels": ["a"], "dtype": "|U1", "astype": "|u1"}}.get(codec, {})
    path = group_of_2(tmp_path / "run", filters=[{"id": codec, **options}])
    assert "expected a Zarr group" in refusal(path, lambda: StoredSample(path))


def test_zarr_packed_twice_is_refused(tmp_path):
    path = group_of_2(tmp_path / "run", filters=[ZLIB], compressor=ZLIB)
    assert "packed more than once" in refusal(path, lambda: StoredSample(path))


ZARR_BOMBS = {
    "zlib": lambda path: group_of_2(path, bomb(), compressor=ZLIB),
    "gzip": lambda path: group_of_3(
        path, bomb(31), [BYTES, {"name": "gzip", "configuration": {"level": 1}}]
    ),
    "zstd": lambda path: group_of_2(path, zstd_bomb(), compressor={"id": "zstd", "level": 1}),
    "declared zstd": lambda path: group_of_2(
        path,
        b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**31) + b"\x01\0\0",
        compressor={"id": "zstd", "level": 1},
    ),
    "blosc": lambda path: group_of_2(
        path,
        struct.pack("<4B3I", 2, 1, 0, 1, 2**31 - 1, 2**18, 16),
        compressor={"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0},
    ),
    "lz4": lambda path: group_of_2(
        path, struct.pack("<I", 2**31 - 1) + bytes(9), compressor={"id": "lz4", "acceleration": 1}
    ),
    "sharded gzip": lambda path: sharded(path, bomb(31), "gzip"),
    "sharded zstd": lambda path: sharded(path, zstd_bomb(), "zstd"),
}


@pytest.mark.parametrize("rows", [slice(None), slice(0, 2)], ids=["all", "some"])
@pytest.mark.parametrize("kind", ZARR_BOMBS)
def test_zarr_chunk_unpacks_to_its_values_alone(kind, rows, tmp_path, little):
    path = ZARR_BOMBS[kind](tmp_path / "run")
    sample = StoredSample(path)
    bomb(), bomb(31), zstd_bomb()
    with little():
        text = refusal(path, lambda: sample.read("a", rows))
    assert "array 'a': expected readable values; got a chunk that unpacks to more than" in text


@pytest.mark.parametrize("codec", ["blosc", "bz2", "gzip", "lz4", "zlib", "zstd"])
@pytest.mark.parametrize("zeros", [False, True])
def test_zarr_packed_as_usual_is_read(codec, zeros, tmp_path):
    numcodecs = pytest.importorskip("numcodecs")
    values = np.random.default_rng(0).random((3000, 3)).astype(np.float32) * (not zeros)
    group = zarr.open_group(tmp_path / "run", mode="w", zarr_format=2)
    compressor = numcodecs.get_codec({"id": codec})
    group.create_array("a", data=values, chunks=(1000, 3), compressors=compressor)
    np.testing.assert_array_equal(StoredSample(tmp_path / "run").read("a"), values)


def test_zarr_array_larger_than_memory_is_read_in_windows(tmp_path, little):
    long = 4 * 10**15
    path = group_of_2(tmp_path / "run", np.arange(4, dtype="<f4").tobytes(), shape=[long])
    sample = StoredSample(path)
    with little():
        assert sample.read("a", slice(1, 3)).tolist() == [1, 2]
        scattered = refusal(path, lambda: sample.read_rows("a", np.array([3, long - 1])))
        text = refusal(path, lambda: sample.read("a"))
    assert "2 rows that take" in scattered
    assert f"{long} rows that take {4 * long} bytes" in text


def test_zarr_chunks_larger_than_memory_are_refused(tmp_path):
    path = group_of_2(tmp_path / "run", chunks=[10**15])
    assert "in chunks that take" in refusal(path, lambda: StoredSample(path))
    inner = dict(chunk_shape=[1], codecs=[BYTES], index_codecs=[BYTES])
    grid = {"name": "regular", "configuration": {"chunk_shape": [10**14]}}
    codecs = [{"name": "sharding_indexed", "configuration": inner}]
    path = group_of_3(tmp_path / "shards", bytes(16), codecs, shape=[10**14], chunk_grid=grid)
    assert "in chunks that take" in refusal(path, lambda: StoredSample(path))


def test_zarr_metadata_name_nothing_outside(tmp_path):
    group_of_3(tmp_path / "other", np.full(4, 7, "<f4").tobytes())
    path = group_of_3(tmp_path / "run")
    content = json.loads((path / "zarr.json").read_text())
    array = json.loads((path / "a" / "zarr.json").read_text())
    kept = {"kind": "inline", "must_understand": False, "metadata": {"../other/a": array}}
    (path / "zarr.json").write_text(json.dumps(content | {"consolidated_metadata": kept}))
    assert StoredSample(path).names == ("a",)
    (path / "zarr.json").write_text(json.dumps(content | {"attributes": {"x": "x" * 2**24}}))
    assert "zarr.json of " in refusal(path, lambda: StoredSample(path))


def test_zarr_reads_plain_files_alone(tmp_path):
    path = group_of_2(tmp_path / "run")
    (path / "a" / "0").unlink()
    (path / "a" / "0").symlink_to("/dev/zero")  # has no end
    assert "no plain file" in refusal(path, lambda: StoredSample(path).read("a"))


# Meshes -------------------------------------------------------------------------------------------

BLOCKS = (
    '<VTKFile type="vtkMultiBlockDataSet" version="1.0" byte_order="LittleEndian">'
    '<vtkMultiBlockDataSet><DataSet index="0" file="{}"/></vtkMultiBlockDataSet></VTKFile>'
)
SURFACE = (
    '<VTKFile type="PolyData" version="1.0" byte_order="LittleEndian"><PolyData>{field}'
    '<Piece NumberOfPoints="{points}" NumberOfPolys="{polys}"><Points>'
    '<DataArray type="Float32" Name="Points" NumberOfComponents="{parts}" format="ascii">'
    "0 0 0 1 0 0 0 1 0</DataArray></Points><Polys>"
    '<DataArray type="Int64" Name="connectivity" format="ascii">0 1 2</DataArray>'
    '<DataArray type="Int64" Name="offsets" format="ascii">3</DataArray>'
    "</Polys></Piece></PolyData></VTKFile>"
)
USUAL = dict(field="", points=3, polys=1, parts=3)
LONG_FIELD = (
    '<FieldData><DataArray type="Float64" Name="t" NumberOfTuples="900000000000" '
    'format="ascii">0</DataArray></FieldData>'
)
GRID = (
    '<VTKFile type="StructuredGrid" version="1.0" byte_order="LittleEndian">'
    '<StructuredGrid WholeExtent="{0}"><Piece Extent="{0}"><Points><DataArray type="Float32" '
    'NumberOfComponents="3" format="ascii">0 0 0</DataArray></Points></Piece></StructuredGrid>'
    "</VTKFile>"
)
ENTITIES = '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd"><!ENTITY b "&a;&a;">]>'
MESHES = {
    "points": ("a.vtp", SURFACE.format(**USUAL | dict(points=9 * 10**11)), "points and cells"),
    "polygons": ("a.vtp", SURFACE.format(**USUAL | dict(polys=9 * 10**11)), "points and cells"),
    "components": ("a.vtp", SURFACE.format(**USUAL | dict(parts=9 * 10**14)), "values that take"),
    "field": ("a.vtp", SURFACE.format(**USUAL | dict(field=LONG_FIELD)), "values that take"),
    "negative": ("a.vtp", SURFACE.format(**USUAL | dict(points=-5)), "NumberOfPoints '-5'"),
    "grid": ("a.vts", GRID.format("0 99999 0 99999 0 99999"), "points that take"),
    "no grid": ("a.vts", GRID.format("0 9 0 9 0 x"), "extent '0 9 0 9 0 x'"),
    "entities": ("a.vtp", ENTITIES + SURFACE.format(**USUAL), "DOCTYPE"),
}


@pytest.mark.parametrize("kind", MESHES)
def test_mesh_that_declares_what_there_is_not_is_refused(kind, tmp_path, little):
    name, text, part = MESHES[kind]
    path = tmp_path / name
    path.write_text(text)
    with little():
        assert part in refusal(path, lambda: files.read_mesh(path))


def test_the_mesh_of_these_tests_is_read_where_it_is_usual(tmp_path):
    path = tmp_path / "a.vtp"
    path.write_text(SURFACE.format(**USUAL))
    assert files.read_mesh(path).n_points == 3


@pytest.mark.parametrize("name", ["../secret.vtp", "{}/secret.vtp", "a/../../secret.vtp"])
def test_blocks_lie_in_the_folder_of_their_file(name, tmp_path):
    pyvista.Sphere().save(tmp_path / "secret.vtp")
    path = tmp_path / "inner" / "a.vtm"
    path.parent.mkdir()
    path.write_text(BLOCKS.format(name.format(tmp_path)))
    assert "a block outside of its folder" in refusal(path, lambda: files.read_mesh(path))


def test_blocks_declare_no_more_than_there_is(tmp_path):
    path = tmp_path / "a.vtm"
    path.write_text(BLOCKS.format("a.vtp"))
    (tmp_path / "a.vtp").write_text(SURFACE.format(**USUAL | dict(points=9 * 10**11)))
    assert "points and cells that take" in refusal(path, lambda: files.read_mesh(path))


def test_stl_has_the_triangles_that_it_declares(tmp_path):
    path = tmp_path / "a.stl"
    path.write_bytes(bytes(80) + struct.pack("<I", 4 * 10**9) + bytes(50))
    assert "1 of 4000000000 triangles" in refusal(path, lambda: files.read_mesh(path))


@pytest.mark.parametrize("start", ["POINTS 900000000000 float", "POINTS 4000000000 double"])
def test_legacy_mesh_that_declares_what_there_is_not_is_refused(start, tmp_path, little):
    path = tmp_path / "a.vtk"
    text = f"# vtk DataFile Version 3.0\nx\nBINARY\nDATASET POLYDATA\n{start}\n"
    path.write_bytes(text.encode() + bytes(100))
    with little():
        refusal(path, lambda: files.read_mesh(path))


# Configurations and descriptions ------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """The folder of a run, without a checkpoint."""
    configs.save(compose(*TINY), tmp_path)
    Description((StreamDescription("grid", 2, 1, ("p",)),)).save(tmp_path)
    return tmp_path


def spoil(run: Path, old: str, new: str) -> Path:
    path = run / configs.CONFIG_FILE
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return path


ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(60))
CONFIGS = {
    "environment": ("cache_dir: ", "cache_dir: ${oc.env:HOME} #", "interpolation '${oc.env:HOME}'"),
    "escaped": ("cache_dir: ", 'cache_dir: "\\x24{oc.env:HOME}" #', "interpolation '${oc.env"),
    "object": ("model:", "x: !!python/object/apply:os.system [touch marker]\nmodel:", "YAML; got"),
    "name": ("model:", "x: !!python/name:os.system\nmodel:", "expected YAML; got"),
    "target": (
        "model:\n",
        "model:\n  _target_: os.system\n",
        "key 'model._target_'",
    ),
    "aliases": ("model:", f"{ALIASES}model:", "alias 'a0'"),
    "deep": ("model:", "x: " + "[" * 9000 + "\nmodel:", "at most 32 levels"),
    "long": ("model:", "# " + "x" * 2**18 + "\nmodel:", "at most 262144 bytes"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_saved_config_is_values_alone(kind, run, little, monkeypatch):
    monkeypatch.chdir(run)
    old, new, part = CONFIGS[kind]
    path = spoil(run, old, new)
    with little(), pytest.raises(ValueError, match="config") as error:
        configs.load(run)
    assert_one_line(str(error.value), str(path), part)
    assert not (run / "marker").exists()


@pytest.mark.parametrize("key", ["model._target_", "data._target_", "_target_"])
def test_no_target_is_taken_from_the_command_line(key):
    with pytest.raises(ValueError, match="unknown config key") as error:
        compose(f"+{key}=os.system")
    assert_one_line(str(error.value), "_target_")


def test_model_larger_than_memory_is_refused_before_it_is_built(run, little):
    spoil(run, "n_hidden: 16", "n_hidden: 8000000")
    config, data = configs.load(run), Description.load(run)
    with little():
        text = refusal(run, lambda: restore(run, config, data, "last"))
    assert "expected a model with weights of at most" in text


DESCRIPTIONS = {
    "deep": ("{}", "[" * 10**5, "a deep nest"),
    "long": ("{}", '"' + "x" * 2**24 + '"', "at most 16777216 bytes"),
    "text": ('"embedding": 2', '"embedding": "2"', "'2' for a size"),
    "negative": ('"embedding": 2', '"embedding": -2', "-2 for a size"),
    "digits": ('"embedding": 2', '"embedding": ' + "9" * 10**4, "Exceeds the limit"),
    "path": ('"name": "grid"', '"name": "../../grid"', "the name '../../grid' of a stream"),
    "field": ('"p"', "3", "3 for a name"),
}


@pytest.mark.parametrize("kind", DESCRIPTIONS)
def test_description_is_names_and_sizes(kind, run):
    old, new, part = DESCRIPTIONS[kind]
    path = run / "dataset.json"
    text = path.read_text()
    assert old == "{}" or old in text
    path.write_text(new if old == "{}" else text.replace(old, new, 1))
    error = refusal(path, lambda: Description.load(run))
    assert "expected a description of data" in error
    assert part in error


def test_log_is_read_up_to_what_is_no_row(tmp_path):
    rows = ['{"step": 1, "loss": 2.0}', '{"step": [1]}', '{"step": 2}']
    for bad in ('{"step": [1]}', "[1]", "[" * 10**5, "9" * 10**4):
        rows[1] = bad
        (tmp_path / logs.LOG_FILE).write_text("\n".join(rows))
        assert logs.read_log(tmp_path) == [{"step": 1, "loss": 2.0}]


def test_parameters_of_a_sample_are_few(tmp_path):
    pyvista.Sphere().save(tmp_path / "7.vtp")
    path = tmp_path / "parameters.json"
    path.write_text('{"a": 1' + " " * 2**24 + "}")
    source = Source("7", meshes=(tmp_path / "7.vtp",), parameters=path)
    assert "at most 16777216 bytes" in refusal(path, lambda: read_sample(source))


def test_airfoil_file_is_short(tmp_path):
    path = tmp_path / "a.dat"
    path.write_text("a\n" + "1.0 0.0\n" * 2**22)
    assert "at most 16777216 bytes" in refusal(path, lambda: airfoil_files.read_nodes(path, 64))


def command(*arguments):
    """The error of a command that would have Hydra read something."""

    def main():
        pytest.fail("the command has begun")

    result = call(main, *arguments)
    assert result.code == 2
    assert_one_line(result.err, "error: ")
    return result.err


@pytest.mark.parametrize("option", ["--experimental-rerun", "--exp"])
def test_hydra_reruns_no_pickled_job(option, tmp_path, attack):
    path = tmp_path / "job.pickle"
    path.write_bytes(attack)
    assert "got a pickled job" in command(option, path)
    assert "got a pickled job" in command(f"{option}={path}")


@pytest.mark.parametrize("key", ["hydra.callbacks.x._target_", "+model._target_"])
def test_hydra_calls_nothing_that_the_command_line_names(key, tmp_path):
    assert "got a class to call" in command(f"{key}=os.system")


@pytest.mark.parametrize(
    "arguments",
    [["--config-dir", "{}"], ["--config-d={}"], ["-cp", "{}"], ["hydra.searchpath=[file://{}]"]],
    ids=lambda arguments: arguments[0][:8],
)
@pytest.mark.parametrize("name", ["_target_", '"\\x5ftarget_"', "()"])
def test_hydra_calls_nothing_that_a_folder_of_configs_names(name, arguments, tmp_path):
    (tmp_path / "model").mkdir()
    path = tmp_path / "model" / "mine.yaml"
    path.write_text(f"n_hidden: 16\nx:\n  {name}: os.system\n")
    arguments = [argument.format(tmp_path) for argument in arguments]
    assert f"{path}: expected values alone" in command(*arguments)
    path.write_text("n_hidden: 16\n")
    require_values(arguments)


def test_usual_arguments_are_taken():
    require_values(["model=flare", "-m", "data.train=1,2", "--config-name", "x", "--checkpoint"])


# Checkpoints of others ----------------------------------------------------------------------------


def test_pickle_of_a_state_dict_is_short():
    program = b"\x80\x02" + b"}" * 2**24 + b"."
    with pytest.raises(ValueError, match=r"expected a data\.pkl of at most 16777216") as error:
        read_tensors(packed(program), "model.pt")
    assert_one_line(str(error.value), "model.pt: ")


@pytest.mark.parametrize("size", [(0, 2**70), (0, 2**40, 2**40), (2**47, 0, 2**47)])
def test_tensor_of_no_values_has_sizes_of_tensors(size):
    with pytest.raises(ValueError, match=r"^model\.pt: expected") as error:
        read(state_dict(tensor(size, [1] * len(size))))
    assert_one_line(str(error.value))


def test_checkpoint_larger_than_memory_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "a.mdlus"
    path.write_bytes(bytes(1000))
    monkeypatch.setattr(limits, "machine_memory", lambda: 999)
    text = refusal(path, lambda: read_checkpoint(path))
    assert "expected a file of at most 999 bytes; got 1000" in text
