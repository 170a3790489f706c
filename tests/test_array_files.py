"""Array files of one sample: what is read of them, and what is wrong with bad ones."""

import os
import pickle
import zipfile

import h5py
import numpy as np
import pytest

from experiments.meshes.arrays import ARRAY_ENDINGS, read_arrays


def assert_one_line(error, path, *parts):
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: expected ")
    assert "; got " in message or "; there is none" in message
    for part in parts:
        assert str(part) in message


def write(path, **arrays):
    """The arrays in the format that the ending says."""
    if path.suffix == ".npz":
        np.savez_compressed(path, **arrays)
    elif path.suffix == ".npy":
        (values,) = arrays.values()
        np.save(path, values)
    else:
        with h5py.File(path, "w") as file:
            for name, values in arrays.items():
                values = np.asarray(values)
                file[name] = values.astype("S") if values.dtype.kind == "U" else values
    return path


def sample():
    values = np.random.default_rng(0).normal(size=(7, 3))
    return {
        "volume_fields": values,
        "stl_faces": np.arange(6, dtype=np.int32),
        "surface_mesh_centers": values.astype(np.float32),
        "stream_velocity": np.array([38.9]),
        "air_density": np.float64(1.2051),
        "inside": np.array([True, False]),
    }


with_several_arrays = pytest.mark.parametrize("ending", [".npz", ".h5", ".hdf5"])
with_any_ending = pytest.mark.parametrize("ending", ARRAY_ENDINGS)


# What is read -------------------------------------------------------------------------------------


@with_several_arrays
def test_arrays_and_numbers_are_told_apart(tmp_path, ending):
    given = sample()
    arrays, numbers, field_names = read_arrays(write(tmp_path / f"7{ending}", **given))
    assert list(arrays) == ["inside", "stl_faces", "surface_mesh_centers", "volume_fields"]
    assert numbers == {"air_density": 1.2051, "stream_velocity": 38.9}
    assert list(numbers) == sorted(numbers)
    assert field_names == {}
    for name, values in arrays.items():
        expected = np.float32 if given[name].dtype.kind == "f" else np.int64
        assert values.dtype == expected
        np.testing.assert_array_equal(values, given[name].astype(expected))


@pytest.mark.parametrize(
    "values",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6, dtype=">f8").reshape(2, 3),
        np.arange(6, dtype=np.float16).reshape(2, 3),
    ],
    ids=["double", "column-major", "big-endian", "half"],
)
def test_array_alone_goes_by_the_name_of_its_file(tmp_path, values):
    path = write(tmp_path / "surface_fields.npy", values=values)
    arrays, numbers, _ = read_arrays(path)
    assert list(arrays) == ["surface_fields"]
    assert numbers == {}
    assert arrays["surface_fields"].dtype == np.float32
    assert arrays["surface_fields"].flags.c_contiguous
    np.testing.assert_array_equal(arrays["surface_fields"], values)


@with_any_ending
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_value_is_a_number_in_double_precision(tmp_path, ending, shape):
    path = write(tmp_path / f"speed{ending}", speed=np.full(shape, 0.1))
    assert read_arrays(path).numbers == {"speed": 0.1}


@with_any_ending
def test_array_without_values_keeps_its_shape(tmp_path, ending):
    path = write(tmp_path / f"points{ending}", points=np.zeros((0, 3)))
    assert read_arrays(path).arrays["points"].shape == (0, 3)


def test_groups_are_named_where_a_name_alone_is_not_enough(tmp_path):
    path = tmp_path / "groups.h5"
    with h5py.File(path, "w") as file:
        file["surface/areas"] = np.zeros(2)
        file["surface/fine/pressure"] = np.ones(2)
        file["volume/pressure"] = np.full(2, 2.0)
        file["pressure"] = np.full(2, 3.0)
    arrays = read_arrays(path).arrays
    assert list(arrays) == ["areas", "pressure", "surface.fine.pressure", "volume.pressure"]
    assert [values[0] for values in arrays.values()] == [0.0, 3.0, 1.0, 2.0]


def test_groups_whose_paths_become_one_name_are_refused(tmp_path):
    path = tmp_path / "groups.h5"
    with h5py.File(path, "w") as file:
        for name in ("a/p", "b/p", "a.p"):
            file[name] = np.zeros(2)
    with pytest.raises(ValueError, match="expected one array") as error:
        read_arrays(path)
    assert_one_line(error, path, "'a.p'", "got 2")


def test_numbers_among_the_attributes_are_read(tmp_path):
    path = write(tmp_path / "sample.h5", pressure=np.zeros(3))
    with h5py.File(path, "a") as file:
        file.attrs["air_density"] = 1.2051
        file.attrs["count"] = np.array([3])
        file.attrs["direction"] = np.array([1.0, 0.0])
        file.attrs["solver"] = "finite volumes"
        file.attrs["nothing"] = h5py.Empty("f")
        file["pressure"].attrs["scale"] = 2.0
    assert read_arrays(path).numbers == {"air_density": 1.2051, "count": 3.0}


def test_attribute_that_is_not_finite_is_named(tmp_path):
    path = write(tmp_path / "sample.h5", pressure=np.zeros(3))
    with h5py.File(path, "a") as file:
        file.attrs["air_density"] = np.nan
    with pytest.raises(ValueError, match="expected finite") as error:
        read_arrays(path)
    assert_one_line(error, path, "'air_density'")


@with_several_arrays
def test_names_of_fields_are_read(tmp_path, ending):
    path = write(
        tmp_path / f"7{ending}",
        surface_fields=np.zeros((4, 2)),
        surface_field_names=np.array(["pressure", "shear"]),
    )
    assert read_arrays(path).field_names == {"surface_field_names": ["pressure", "shear"]}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("pressure", ["pressure"]),
        (["pressure", "größe"], ["pressure", "größe"]),
        (np.array([b"pressure", b"shear"]), ["pressure", "shear"]),
    ],
)
@pytest.mark.parametrize("as_dataset", [False, True])
def test_names_of_fields_are_read_in_every_form_of_hdf5(tmp_path, value, expected, as_dataset):
    path = write(tmp_path / "sample.h5", surface_fields=np.zeros((4, 2)))
    with h5py.File(path, "a") as file:
        if as_dataset:
            file["surface_field_names"] = value
        else:
            file.attrs["surface_field_names"] = value
    assert read_arrays(path).field_names == {"surface_field_names": expected}


# What is refused ----------------------------------------------------------------------------------


@with_any_ending
def test_missing_file_is_named(tmp_path, ending):
    path = tmp_path / f"absent{ending}"
    with pytest.raises(FileNotFoundError) as error:
        read_arrays(path)
    assert_one_line(error, path)


def test_unknown_ending_is_named(tmp_path):
    with pytest.raises(ValueError, match="ending in one of") as error:
        read_arrays(tmp_path / "sample.csv")
    assert_one_line(error, tmp_path / "sample.csv", ".csv")


@with_any_ending
@pytest.mark.parametrize("kept_fraction", [0.0, 0.02, 0.3, 0.9])
def test_truncated_file_is_named(tmp_path, ending, kept_fraction):
    values = np.random.default_rng(0).normal(size=(50, 40))
    path = write(tmp_path / f"pressure{ending}", pressure=values)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept_fraction * len(content))])
    with pytest.raises(ValueError, match="expected a readable") as error:
        read_arrays(path)
    assert_one_line(error, path)


@with_any_ending
def test_damaged_or_foreign_file_is_named(tmp_path, ending):
    path = tmp_path / f"pressure{ending}"
    path.write_text("<html>\nnot found\n</html>" * 40)
    with pytest.raises(ValueError, match="expected a readable") as error:
        read_arrays(path)
    assert_one_line(error, path)


def test_flipped_bits_in_an_archive_are_found(tmp_path):
    path = tmp_path / "pressure.npz"
    np.savez(path, pressure=np.zeros(1000))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ValueError, match="expected a readable") as error:
        read_arrays(path)
    assert_one_line(error, path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
@with_any_ending
def test_file_without_permission_is_named(tmp_path, ending):
    path = write(tmp_path / f"pressure{ending}", pressure=np.zeros(3))
    path.chmod(0)
    with pytest.raises(ValueError, match="expected a readable") as error:
        read_arrays(path)
    assert_one_line(error, path, "Permission denied")


@with_any_ending
def test_refusal_of_the_system_is_named(tmp_path, ending, monkeypatch):
    """As above, also where tests run as root."""
    path = write(tmp_path / f"pressure{ending}", pressure=np.zeros(3))

    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(ValueError, match="expected a readable") as error:
        read_arrays(path)
    assert_one_line(error, path, "Permission denied")


@pytest.mark.parametrize("ending", [".npz", ".npy"])
def test_pickled_arrays_are_never_loaded(tmp_path, ending):
    path = write(tmp_path / f"pressure{ending}", pressure=np.array([{"a": 1}, None]))
    with pytest.raises(ValueError, match="expected real numbers") as error:
        read_arrays(path)
    assert_one_line(error, path, "'pressure'", "object")


def test_bare_pickle_is_never_loaded(tmp_path):
    path = tmp_path / "pressure.npy"
    path.write_bytes(pickle.dumps(np.zeros(3)))
    with pytest.raises(ValueError, match="expected a readable") as error:
        read_arrays(path)
    assert_one_line(error, path)


@with_several_arrays
@pytest.mark.parametrize("arrays", [{}, {"surface_field_names": np.array(["p"])}])
def test_file_without_arrays_is_named(tmp_path, ending, arrays):
    path = write(tmp_path / f"sample{ending}", **arrays)
    with pytest.raises(ValueError, match="expected arrays") as error:
        read_arrays(path)
    assert_one_line(error, path, "got none")


@with_any_ending
@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (np.zeros(3, np.complex64), "complex64"),
        (np.array(["steady", "state"]), "S"),
        (np.zeros(2, [("x", "f4"), ("y", "f4")]), "x"),
    ],
    ids=["complex", "strings", "records"],
)
def test_anything_but_real_numbers_is_named(tmp_path, ending, values, kind):
    path = write(tmp_path / f"state{ending}", state=values)
    with pytest.raises(ValueError, match="expected real numbers") as error:
        read_arrays(path)
    assert_one_line(error, path, "'state'", kind if ending in (".h5", ".hdf5") else values.dtype)


def test_empty_dataset_is_named(tmp_path):
    path = tmp_path / "sample.h5"
    with h5py.File(path, "w") as file:
        file["state"] = h5py.Empty("f")
    with pytest.raises(ValueError, match="expected real numbers") as error:
        read_arrays(path)
    assert_one_line(error, path, "'state'")


@with_any_ending
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_values_that_are_not_finite_are_counted(tmp_path, ending, bad):
    path = write(tmp_path / f"pressure{ending}", pressure=np.array([1.0, bad, 2.0, bad]))
    with pytest.raises(ValueError, match="expected finite") as error:
        read_arrays(path)
    assert_one_line(error, path, "'pressure'", "got 2 that are not")


@with_any_ending
def test_integers_never_wrap_around(tmp_path, ending):
    path = write(tmp_path / f"ids{ending}", ids=np.array([0, 2**63], np.uint64))
    with pytest.raises(ValueError, match="expected values up to") as error:
        read_arrays(path)
    assert_one_line(error, path, "'ids'", 2**63)


# Memory -------------------------------------------------------------------------------------------


@with_any_ending
def test_limit_counts_what_is_handed_out(tmp_path, ending):
    path = write(tmp_path / f"flags{ending}", flags=np.zeros(100, np.int8))
    assert len(read_arrays(path, max_bytes=800).arrays["flags"]) == 100
    with pytest.raises(ValueError, match="expected arrays of at most 799 bytes") as error:
        read_arrays(path, max_bytes=799)
    assert_one_line(error, path, "'flags'", "got 800")


def write_npy(file, shape, values):
    header = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    file.write(values)


@pytest.mark.parametrize("ending", [".npz", ".npy"])
@pytest.mark.parametrize(
    ("size", "message"),
    [(10**15, "expected arrays of at most"), (10**6, "expected a readable")],
    ids=["absurd", "more than there is"],
)
def test_declared_size_is_checked_before_memory_is_taken(tmp_path, ending, size, message):
    path = tmp_path / f"pressure{ending}"
    if ending == ".npz":
        with zipfile.ZipFile(path, "w") as archive, archive.open("pressure.npy", "w") as file:
            write_npy(file, (size,), bytes(80))
    else:
        with path.open("wb") as file:
            write_npy(file, (size,), bytes(80))
    with pytest.raises(ValueError, match=message) as error:
        read_arrays(path)
    assert_one_line(error, path, "'pressure'")


def test_absurd_dataset_is_refused_before_memory_is_taken(tmp_path):
    path = tmp_path / "sample.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("pressure", (10**14,), "f8", chunks=(1000,))  # takes no space
    with pytest.raises(ValueError, match="expected arrays of at most") as error:
        read_arrays(path)
    assert_one_line(error, path, "'pressure'")


@pytest.mark.parametrize("ending", [".npz", ".npy"])
def test_header_without_end_is_refused(tmp_path, ending):
    path = tmp_path / f"pressure{ending}"
    content = np.lib.format.magic(2, 0) + (2**31).to_bytes(4, "little") + bytes(2**18)
    if ending == ".npz":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("pressure.npy", content)
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="expected a readable") as error:
        read_arrays(path)
    assert_one_line(error, path)
