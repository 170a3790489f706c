"""What the benchmarks count and compare."""

import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compile_for
from conftest import MESHES, on_mesh
from jax.sharding import PartitionSpec as P

from benchmarks.cases import MODELS, Case, make_function
from benchmarks.flops import matrix_flops
from benchmarks.machines import MACHINES, machine_of
from benchmarks.measure import measure
from benchmarks.models import compare, run_json, table
from benchmarks.plan import Widths, read_config, roofline
from benchmarks.program import Program
from benchmarks.scaling import figures
from benchmarks.scaling import table as scaling_table
from benchmarks.topologies import target_mesh
from experiments.building import build_model
from parallel import mesh as mesh_lib

SMALL = dict(width=16, heads=2, latents=4, layers=1, mlp_ratio=2)


def repeated(x, w):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=5)[0]


def test_operations_of_a_loop_count_as_often_as_it_runs():
    x, w = np.ones((3, 4), np.float32), np.ones((4, 4), np.float32)
    assert matrix_flops(repeated, x, w) == 5 * 2 * 3 * 4 * 4
    # Of a product's gradients there are two.
    assert matrix_flops(jax.grad(lambda x, w: jnp.sum(x @ w), (0, 1)), x, w) == 3 * 2 * 3 * 4 * 4


def test_operations_of_a_convolution():
    x, kernel = np.ones((2, 9, 5), np.float32), np.ones((3, 5, 7), np.float32)

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )

    assert matrix_flops(convolve, x, kernel) == 2 * 2 * 9 * 7 * 3 * 5


def test_operations_of_an_island_are_those_of_all_devices():
    x = np.ones((16, 4), np.float32)
    with on_mesh(MESHES["points8"]):
        island = jax.shard_map(lambda x: x @ x.T, in_specs=P("points"), out_specs=P("points"))
        assert matrix_flops(island, x) == 8 * 2 * 2 * 4 * 2


def test_collectives_and_bytes_of_a_loop_count_as_often_as_it_runs():
    def step(x, _):
        return mesh_lib.constrain(x + jnp.tanh(x).sum(0), "points", None), None

    with on_mesh(MESHES["points8"]):
        x = jax.ShapeDtypeStruct((64, 3), jnp.float32, sharding=mesh_lib.sharding("points", None))
        once, often = (
            Program(compile_for(lambda x, n=n: jax.lax.scan(step, x, length=n)[0], x).as_text())
            for n in (3, 300)
        )
    few, many = (
        Counter({found.arrays: count for found, count in program.collectives()})
        for program in (once, often)
    )
    assert few == {("f32[3]",): 3}
    assert many == {("f32[3]",): 300}
    assert 80 < often.bytes_moved() / once.bytes_moved() <= 100


def test_of_an_array_read_in_chunks_only_the_chunks_count():
    def walk(x):
        def add(i, total):
            return total + jax.lax.dynamic_slice_in_dim(x, 10 * i, 10).sum()

        return jax.lax.fori_loop(0, 100, add, jnp.zeros(()))

    moved = Program(compile_for(walk, jax.ShapeDtypeStruct((1000,), jnp.float32)).as_text())
    assert 4 * 1000 <= moved.bytes_moved() < 4 * 4000


def test_of_an_array_written_under_another_shape_only_the_part_counts():
    program = Program(
        """HloModule m

%fused (p0: f32[1000,1], p1: f32[10], p2: s32[]) -> f32[1000] {
  %p0 = f32[1000,1]{1,0} parameter(0)
  %flat = f32[1000]{0} bitcast(%p0)
  %p1 = f32[10]{0} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %put = f32[1000]{0} dynamic-update-slice(%flat, %p1, %p2)
}

ENTRY %main (a: f32[1000,1], b: f32[10], i: s32[]) -> f32[1000] {
  %a = f32[1000,1]{1,0} parameter(0)
  %b = f32[10]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = f32[1000]{0} fusion(%a, %b, %i), kind=kLoop, calls=%fused
}
"""
    )
    # The part is read, and written; and there is its place.
    assert program.bytes_moved() == 4 * (10 + 10 + 1)


@pytest.mark.parametrize("model", ["flare", "gale"])
def test_a_program_of_many_blocks_is_as_long_as_one_of_few(model):
    """So that compiling it takes no longer."""
    lengths = []
    for layers in (2, 6):
        case = Case(model, 24, **SMALL | dict(layers=layers))
        weights, train = make_function(case.make_model(), "train")
        text = compile_for(train, weights, case.input_shapes()).as_text()
        lengths.append(len(text.splitlines()))
    assert lengths[1] <= 1.02 * lengths[0]


@pytest.mark.parametrize("model", ["flare", "transolver", "gale", "gale_fa"])
def test_a_block_keeps_its_points_twice_for_the_gradient(model):
    """What attention reads and what the perceptron reads; latents and weights are small."""
    points, width = 4096, 32
    sizes = []
    for layers in (2, 6):
        case = Case(model, points, **SMALL | dict(layers=layers, width=width))
        weights, train = make_function(case.make_model(), "train")
        compiled = compile_for(train, weights, case.input_shapes())
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert (sizes[1] - sizes[0]) / 4 < 2.3 * points * width * 4


@pytest.mark.parametrize("model", MODELS)
def test_cases_are_the_models_they_name(model):
    case = Case(model, 24, batch=2, **SMALL)
    weights, forward = make_function(case.make_model(), "forward")
    assert jax.eval_shape(forward, weights, case.input_shapes()).shape == (2, 24, 4)
    inputs = case.make_inputs()
    assert {name: x.shape for name, x in inputs.items()} == {
        name: x.shape for name, x in case.input_shapes().items()
    }


def test_measurement_of_a_model():
    figures = measure(Case("flare", 32, **SMALL), "train", repeats=2)
    assert figures["points_per_s"] == pytest.approx(32 / figures["median_s"])
    assert figures["temporary_bytes"] > 0
    assert json.dumps(figures)


def test_comparison_is_with_the_faster_mode_that_works():
    ours = {"median_s": 1.0, "peak_rss_mib": 100}
    peer = {
        "plain": {"median_s": 4.0, "peak_rss_mib": 400},
        "compiled": {"median_s": 2.0, "peak_rss_mib": 200},
    }
    assert compare(ours, peer)["time_ratio"] == 0.5
    assert compare(ours, peer)["memory_ratio"] == 0.5
    assert compare(ours, peer | {"compiled": "failed"})["time_ratio"] == 0.25
    assert compare(ours, {"plain": "failed"}) == {}


def test_table_has_a_row_for_each_measurement():
    row = dict(
        model="flare", points=4096, dtype="float32", mode="train", median_s=0.5,
        points_per_s=8192.0, compile_s=1.0, temporary_bytes=2**20, peak_rss_mib=400.0,
    )  # fmt: skip
    lines = table([row, row | {"comparison": compare(row, {"plain": row})}]).splitlines()
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {13}


def test_failing_command_is_named_with_its_last_line():
    with pytest.raises(ChildProcessError, match="nowhere"):
        run_json(["python3", "-c", "raise SystemExit('nowhere to be found')"])


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"model: expected one of flare.*; got 'flair'"):
        Case("flair", 8)
    with pytest.raises(ValueError, match=r"points: expected at least 1; got -5"):
        Case("flare", -5)
    with pytest.raises(ValueError, match=r"repeats: expected at least 1; got 0"):
        measure(Case("flare", 8, **SMALL), "train", repeats=0)
    for target in ("h200:0", "h200:12"):
        with pytest.raises(ValueError, match=rf"at most 8 GPUs or a multiple; got '{target}'"):
            target_mesh(target, 1, -1, 1)
    with pytest.raises(ValueError, match=r"target: expected h200:COUNT or tpu:.*; got 'gpu:8'"):
        target_mesh("gpu:8", 1, -1, 1)
    with pytest.raises(ValueError, match=r"target: expected one of h200:.*got 'h300:8'"):
        machine_of("h300:8")


def test_a_step_takes_as_long_as_what_limits_it():
    machine, exchanged = MACHINES["h200"], Counter({("all-reduce", "f32[1]", 4): 10})
    fast = roofline(machine, 1, 989e12, 1.0, exchanged, narrow=True)
    assert fast["step"] == pytest.approx(1.0)
    assert roofline(machine, 1, 1.0, 4.8e12, exchanged, narrow=True)["step"] == pytest.approx(1.0)
    near = roofline(machine, 8, 0.0, 0.0, exchanged, narrow=True)["step"]
    assert near == pytest.approx(10 * machine.latency, rel=1e-3)


@pytest.mark.parametrize("name", ["flare", "transolver", "geotransolver", "geotransolver_fa"])
def test_a_plan_has_the_widths_that_it_is_told(name):
    config = read_config([f"model={name}", "model.n_hidden=16", "model.n_head=2"])
    widths = Widths(values=2, positions=3, fields=5, geometry=6, globals=2)
    model = build_model(config.model, widths.description(), 0)
    with on_mesh(MESHES["points8"]):
        batch = widths.batch(2, 99, 31, neighbors=4)
    assert batch.streams[0].target.shape == (2, 104, 5)
    assert batch.geometry.shape == (2, 32, 6)
    assert batch.streams[0].neighborhoods.of_geometry.indices.shape == (2, 32, 4)
    shapes = [param.shape for param in jax.tree.leaves(model)]
    assert (16, 5) in shapes


def test_what_devices_exchange_does_not_grow_with_the_points():
    few, many = (
        figures(Case("flare", points, **SMALL | dict(layers=2)), devices)
        for points, devices in ((64, 2), (512, 8))
    )
    assert few["layer_bytes"] == many["layer_bytes"] > 0
    assert few["collectives"] == many["collectives"]
    assert figures(Case("flare", 64, **SMALL), 1)["step_bytes"] == 0
    lines = scaling_table([few, many]).splitlines()
    assert {line.count("|") for line in lines} == {10}
