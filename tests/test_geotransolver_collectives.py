"""What GALE layers exchange and hold, read from compiled programs: laws 2, 3 and 5."""

from collections import Counter

import jax
import numpy as np
import pytest
from compiled import array_shapes, collectives, shapes_of, text_of
from conftest import MESHES, on_mesh
from flax import nnx

from geotransolver_jax import GALE, GALEFA, GeoTransolver

BATCH, DIM, HEADS, SLICES, CONTEXT = 2, 16, 2, 127, 24
WIDTH = DIM // HEADS
LEAD = (BATCH, HEADS)


def layer_text(layer, program: str, points: int) -> str:
    graph, weights = nnx.split(layer)
    shape = lambda *s: jax.ShapeDtypeStruct(s, np.float32)  # noqa: E731
    x, context = shape(BATCH, points, DIM), shape(BATCH, HEADS, SLICES, CONTEXT)

    def apply(weights, x, context):
        return nnx.merge(graph, weights)(x, context=context)

    def step(weights, x, context, d_y):
        return jax.vjp(apply, weights, x, context)[1](d_y)

    with on_mesh(MESHES["points8"]):
        if program == "forward":
            return text_of(apply, weights, x, context)
        return text_of(step, weights, x, context, x)


def exchanged(layer, program: str, points: int) -> Counter:
    """The collectives, but for those of weight gradients, which have no batch."""
    found = collectives(layer_text(layer, program, points))
    assert {each.kind for each in found} == {"all-reduce"}
    return Counter({key: n for key, n in shapes_of(found).items() if key[1][:2] == LEAD})


@pytest.mark.parametrize("points", [8 * 53, 16 * 8 * 53])
@pytest.mark.parametrize("mode", ["weighted", "concat_project"])
def test_gale_exchanges_one_array_forward_and_one_backward(mode, points):
    layer = GALE(DIM, HEADS, SLICES, context_dim=CONTEXT, state_mixing_mode=mode, rngs=nnx.Rngs(0))
    packed = ("all-reduce", (*LEAD, SLICES * (WIDTH + 1)))
    tokens = ("all-reduce", (*LEAD, SLICES * WIDTH))
    assert exchanged(layer, "forward", points) == Counter([packed])
    assert exchanged(layer, "step", points) == Counter([packed, tokens])


@pytest.mark.parametrize("points", [8 * 53, 16 * 8 * 53])
@pytest.mark.parametrize("mode", ["weighted", "concat_project"])
def test_gale_fa_exchanges_two_arrays_forward_and_one_backward(mode, points):
    layer = GALEFA(
        DIM, HEADS, SLICES, context_dim=CONTEXT, state_mixing_mode=mode, rngs=nnx.Rngs(0)
    )
    maximum = ("all-reduce", (*LEAD, SLICES))
    packed = ("all-reduce", (*LEAD, SLICES, WIDTH + 1))
    # Of the latents, and of what makes scores and values of the context, packed.
    context = SLICES * (WIDTH + 1) + SLICES * WIDTH + WIDTH
    latents = ("all-reduce", (*LEAD, SLICES * WIDTH + context))
    assert exchanged(layer, "forward", points) == Counter([maximum, packed])
    assert exchanged(layer, "step", points) == Counter([maximum, packed, latents])


@pytest.mark.parametrize("kind", [GALE, GALEFA])
def test_no_weights_gradient_is_reduced_twice(kind):
    """In a layer no two weights have the shape of the projection into the heads with its bias."""
    layer = kind(DIM, HEADS, SLICES, context_dim=CONTEXT, rngs=nnx.Rngs(0))
    found = shapes_of(collectives(layer_text(layer, "step", 8 * 53)))
    of_weights = Counter({k: n for k, n in found.items() if len(k[1]) == 2 and k[1][0] == HEADS})
    # One packed array for what gathers the points, one for the rest.
    assert sum(of_weights.values()) == 2


@pytest.mark.parametrize("kind", [GALE, GALEFA])
def test_layers_hold_no_scores_of_all_points(kind):
    points = 64_000
    layer = kind(DIM, HEADS, SLICES, context_dim=CONTEXT, rngs=nnx.Rngs(0))
    graph, weights = nnx.split(layer)
    shape = lambda *s: jax.ShapeDtypeStruct(s, np.float32)  # noqa: E731
    x, context = shape(1, points, DIM), shape(1, HEADS, SLICES, CONTEXT)

    def step(weights, x, context, d_y):
        apply = lambda *arrays: nnx.merge(graph, arrays[0])(arrays[1], context=arrays[2])  # noqa: E731
        return jax.vjp(apply, weights, x, context)[1](d_y)

    shapes = array_shapes(text_of(step, weights, x, context, x))
    assert any(SLICES in array for array in shapes)
    assert not [a for a in shapes if SLICES in a and np.prod(a) >= points * SLICES]


LOCAL = dict(include_local_features=True, radii=[0.5], neighbors_in_radius=[3], n_hidden_local=4)


@pytest.mark.parametrize("options", [{}, LOCAL], ids=["clouds", "local"])
def test_model_never_gathers_points_and_exchanges_the_same_for_any_number(options):
    model = GeoTransolver(
        2, 2, 3, 5, n_layers=2, n_hidden=DIM, n_head=HEADS, slice_num=7, **options, rngs=nnx.Rngs(0)
    )
    graph, weights = nnx.split(model)

    def step(weights, inputs, tokens):
        def loss(model):
            return (model(**inputs, global_embedding=tokens) ** 2).mean()

        return nnx.value_and_grad(loss)(nnx.merge(graph, weights))

    found = []
    shape = lambda *s: jax.ShapeDtypeStruct(s, np.float32)  # noqa: E731
    for points, geometry in ((8 * 53, 8 * 59), (4 * 8 * 53, 4 * 8 * 59)):
        inputs = {"local_embedding": shape(1, points, 2), "geometry": shape(1, geometry, 3)}
        if options:
            inputs["local_positions"] = shape(1, points, 3)
        with on_mesh(MESHES["points8"]):
            text = text_of(step, weights, inputs, shape(1, 1, 5))
        # Arguments come whole here; nothing that is made of them does.
        wide = [
            a for a in array_shapes(text) if {points, geometry} & set(a) and np.prod(a) > 6 * points
        ]
        assert wide == []
        ring = "collective-permute"
        assert {each.kind for each in collectives(text)} <= {"all-reduce", ring if options else ""}
        found.append(shapes_of([e for e in collectives(text) if e.kind == "all-reduce"]))
    assert found[0] == found[1]
