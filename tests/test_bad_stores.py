"""What is wrong with a store or its wiring is named in one line, if possible when it is loaded."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from commands import assert_one_line

zarr = pytest.importorskip("zarr")

from stores import (  # noqa: E402
    SURFACE,
    VOLUME,
    config_of,
    contents,
    make_store,
    name_of,
    numbers,
)

from experiments.building import build_model  # noqa: E402
from experiments.configuration.schema import (  # noqa: E402
    FlareConfig,
    ForcesConfig,
    FrameConfig,
    FreeStreamConfig,
    GeoTransolverConfig,
)
from experiments.data.batches import Loader  # noqa: E402
from experiments.datasets import load_dataset  # noqa: E402
from experiments.meshes import store as stores  # noqa: E402
from experiments.meshes.store import create_store, write_sample  # noqa: E402

BOTH = {"surface": SURFACE, "volume": VOLUME}
TINY = dict(n_layers=1, n_hidden=16, n_head=2, slice_num=4)


@pytest.fixture
def path(tmp_path):
    return make_store(tmp_path / "store", samples=4)


def load_error(config) -> str:
    with pytest.raises((ValueError, OSError)) as error:
        load_dataset(config)
    return str(error.value)


def rewrite(path: Path, arrays=None, attributes=None, drop=()) -> None:
    """Writes one of the samples with other arrays or attributes than the others."""
    given = contents(1) | (arrays or {})
    named = numbers(1) | (attributes or {})
    kept, known = ({k: v for k, v in each.items() if k not in drop} for each in (given, named))
    write_sample(path, name_of(1), kept, known)


# The store itself --------------------------------------------------------------------------------


def test_no_store(tmp_path):
    text = load_error(config_of(tmp_path / "none"))
    where = f"data.path={tmp_path / 'none'}"
    assert_one_line(text, f"{where}: expected a store, as experiments.convert makes one; there is ")


def test_empty_store(tmp_path):
    create_store(tmp_path / "store")
    text = load_error(config_of(tmp_path / "store"))
    assert_one_line(text, str(tmp_path / "store"), "one group a sample; got none")


def test_a_sample_is_no_store(path):
    text = load_error(config_of(path / name_of(0)))
    assert_one_line(text, str(path / name_of(0)), "expected a Zarr group; got")


def test_empty_group(path):
    zarr.open_group(path / "run_09", mode="w")
    assert_one_line(load_error(config_of(path)), str(path / "run_09"), "got an empty one")


def test_group_that_is_still_being_written(path):
    zarr.open_group(path / name_of(2)).attrs["complete"] = False
    text = load_error(config_of(path))
    assert_one_line(text, str(path / name_of(2)), "got one still being written")


@pytest.mark.parametrize("of", [".", "surface_fields"], ids=["group", "array"])
@pytest.mark.parametrize("content", ["", "{", "[]", '{"zarr_format": 3, "node_type": "tree"}'])
def test_damaged_metadata(of, content, path):
    (path / name_of(2) / of / "zarr.json").write_text(content)
    assert_one_line(load_error(config_of(path)), str(path / name_of(2)), "expected a", "got")


@pytest.mark.parametrize("what", ["store", "metadata"])
def test_store_that_must_not_be_read(what, path, monkeypatch):
    # Permissions do not stop the superuser, as whom tests may run.
    def refused(*arguments, **options):
        raise PermissionError(13, "Permission denied", str(path))

    if what == "store":
        monkeypatch.setattr(Path, "iterdir", refused)
    else:
        monkeypatch.setattr(stores.zarr, "open_group", refused)
    assert_one_line(load_error(config_of(path)), str(path), "Permission denied")


# What a sample lacks -----------------------------------------------------------------------------

FLOW = FreeStreamConfig("air_density", "stream_velocity", "0.0")
PRESSURE = {"p": "pressure"}
TWICE = {"surface_field_names": ["p", "p", "a", "b"]}
SAMPLES = {
    "array": (dict(drop=["surface_normals"]), {}, ["expected an array 'surface_normals'; has"]),
    "column": (
        dict(attributes={"surface_field_names": ["q", "tau_x", "tau_y", "tau_z"]}),
        dict(targets=["surface_fields.p"]),
        ["'surface_fields'", "expected a column 'p'; has q, tau_x, tau_y, tau_z"],
    ),
    "number of a column": (
        {},
        dict(targets=["surface_fields.4"]),
        ["expected a column '4'; has p, tau_x, tau_y, tau_z"],
    ),
    "components": (
        dict(arrays={"surface_fields": np.ones((30, 3), np.float32)}),
        {},
        ["'surface_fields'", "expected 4 columns, p, tau_x, tau_y, tau_z; got 3"],
    ),
    "other fields": (
        dict(attributes={"surface_field_names": ["p", "a", "b", "c"]}),
        {},
        ["expected what run_", "surface.fields", "a, b, c"],
    ),
    "names that repeat": (dict(attributes=TWICE), {}, ["'surface_field_names'", "differ; got"]),
    "names that are no list": (
        dict(attributes={"surface_field_names": "pxyz"}),
        {},
        ["'surface_field_names'", "got pxyz"],
    ),
    "length": (
        dict(arrays={"surface_normals": np.ones((29, 3), np.float32)}),
        {},
        ["'surface_normals'", "expected 30 rows, as in 'surface_mesh_centers'; got 29"],
    ),
    "rows": (
        dict(arrays={"surface_mesh_centers": np.ones((0, 3), np.float32)}),
        {},
        ["'surface_mesh_centers'", "expected rows; got none"],
    ),
    "rows of a number": (
        dict(arrays={"surface_mesh_centers": np.float32(1)}),
        {},
        ["'surface_mesh_centers'", "expected rows; got none"],
    ),
    "two dimensions": (
        dict(arrays={"surface_mesh_centers": np.ones((30, 2), np.float32)}),
        {},
        ["'surface_mesh_centers'", "expected 3 coordinates; got 2"],
    ),
    "complex": (
        dict(arrays={"surface_normals": np.ones((30, 3), np.complex64)}),
        {},
        ["'surface_normals'", "expected numbers; got type complex64"],
    ),
    "token": (
        dict(drop=["chord"]),
        dict(global_embedding=["chord"]),
        ["expected 'chord' as an array or an attribute; has"],
    ),
    "token of text": (
        dict(attributes={"chord": "long"}),
        dict(global_embedding=["chord"]),
        ["'chord': expected finite numbers; got 'long'"],
    ),
    "token of lists": (
        dict(attributes={"chord": [[1], [1, 2]]}),
        dict(global_embedding=["chord"]),
        ["'chord': expected finite numbers; got [[1], [1, 2]]"],
    ),
    "token of nothing": (
        dict(attributes={"chord": None}),
        dict(global_embedding=["chord"]),
        ["'chord': expected finite numbers; got None"],
    ),
    "token of other width": (
        dict(attributes={"chord": [1.0, 2.0]}),
        dict(global_embedding=["chord"]),
        ["expected what run_", "global_embedding"],
    ),
    "free stream": (
        dict(drop=["air_density"]),
        dict(free_stream=FLOW, coefficients=PRESSURE),
        ["expected 'air_density' as an array or an attribute"],
    ),
    "velocity of zero": (
        dict(attributes={"stream_velocity": 0.0}),
        dict(free_stream=FLOW, coefficients=PRESSURE),
        ["free stream: expected a positive velocity; got 0.0"],
    ),
    "negative velocity": (
        dict(attributes={"stream_velocity": -3.0}),
        dict(free_stream=FLOW, coefficients=PRESSURE),
        ["free stream: expected a positive velocity; got -3.0"],
    ),
    "several velocities": (
        dict(attributes={"stream_velocity": [1.0, 0.0]}),
        dict(free_stream=FLOW, coefficients=PRESSURE),
        ["'stream_velocity': expected one finite number; got 2"],
    ),
    "frame": (
        dict(drop=["stl_areas", "surface_areas"]),
        dict(frame=FrameConfig(centroid=True)),
        ["data.frame.centroid: expected a surface or an STL with its areas; has"],
    ),
    "areas of a frame": (
        dict(arrays={"stl_areas": np.ones((20, 3), np.float32)}),
        dict(frame=FrameConfig(centroid=True)),
        ["'stl_areas': expected one area a row; got shape (20, 3)"],
    ),
    "negative length": (
        dict(attributes={"chord": -1.0}),
        dict(frame=FrameConfig(length="chord")),
        ["data.frame.length: expected a positive number; got -1.0"],
    ),
    "negative length of a centroid's frame": (
        {},
        dict(frame=FrameConfig(centroid=True, length="-1.0")),
        ["data.frame.length: expected a positive number; got -1.0"],
    ),
    "infinite length": (
        {},
        dict(frame=FrameConfig(length="inf")),
        ["expected a finite number, or the name of one; got 'inf'"],
    ),
    "coefficient of nothing": (
        {},
        dict(coefficients={"pressure": "pressure"}),
        ["data.coefficients.pressure: expected a column or a vector; has p, tau_x"],
    ),
    "fields twice": (
        {},
        dict(targets=["surface_fields", "surface_fields.p"]),
        ["data.streams.surface.targets: expected each field once; got p, tau_x, tau_y, tau_z, p"],
    ),
    "positions": (
        {},
        dict(local_positions="surface_areas"),
        ["data.streams.surface.local_positions: expected 3 columns; got 1"],
    ),
    "orders": (
        dict(
            arrays={"stl_centers": np.ones((30, 3), np.float32)},
            attributes={"shuffled": ["surface", "stl"]},
        ),
        dict(fx=["stl_centers"]),
        ["'stl_centers': expected the order of rows of 'surface_mesh_centers'"],
    ),
}


@pytest.mark.parametrize("case", SAMPLES)
def test_what_a_sample_lacks_is_named_when_it_is_loaded(case, path):
    written, changes, parts = SAMPLES[case]
    rewrite(path, **written)
    parts_of_stream = {name: changes[name] for name in changes if hasattr(SURFACE, name)}
    changes = {name: value for name, value in changes.items() if name not in parts_of_stream}
    stream = dataclasses.replace(SURFACE, **parts_of_stream)
    text = load_error(config_of(path, streams={"surface": stream}, **changes))
    assert_one_line(text, str(path / "run_0"), *parts)


# What no store has -------------------------------------------------------------------------------

FORCES = ForcesConfig(pressure="p", shear="tau", directions={"drag": [1, 0, 0]})
CONFIGS = {
    "streams": (dict(streams={}), "data.streams: expected at least one stream; got none"),
    "embedding": (
        dict(streams={"surface": dataclasses.replace(SURFACE, embedding=[])}),
        "data.streams.surface.embedding: expected at least one entry; got []",
    ),
    "targets": (
        dict(streams={"surface": dataclasses.replace(SURFACE, targets="???")}),
        "data.streams.surface.targets: expected at least one entry; got '???'",
    ),
    "splits": (
        dict(validation=3, test=1),
        "data.validation: expected fewer than the 3 samples that STORE has left; got 3",
    ),
    "train": (dict(train=3), "data.train: expected at most the 2 samples that STORE has left"),
    "no train": (dict(train=0), "data.train: expected a positive number; got 0"),
    "no test": (dict(test=0), "data.test: expected a positive number; got 0"),
    "resolution": (dict(resolution=0), "data.resolution: expected a positive number; got 0"),
    "geometry": (
        dict(geometry_resolution=-1),
        "data.geometry_resolution: expected a positive number; got -1",
    ),
    "kind": (
        dict(coefficients={"p": "heat"}),
        "data.coefficients.p: expected one of pressure, stress, velocity; got 'heat'",
    ),
    "stream of forces": (
        dict(forces=dataclasses.replace(FORCES, stream="body")),
        "data.forces.stream: expected one of surface; got 'body'",
    ),
    "pressure of forces": (
        dict(forces=dataclasses.replace(FORCES, pressure="q")),
        "data.forces.pressure: expected one of the targets of 'surface', p, tau_x",
    ),
    "shear of forces": (
        dict(forces=dataclasses.replace(FORCES, shear="wss")),
        "data.forces.shear: expected one of the targets of 'surface', p, tau_x",
    ),
    "forces of a volume": (
        dict(streams=BOTH, forces=dataclasses.replace(FORCES, stream="volume", shear="U")),
        "'surface_normals': expected 7",
    ),
    "nothing of forces": (
        dict(forces=ForcesConfig(pressure="p")),
        "data.forces.directions: expected at least one; got none",
    ),
    "direction": (
        dict(forces=dataclasses.replace(FORCES, directions={"drag": [0, 0, 0]})),
        "data.forces.directions.drag: expected a direction; got [0, 0, 0]",
    ),
    "flat direction": (
        dict(forces=dataclasses.replace(FORCES, directions={"drag": [1, 0]})),
        "data.forces.directions.drag: expected three numbers, or names of numbers; got [1, 0]",
    ),
    "name of a direction": (
        dict(forces=dataclasses.replace(FORCES, directions={"drag": ["cos", 0, 0]})),
        "expected 'cos' as an array or an attribute; has",
    ),
    "moment": (
        dict(forces=dataclasses.replace(FORCES, moments={"drag": [1, 0, 0]})),
        "data.forces.moments: expected other names than those of directions; got drag",
    ),
    "area": (
        dict(forces=dataclasses.replace(FORCES, area="0")),
        "data.forces.area: expected a positive number; got 0.0",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_what_no_store_has_is_named_when_it_is_loaded(case, path):
    changes, part = CONFIGS[case]
    assert_one_line(load_error(config_of(path, **changes)), part.replace("STORE", str(path)))


def test_other_fields_of_a_test_store(path, tmp_path):
    other = tmp_path / "other"
    create_store(other)
    attributes = numbers(0) | {"surface_field_names": ["p", "a", "b", "c"]}
    write_sample(other, "x", contents(0), attributes)
    text = load_error(config_of(path, test_path=str(other)))
    assert_one_line(
        text, str(other / "x"), str(path), "surface.fields p, a, b, c instead of p, tau"
    )


@pytest.mark.parametrize("key", ["test_path", "validation_path"])
def test_no_store_of_a_split(key, path, tmp_path):
    text = load_error(config_of(path, **{key: str(tmp_path / "none")}))
    assert_one_line(text, str(tmp_path / "none"), "there is no such folder")


# What only the values tell -----------------------------------------------------------------------


def spoiled(name: str, value: float) -> dict[str, np.ndarray]:
    values = contents(1)[name].astype(np.float64)
    values.ravel()[7] = value
    return {name: values}


VALUES = {
    "coordinates": (spoiled("surface_mesh_centers", np.nan), ["surface_mesh_centers_y"]),
    "normals": (spoiled("surface_normals", np.inf), ["surface_normals_y"]),
    "targets": (spoiled("surface_fields", np.nan), ["tau_z", "got 1 that are not"]),
    "beyond float32": (spoiled("surface_fields", 1e300), ["tau_z"]),
}
FRAMES = {
    "centers": (spoiled("stl_centers", np.nan), ["'stl_centers'", "expected a finite centroid"]),
    "areas": (spoiled("stl_areas", np.nan), ["'stl_areas'", "expected a surface of some area"]),
    "no area": (
        {"stl_areas": np.zeros(20, np.float32)},
        ["'stl_areas'", "expected a surface of some area; got 0"],
    ),
}


def read_error(config, *, statistics: bool) -> str:
    dataset = load_dataset(config)
    loader = Loader(dataset.splits["train"], 2, 1, 0, 1, None)
    with pytest.raises(ValueError, match="expected") as error:
        dataset.statistics() if statistics else next(loader)
    return str(error.value)


@pytest.mark.parametrize("statistics", [True, False], ids=["statistics", "batch"])
@pytest.mark.parametrize("case", [*VALUES, *FRAMES])
def test_a_value_that_is_none_is_named_when_it_is_read(case, statistics, path):
    arrays, parts = (VALUES | FRAMES)[case]
    rewrite(path, arrays)
    config = config_of(path, frame=FrameConfig(centroid=case in FRAMES), train=2, seed=SEED)
    text = read_error(config, statistics=statistics)
    assert_one_line(text, str(path / name_of(1)), "expected", *parts)


# By it sample 1 is one of two for training.
SEED = 0


def damage(path: Path, how: str) -> None:
    folder = path / name_of(1) / "surface_fields" / "c"
    file = max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    content = file.read_bytes()
    if how == "lost":
        file.unlink()
    elif how == "flipped":
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        file.write_bytes(content[: len(content) // 2] if how == "truncated" else b"x" * 100)


@pytest.mark.parametrize("resolution", [None, 10], ids=["whole", "drawn"])
@pytest.mark.parametrize("how", ["truncated", "garbage", "flipped", "lost"])
@pytest.mark.parametrize("statistics", [True, False], ids=["statistics", "batch"])
def test_a_damaged_file_is_named_when_it_is_read(how, statistics, resolution, path):
    damage(path, how)
    config = config_of(path, train=2, seed=SEED, resolution=resolution)
    text = read_error(config, statistics=statistics)
    field = (
        "'p': expected finite values" if how == "lost" else "'surface_fields': expected readable"
    )
    assert_one_line(text, str(path / name_of(1)), field)


# Models ------------------------------------------------------------------------------------------


def test_flare_of_two_streams(path):
    description = load_dataset(config_of(path, streams=BOTH)).description
    with pytest.raises(
        ValueError, match="expected geotransolver or geotransolver_fa for the 2 streams"
    ) as error:
        build_model(FlareConfig(**TINY), description, 0)
    assert_one_line(str(error.value), "model.name")


def test_neighbors_without_a_geometry(path):
    description = load_dataset(config_of(path)).description
    config = GeoTransolverConfig(**TINY, include_local_features=True)
    with pytest.raises(ValueError, match="expected False for data without a geometry") as error:
        build_model(config, description, 0)
    assert_one_line(str(error.value), "model.include_local_features")


def test_neighbors_of_an_embedding_that_is_no_coordinates(path):
    stream = dataclasses.replace(SURFACE, embedding=["surface_mesh_centers", "surface_normals"])
    config = config_of(path, streams={"surface": stream}, geometry=["stl_centers"])
    description = load_dataset(config).description
    model = GeoTransolverConfig(**TINY, include_local_features=True)
    with pytest.raises(ValueError, match="expected coordinates") as error:
        build_model(model, description, 0)
    assert_one_line(str(error.value), "data.streams.surface.local_positions", "got null")


def test_a_batch_of_more_samples_than_there_are(path):
    split = load_dataset(config_of(path)).splits["train"]
    with pytest.raises(ValueError, match=r"train\.batch_size: expected at most the 2 training"):
        Loader(split, 4, 1, 0, 0, None)
