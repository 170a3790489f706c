"""Sums over points and maps of points in chunks equal those of all points at once."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import array_shapes, collectives, shapes_of, text_of
from conftest import COMPILE_FAST, assert_trees_close, on_any_mesh, on_mesh

from parallel import chunks
from parallel.streaming import map_points, sum_over_points

BATCH, POINTS, HEADS, SLICES, WIDTH = 2, 104, 4, 6, 3
REAL = np.array([97, 50])


def weights_of(parameters, x):
    scores = jnp.einsum("bhds,bnhd->bhsn", parameters["kernel"], x)
    return jax.nn.softmax(scores + parameters["shift"][..., None], axis=2)


def pool(parameters, chunk, positions):
    weights = jnp.where(chunk["mask"][:, None, None], weights_of(parameters, chunk["x"]), 0)
    weights = weights * (1 + parameters["factor"][..., 0, None, None] * jnp.sin(positions))
    return jnp.einsum("bhsn,bnhd->bhsd", weights, chunk["x"]), weights.sum(-1)


def spread(parameters, chunk, positions):
    weights = weights_of(parameters, chunk["x"]) * jnp.cos(positions)
    return {"y": jnp.einsum("bhsn,bhsd->bnhd", weights, parameters["tokens"])}


def dense(function, parameters, points):
    """The definition: all points in one call."""
    broadcast = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (BATCH, HEADS, *leaf.shape[2:])), parameters
    )
    return function(broadcast, points, jnp.arange(POINTS))


def arrays(dtype=np.float64):
    draw = lambda *shape: np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)  # noqa: E731
    parameters = {
        "kernel": draw(1, 1, WIDTH, SLICES),
        "shift": draw(1, HEADS, SLICES),
        "factor": np.full((1, 1, 1), 2, np.int32),  # an integer has no gradient
    }
    points = {"x": draw(BATCH, POINTS, HEADS, WIDTH), "mask": np.arange(POINTS) < REAL[:, None]}
    return parameters, points


def program(run_sum, run_map):
    """A loss through a sum and a map, with every gradient."""

    def loss(shift, kernel, x, integers, mask):
        parameters = {"kernel": kernel, "shift": shift, **integers}
        sums, totals = run_sum(pool, parameters, {"x": x, "mask": mask})
        tokens = jnp.sin(sums) / (totals[..., None] + 0.01)
        spread_parameters = {"kernel": kernel, "shift": shift, "tokens": tokens}
        y = run_map(spread, spread_parameters, {"x": x})["y"]
        return jnp.sum(jnp.where(mask[..., None, None], y, 0) ** 2), (sums, totals, y)

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)


def run(program, *arguments):
    return jax.jit(program, compiler_options=COMPILE_FAST)(*arguments)


def chunked(function, width=SLICES):
    return lambda *arguments: function(*arguments, heads=HEADS, width=width)


def arguments(dtype=np.float64):
    parameters, points = arrays(dtype)
    integers = {"factor": parameters["factor"]}
    return parameters["shift"], parameters["kernel"], points["x"], integers, points["mask"]


@on_any_mesh
def test_chunks_and_shards_give_the_sums_and_maps_of_all_points(mesh, float64, monkeypatch):
    expected = run(program(dense, dense), *arguments())
    monkeypatch.setitem(chunks._SCORES_A_CHUNK, "cpu", 5 * HEADS * SLICES)  # a few points each
    jax.clear_caches()
    with on_mesh(mesh):
        actual = run(program(chunked(sum_over_points), chunked(map_points)), *arguments())
    jax.clear_caches()
    assert_trees_close(actual, expected, 1e-12)


def test_a_sum_and_a_map_exchange_one_array_forward_and_one_backward():
    with on_mesh(dict(points=8)):
        function = chunked(sum_over_points), chunked(map_points)
        text = text_of(program(*function), *arguments(np.float32))
    found = collectives(text)
    assert {collective.kind for collective in found} == {"all-reduce"}
    sizes = shapes_of(found)
    packed = "all-reduce", (BATCH, HEADS, SLICES * (WIDTH + 1))
    tokens = "all-reduce", (BATCH, HEADS, SLICES * WIDTH)
    assert sizes[packed] == 1
    assert sizes[tokens] == 1
    # What is left are the loss and the gradients of the parameters, of a map and a sum.
    rest = sizes - Counter([packed, tokens])
    assert all(np.prod(shape) <= HEADS * SLICES * WIDTH for _, shape in rest)


def test_no_array_holds_the_weights_of_all_points():
    slices, points = 127, 64_000
    shape = lambda *s: jax.ShapeDtypeStruct(s, np.float32)  # noqa: E731
    step = program(chunked(sum_over_points, slices), chunked(map_points, slices))
    lead = (shape(1, HEADS, slices), shape(1, 1, WIDTH, slices))
    integers = {"factor": jax.ShapeDtypeStruct((1, 1, 1), np.int32)}
    x, mask = shape(BATCH, points, HEADS, WIDTH), jax.ShapeDtypeStruct((BATCH, points), np.bool_)
    shapes = array_shapes(text_of(step, *lead, x, integers, mask))
    assert any(slices in array for array in shapes)
    assert not [array for array in shapes if slices in array and np.prod(array) >= points * slices]


@pytest.mark.parametrize("function", [sum_over_points, map_points])
def test_bfloat16_gradients_are_gathered_in_float32(function):
    def total(kernel, x):
        def one(parameters, chunk, positions):
            made = jnp.einsum("bhds,bnhd->bnhs", parameters.astype(chunk.dtype), chunk)
            return made.sum(1) if function is sum_over_points else made

        made = function(one, kernel, x, heads=1, width=1)
        return made.astype(jnp.float32).sum()

    x = jnp.ones((1, 4096, 1, 1), jnp.bfloat16)
    gradient = jax.grad(total)(jnp.ones((1, 1, 1, 1)), x)
    np.testing.assert_allclose(gradient, 4096, rtol=1e-2)
