"""Exported programs: one for any number of points, the same numbers, nothing of this project."""

import json
import re
import subprocess
import sys
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import pytest
from commands import TINY, assert_one_line, call
from compiled import array_shapes
from conftest import relative_difference, unchecked
from flax import nnx
from jax import export as jax_export

from experiments import export, train
from experiments.building import build_model
from experiments.configuration import schema
from experiments.data.batch import Batch, Scale, Statistics, Stream, StreamStatistics
from experiments.data.description import Description, StreamDescription
from experiments.prediction import predict
from parallel import chunks
from parallel.neighbors import radius_search

SMALL = dict(n_layers=1, n_hidden=16, n_head=2, slice_num=4, mlp_ratio=2)
# Numbers that the chunks of the tests hold at most: 8 points of an attention layer of `SMALL`, of
# a perceptron 2. A device has many more, and its clouds many more points.
BUDGET = 64
LONGEST_CHUNK = BUDGET // (SMALL["n_head"] * SMALL["slice_num"])
LOCAL = dict(include_local_features=True, radii=[1.5], neighbors_in_radius=[3], n_hidden_local=4)

# Queries and points of a search.
SYMBOLIC = ["B, N, 3", "B, M, 3"]


@pytest.fixture(scope="module", autouse=True)
def symbolic_sizes():
    """Sizes of an exported program are no integers, as annotations have them."""
    with unchecked():
        yield


class Case(NamedTuple):
    """A model and the data that it is for."""

    model: schema.ModelConfig
    data: Description


CLOUD = Description((StreamDescription("points", 3, 2, ("pressure", "speed")),))
TOKENS = Description(CLOUD.streams, None, (2, 3))
CAR = Description((StreamDescription("points", 3, 0, ("pressure",)),), 3, (1, 2))
AROUND = Description(
    (
        StreamDescription("surface", 5, 0, ("pressure",), positions=True),
        StreamDescription("volume", 3, 1, ("pressure", "speed")),
    ),
    geometry=6,
    global_embedding=(2, 2),
)
GRID = Description(CLOUD.streams, structured_shape=(4, 5))

geo = partial(schema.GeoTransolverConfig, **SMALL)
CASES = {
    "flare": Case(schema.FlareConfig(**SMALL), TOKENS),
    "transolver": Case(schema.TransolverConfig(**SMALL), CLOUD),
    "transolver_plus": Case(schema.TransolverConfig(**SMALL, plus=True), CLOUD),
    "gale": Case(geo(), CAR),
    "gale_fa_streams_local": Case(geo(attention_type="GALE_FA", **LOCAL), AROUND),
    "grid": Case(schema.TransolverConfig(**SMALL, structured=True, unified_pos=True, ref=2), GRID),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def made_model(case: Case) -> nnx.Module:
    """A model of weights far from zero."""
    model = build_model(case.model, case.data, 0)
    generator = np.random.default_rng(0)
    perturb = lambda x: x + (0.2 * generator.standard_normal(x.shape)).astype(x.dtype)  # noqa: E731
    nnx.update(model, jax.tree.map(perturb, nnx.state(model, nnx.Param)))
    return model


def made_statistics(data: Description) -> Statistics:
    """Means and deviations that are not those of the inputs."""

    def scale(width: int) -> Scale | None:
        ramp = np.arange(width, dtype=np.float32)
        return Scale(0.1 * ramp, 1 + 0.1 * ramp) if width else None

    streams = tuple(
        StreamStatistics(scale(stream.embedding), scale(len(stream.fields)), scale(stream.fx))
        for stream in data.streams
    )
    tokens = data.global_embedding or (0, 0)
    return Statistics(streams, scale(data.geometry or 0), scale(tokens[1]))


def made_inputs(shapes: dict, **sizes: int) -> dict[str, np.ndarray]:
    """Inputs of a program, of as many samples and points as `sizes` says of its dimensions."""
    generator = np.random.default_rng(0)
    concrete = {
        name: tuple(sizes[str(n)] if jax_export.is_symbolic_dim(n) else n for n in like.shape)
        for name, like in shapes.items()
    }
    return {
        name: generator.standard_normal(shape).astype(np.float32)
        for name, shape in concrete.items()
    }


def expected_of(case: Case, model, inputs: dict) -> tuple:
    """What `predict` makes of the same."""
    model.eval()
    several = len(case.data.streams) > 1

    def stream(of: StreamDescription) -> Stream:
        prefix = f"{of.name}." if several else ""
        parts = {name: inputs.get(prefix + name) for name in ("embedding", "fx", "positions")}
        return Stream(target=None, **parts)

    batch = Batch(
        tuple(map(stream, case.data.streams)),
        inputs.get("geometry"),
        global_embedding=inputs.get("global_embedding"),
    )
    return predict(model, made_statistics(case.data), batch)


def exported_of(case: Case, model=None) -> jax_export.Exported:
    model = made_model(case) if model is None else model
    return export.export_model(model, made_statistics(case.data), case.data)


def assert_same(actual, expected: tuple) -> None:
    actual = tuple(actual.values()) if isinstance(actual, dict) else (actual,)
    for one, other in zip(actual, expected, strict=True):
        assert relative_difference(one, other) <= 1e-5


@EVERY
def test_one_program_predicts_any_number_of_points(case, monkeypatch):
    monkeypatch.setitem(chunks._SCORES_A_CHUNK, "cpu", BUDGET)
    model = made_model(case)
    shapes = export.input_shapes(model, case.data)
    program = jax_export.deserialize(exported_of(case, model).serialize())
    points = [1, 7, 5 * LONGEST_CHUNK + 3]
    every = [dict(B=1 + n % 2, N=n, M=6 - n % 6) for n in points]
    if model.structured_shape is not None:
        every = [dict(B=3)]
    elif len(case.data.streams) > 1:
        every = [dict(B=2, N0=1, N1=7, M=5), dict(B=1, N0=LONGEST_CHUNK, N1=points[-1], M=17)]
    for sizes in every:
        inputs = made_inputs(shapes, **sizes)
        assert_same(program.call(inputs), expected_of(case, model, inputs))


@pytest.mark.parametrize(("queries", "points"), [(1, 1), (600, 1100)])
def test_search_among_any_number_of_points_finds_the_same_neighbours(queries, points):
    """Though it groups them otherwise: many are equally far, some in a cluster, one is nowhere."""
    search = partial(radius_search, radius=0.3, count=4)
    shapes = jax_export.symbolic_args_specs([np.zeros((1, 1, 3), np.float32)] * 2, SYMBOLIC)
    program = jax_export.export(jax.jit(search))(*shapes)
    draw = np.random.default_rng(0).standard_normal((2, queries + points, 3))
    draw = np.round(draw, 1).astype(np.float32)
    draw[:, ::3] *= 1e-3
    draw[:, queries // 2] = np.nan
    clouds = draw[:, :queries], draw[:, queries:]
    found, expected = program.call(*clouds), search(*clouds)
    assert (found.indices == expected.indices).all()
    assert (found.distances == expected.distances).all()
    assert (queries == 1) == (found.indices < 0).all()


def test_inputs_are_named_by_stream_where_there_are_several():
    model = build_model(*CASES["gale_fa_streams_local"], 0)
    shapes = export.input_shapes(model, AROUND)
    assert {name: str(like.shape) for name, like in shapes.items()} == {
        "surface.embedding": "(B, N0, 5)",
        "surface.positions": "(B, N0, 3)",
        "volume.embedding": "(B, N1, 3)",
        "volume.fx": "(B, N1, 1)",
        "geometry": "(B, M, 6)",
        "global_embedding": "(B, 2, 2)",
    }


def test_program_for_several_platforms_has_each_one_and_runs_on_this():
    case = CASES["transolver"]
    model = made_model(case)
    program = export.export_model(
        model, made_statistics(case.data), case.data, ["cpu", "cuda", "tpu"]
    )
    assert program.platforms == ("cpu", "cuda", "tpu")
    inputs = made_inputs(export.input_shapes(model, case.data), B=1, N=9)
    assert_same(program.call(inputs), expected_of(case, model, inputs))


@pytest.mark.parametrize("name", ["flare", "transolver_plus", "gale"])
def test_no_array_of_a_program_is_of_all_points_and_latents(name):
    """As of more points than a chunk has: their number must not meet that of latents."""
    case = CASES[name]
    # A prime number of points, and more latents than anything else is wide.
    points, latents = 99_991, 97
    model = build_model(type(case.model)(**SMALL | dict(slice_num=latents)), case.data, 0)
    program = exported_of(case, model)
    shapes = export.input_shapes(model, case.data)
    inputs = made_inputs(shapes, B=1, N=points, M=3)
    compiled = jax.jit(program.call).lower(inputs).compile()
    long = {shape for shape in array_shapes(compiled.as_text()) if points in shape}
    assert long
    assert not any(latents in shape for shape in long)
    scores = 4 * SMALL["n_head"] * latents * points
    assert compiled.memory_analysis().temp_size_in_bytes < scores / 2


RUN_ALONE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {
            "experiments", "flare_jax", "geotransolver_jax", "parallel", "flax", "orbax"
        }:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import jax, numpy as np
with open("program.jaxexport", "rb") as file:
    program = jax.export.deserialize(bytearray(file.read()))
with np.load("inputs.npz") as archive:
    inputs = dict(archive)
np.save("fields.npy", program.call(inputs))
"""


def test_program_runs_without_this_project(tmp_path):
    case = CASES["gale"]
    model = made_model(case)
    (tmp_path / "program.jaxexport").write_bytes(exported_of(case, model).serialize())
    inputs = made_inputs(export.input_shapes(model, case.data), B=1, N=9, M=5)
    np.savez(tmp_path / "inputs.npz", **inputs)
    process = subprocess.run(
        [sys.executable, "-I", "-c", RUN_ALONE],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    assert_same(np.load(tmp_path / "fields.npy"), expected_of(case, model, inputs))


# The command ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run, trained with a moving average."""
    folder, cache = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("cache")
    options = ["train.steps=2", "train.checkpoint_every=1", "train.batch_size=4"]
    paths = [f"data.cache_dir={cache}", f"hydra.run.dir={folder}"]
    result = call(train.main, *TINY, *options, *paths, "optimizer.ema_decay=0.5")
    assert result.code == 0, result.err
    return folder


def test_command_writes_a_program_and_what_it_takes(run, tmp_path):
    out = tmp_path / "darcy.jaxexport"
    result = call(export.main, run, out)
    assert result.code == 0, result.err
    assert re.fullmatch(rf"{out}: [\d,]+ bytes; see {out}.json\n", result.out)
    assert {path.name for path in tmp_path.iterdir()} == {out.name, f"{out.name}.json"}

    content = json.loads((tmp_path / f"{out.name}.json").read_text())
    units = "those of the data that the run was trained on"
    array = dict(dtype="float32", units=units)
    assert content["inputs"] == {
        "embedding": array | {"shape": ["B", "N", 2]},
        "fx": array | {"shape": ["B", "N", 1]},
    }
    assert content["output"] == array | {"shape": ["B", "N", 1], "fields": ["pressure"]}
    assert content["step"] == 2
    assert content["platforms"] == ["cpu"]
    assert content["jax"] == jax.__version__

    trained, data = export.restore_run(run, "last")
    model = trained.with_weights()
    program = jax_export.deserialize(bytearray(out.read_bytes()))
    assert content["calling_convention_version"] == program.calling_convention_version
    inputs = made_inputs(export.input_shapes(model, data), B=1, N=11)
    expected = predict(model, trained.state.statistics, Batch((Stream(target=None, **inputs),)))
    assert_same(program.call(inputs), expected)


def test_program_has_the_weights_that_are_evaluated(run):
    """Those of the moving average, and of the checkpoint that is asked for."""
    last, _ = export.restore_run(run, "last")
    best, _ = export.restore_run(run, "best")
    assert (last.step, best.step) == (2, last.best)
    averaged, trained = (
        jax.tree.leaves(weights) for weights in (last.state.average, last.state.params)
    )
    exported = jax.tree.leaves(nnx.state(last.with_weights(), nnx.Param))
    assert all(map(np.array_equal, exported, averaged))
    assert not all(map(np.array_equal, exported, trained))


def assert_refused(result, *parts) -> None:
    assert result.code == 2, result.err
    assert result.out == ""
    assert_one_line(result.err, "error: ", *parts)


def test_export_without_a_run_is_one_line(tmp_path):
    result = call(export.main, tmp_path / "nothing", tmp_path / "out")
    assert_refused(result, f"{tmp_path / 'nothing'}: expected a run's folder with config")


def test_export_before_the_first_checkpoint_is_one_line(run, tmp_path):
    for name in ("config.yaml", "dataset.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    assert_refused(
        call(export.main, tmp_path, tmp_path / "out"), f"{tmp_path}: has no checkpoint yet"
    )
    assert not (tmp_path / "out").exists()


def test_export_into_a_folder_is_one_line(run, tmp_path):
    assert_refused(call(export.main, run, tmp_path), "expected a file to write; got a folder")
    missing = tmp_path / "missing" / "out"
    assert_refused(call(export.main, run, missing), f"{missing}: expected a folder to write into")
