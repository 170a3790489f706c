"""Sums, softmaxes and maps of points in chunks equal those of all points at once."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import array_shapes, collectives, shapes_of, text_of
from conftest import assert_trees_close, on_any_mesh, on_mesh

from parallel import chunks, softmax
from parallel.contraction import contract
from parallel.streaming import (
    Chunking,
    Held,
    Places,
    map_held,
    map_points,
    softmax_over_points,
    sum_over_points,
)

BATCH, POINTS, HEADS, SLICES, WIDTH = 2, 104, 4, 6, 3
REAL = np.array([97, 50])


def scores_of(weights, x):
    return jnp.einsum("hds,bnhd->bhsn", weights["kernel"], x) + weights["shift"][..., None]


def pool(weights, latents, chunk, places):
    shares = jax.nn.softmax(scores_of(weights, chunk["x"]), axis=2)
    shares = jnp.where(chunk["mask"][:, None, None], shares, 0)
    # An integer, and where a point is, have no gradient.
    by_place = jnp.sin(places.samples[:, None] + weights["factor"][0] * places.points)
    shares = shares * (1 + by_place[:, None, None])
    return jnp.einsum("bhsn,bnhd->bhsd", shares, chunk["x"]), shares.sum(-1)


def attend(weights, latents, chunk, places):
    scores = scores_of(weights, chunk["x"]) * latents["sharpness"][..., None]
    scores = softmax.mask_scores(scores, chunk["mask"][:, None, None])
    return scores, jnp.moveaxis(jnp.sin(chunk["x"]), 1, 3)


def spread(weights, latents, chunk, places):
    weights, _ = weights
    shares = jax.nn.softmax(scores_of(weights, chunk["x"]), axis=2) * jnp.cos(places.points)
    return {"y": jnp.einsum("bhsn,bhsd->bnhd", shares, latents["tokens"])}


def dense(function):
    """The definition: all points in one call."""

    def run(weights, latents, points):
        places = Places(jnp.arange(BATCH), jnp.arange(POINTS))
        if function is spread:
            return spread((points.weights, weights), latents, points.points, places)
        made = function(weights, latents, points, places)
        if function is attend:
            scores, values = made
            made = jnp.einsum("bhsn,bhdn->bhsd", jax.nn.softmax(scores), values)
        return made, Held(weights, points)

    return run


def streamed(run, size: int | None = 5, width: int = SLICES):
    functions = {pool: sum_over_points, attend: softmax_over_points, spread: map_held}

    def of(*trees):
        return functions[run](run, Chunking(HEADS, width, size), *trees)

    return of


def program(implementation):
    """A loss through a sum, a softmax and a map, with every gradient."""

    def loss(shift, kernel, x, integers, mask):
        weights = {"kernel": kernel, "shift": shift}
        points = {"x": x, "mask": mask}
        (sums, totals), held = implementation(pool)(weights | integers, {}, points)
        sharpness = jnp.tanh(sums).sum(-1) / (totals + 0.01)
        means, held = implementation(attend)(weights, {"sharpness": sharpness}, held.points)
        y = implementation(spread)({}, {"tokens": means}, held)["y"]
        masked = jnp.where(mask[..., None, None], y, 0)
        return jnp.sum(masked**2), (sums, totals, means, masked)

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)


def arguments(dtype=np.float64):
    draw = lambda *shape: np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)  # noqa: E731
    factor = {"factor": np.full(1, 2, np.int32)}
    mask = np.arange(POINTS) < REAL[:, None]
    kernel = draw(HEADS, WIDTH, SLICES)
    return draw(HEADS, SLICES), kernel, draw(BATCH, POINTS, HEADS, WIDTH), factor, mask


def run(program, *arguments):
    return jax.jit(program)(*arguments)


@on_any_mesh
def test_chunks_and_shards_give_what_all_points_give(mesh, float64):
    expected = run(program(dense), *arguments())
    with on_mesh(mesh):
        actual = run(program(streamed), *arguments())
    assert_trees_close(actual, expected, 1e-12)


@pytest.mark.parametrize("size", [1, 104, 1000])
def test_length_of_chunks_changes_nothing(size, float64):
    expected = run(program(dense), *arguments())
    actual = run(program(lambda function: streamed(function, size)), *arguments())
    assert_trees_close(actual, expected, 1e-12)


def test_what_is_exchanged_is_packed():
    with on_mesh(dict(points=8)):
        text = text_of(program(streamed), *arguments(np.float32))
    found = collectives(text)
    assert {collective.kind for collective in found} == {"all-reduce"}
    sizes = shapes_of(found)
    lead = (BATCH, HEADS)
    of_latents = Counter(
        [
            ("all-reduce", (*lead, SLICES * (WIDTH + 1))),  # the sum
            ("all-reduce", (*lead, SLICES)),  # the maximum of the softmax
            ("all-reduce", (*lead, SLICES, WIDTH + 1)),  # its packed sum
            ("all-reduce", (*lead, SLICES * WIDTH)),  # the gradient of the tokens
            ("all-reduce", (*lead, SLICES)),  # the gradient of the sharpness
        ]
    )
    # Those of the softmax and of what reads on from it are one.
    of_weights = Counter({("all-reduce", (HEADS, SLICES * (WIDTH + 1))): 2})
    assert sizes == of_latents + of_weights + Counter([("all-reduce", ())])


def test_no_array_holds_the_scores_of_all_points():
    slices, points = 127, 64_000
    shape = lambda *s: jax.ShapeDtypeStruct(s, np.float32)  # noqa: E731
    step = program(lambda function: streamed(function, None, slices))
    weights = (shape(HEADS, slices), shape(HEADS, WIDTH, slices))
    factor = {"factor": jax.ShapeDtypeStruct((1,), np.int32)}
    x, mask = shape(BATCH, points, HEADS, WIDTH), jax.ShapeDtypeStruct((BATCH, points), np.bool_)
    shapes = array_shapes(text_of(step, *weights, x, factor, mask))
    assert any(slices in array for array in shapes)
    assert not [array for array in shapes if slices in array and np.prod(array) >= points * slices]


@pytest.mark.parametrize("total", [0, 1, 97, 104, 2**31 - 1])
def test_chunks_stay_within_their_budget(total):
    length = chunks.chunk_length(total, 2, 4, 2**10)
    assert 1 <= length <= 2**20 // (2 * 4 * 2**10)
    assert -(-total // length) <= 1.5 * max(1, -(-total // 2**7))


def summed(weights, latents, chunk, places):
    return contract("bnh,ho->bhno", chunk, weights).sum(2)


def mapped(weights, latents, chunk, places):
    return contract("bnh,ho->bno", chunk, weights).astype(chunk.dtype)


def read_on(weights, latents, chunk, places):
    return mapped(weights[0], latents, chunk, places)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("function", [summed, mapped, read_on])
def test_bfloat16_gradients_are_gathered_in_float32(function, dtype):
    x = jnp.ones((1, 4096, 1), jnp.bfloat16)

    def total(kernel):
        if function is summed:
            return sum_over_points(function, Chunking(1, 1, 7), kernel, {}, x)[0].sum()
        if function is read_on:
            _, held = sum_over_points(summed, Chunking(1, 1, 7), kernel, {}, x)
            y = map_held(function, Chunking(1, 1, 7), {}, {}, held)
            return y.astype(jnp.float32).sum()
        return map_points(function, Chunking(1, 1, 7), kernel, {}, x).astype(jnp.float32).sum()

    # In bfloat16 the sum would end at 256, where one more is less than half a digit.
    assert jax.grad(total)(jnp.ones((1, 1), dtype))[0, 0] == 4096
