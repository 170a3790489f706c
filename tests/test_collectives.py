"""What compiled programs exchange and hold: laws 2, 3 and 5 of the design.

Programs are compiled for shapes and read, never run.
"""

from collections import Counter
from math import prod

import jax
import jax.numpy as jnp
import pytest
from compiled import array_shapes, collectives, compile_for, shapes_of, text_of, total_size
from conftest import MESHES, on_mesh, placed, small_flare
from flax import nnx

import parallel
from flare_jax import FLAREAttention
from parallel import mesh as mesh_lib
from parallel.mesh import AXES, HEADS

BATCH = 2
# A prime number of points on each shard: no other size of a program divides by it.
POINTS, MANY_POINTS = 8 * 53, 16 * 8 * 53


def shape_of(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    """An array of points that is not there, on the mesh of the context."""
    axes = ("data", "points", *[None] * (len(shape) - 2))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh_lib.sharding(*axes))


def has_dimension(shapes, size: int) -> list[tuple[int, ...]]:
    return sorted(shape for shape in shapes if size in shape)


# One layer ---------------------------------------------------------------------------------------

# Two heads, so that no flattened (B, N / shards, H) has the length N by chance.
WIDTH, LAYER_HEADS, LATENTS = 16, 2, 7
HEAD_WIDTH = WIDTH // LAYER_HEADS
MAXIMUM = ("all-reduce", (BATCH, LAYER_HEADS, LATENTS))
PACKED_SUM = ("all-reduce", (BATCH, LAYER_HEADS, LATENTS, HEAD_WIDTH + 1))
LATENT_GRADIENT = ("all-reduce", (BATCH, LAYER_HEADS, LATENTS * HEAD_WIDTH))
# Of a head: the projection into it, and what makes its scores.
SHARED = HEAD_WIDTH * (WIDTH + 1) + LATENTS * (HEAD_WIDTH + 1)
# The loss, the weights of the output, and those that encode and decode share, once.
WEIGHT_GRADIENTS = Counter(
    [
        ("all-reduce", ()),
        ("all-reduce", (1, WIDTH)),
        ("all-reduce", (LAYER_HEADS, SHARED)),
        ("all-reduce", (LAYER_HEADS, HEAD_WIDTH * WIDTH)),
    ]
)


@pytest.fixture(scope="module")
def layer():
    return nnx.split(FLAREAttention(WIDTH, LAYER_HEADS, LATENTS, rngs=nnx.Rngs(0)))


def layer_forward(layer):
    graph, _ = layer
    return lambda weights, x, mask: nnx.merge(graph, weights)(x, mask)


def layer_step(layer):
    def loss(weights, x, mask):
        return jnp.sum(layer_forward(layer)(weights, x, mask) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1))


def layer_collectives(program, layer, points: int):
    with on_mesh(MESHES["points8"]):
        _, weights = nnx.split(placed(nnx.merge(*layer)))
        x, mask = shape_of(BATCH, points, WIDTH), shape_of(BATCH, points, dtype=bool)
        return collectives(text_of(program(layer), weights, x, mask))


@pytest.mark.parametrize("points", [POINTS, MANY_POINTS])
def test_layer_exchanges_a_maximum_and_one_packed_sum_forward(layer, points):
    found = shapes_of(layer_collectives(layer_forward, layer, points))
    assert found == Counter({MAXIMUM: 1, PACKED_SUM: 1})


@pytest.mark.parametrize("points", [POINTS, MANY_POINTS])
def test_layer_exchanges_one_sum_backward_beside_weight_gradients(layer, points):
    found = shapes_of(layer_collectives(layer_step, layer, points))
    assert found - WEIGHT_GRADIENTS == Counter({MAXIMUM: 1, PACKED_SUM: 1, LATENT_GRADIENT: 1})


# A model -----------------------------------------------------------------------------------------

models_on = pytest.mark.parametrize(
    "mesh",
    [MESHES["points8"], MESHES["data2_points4"], MESHES["data2_points2_heads2"]],
    ids=["points8", "data2_points4", "data2_points2_heads2"],
)


@pytest.fixture(scope="module")
def model():
    return small_flare(n_head=LAYER_HEADS, slice_num=LATENTS)


def model_programs(model):
    """Its forward pass and its training step, as functions of (state, fx, embedding, mask)."""
    graph, _ = nnx.split(model)

    def forward(state, fx, embedding, mask):
        return nnx.merge(graph, state)(fx, embedding, point_mask=mask)

    def step(state, fx, embedding, mask):
        def loss(model):
            error = parallel.masked_mean(model(fx, embedding, point_mask=mask) ** 2, mask)
            return error.mean()

        return nnx.value_and_grad(loss)(nnx.merge(graph, state))

    return {"forward": forward, "step": step}


def model_text(model, program: str, points: int, batch: int = BATCH) -> str:
    """On the mesh of the context."""
    _, state = nnx.split(placed(model))
    fx, embedding = shape_of(batch, points, 2), shape_of(batch, points, 3)
    mask = shape_of(batch, points, dtype=bool)
    return text_of(model_programs(model)[program], state, fx, embedding, mask)


@pytest.mark.parametrize(("remat", "times"), [("none", 1), ("attention", 1), ("block", 2)])
def test_nothing_is_reduced_twice_in_a_layer_unless_whole_blocks_are_computed_again(remat, times):
    model = small_flare(n_head=LAYER_HEADS, slice_num=LATENTS, remat=remat)
    *_, width = model.stack.blocks.attention.latent_queries.shape
    with on_mesh(MESHES["points8"]):
        found = shapes_of(collectives(model_text(model, "step", POINTS)))
    lead = (BATCH, LAYER_HEADS)
    assert found["all-reduce", (*lead, LATENTS)] == times
    assert found["all-reduce", (*lead, LATENTS, width + 1)] == times
    assert found["all-reduce", (*lead, LATENTS * width)] == 1


@models_on
@pytest.mark.parametrize("program", ["forward", "step"])
def test_model_never_gathers_points_and_exchanges_the_same_for_any_number(mesh, program, model):
    exchanged = []
    with on_mesh(mesh):
        device_mesh = jax.sharding.get_mesh()
        for points in (POINTS, MANY_POINTS):
            text = model_text(model, program, points)
            assert has_dimension(array_shapes(text), points) == []
            found = collectives(text)
            assert {each.kind for each in found} == {"all-reduce"}
            # Tensor parallelism sums activations over the heads, and these do grow.
            over_heads = [
                each for each in found if each.stays_within((AXES.index(HEADS),), device_mesh)
            ]
            assert bool(over_heads) == ("heads" in mesh)
            exchanged.append([each for each in found if each not in over_heads])
    few, many = exchanged
    assert shapes_of(few) == shapes_of(many)
    assert total_size(few) == total_size(many) > 0


def test_model_exchanges_forward_what_its_layer_does(model):
    with on_mesh(MESHES["points8"]):
        found = collectives(model_text(model, "forward", POINTS))
    # The scanned block stands in the program once.
    assert shapes_of(found) == Counter({MAXIMUM: 1, PACKED_SUM: 1})


def test_unified_positions_are_made_where_their_points_are():
    height, width, ref = 64, 48, 8
    model = small_flare(
        embedding_dim=None, unified_pos=True, ref=ref, structured_shape=(height, width)
    )
    with on_mesh(MESHES["points8"]):
        graph, state = nnx.split(placed(model))
        text = text_of(
            lambda state, fx: nnx.merge(graph, state)(fx), state, shape_of(1, height * width, 2)
        )
    shapes = array_shapes(text)
    assert max(map(prod, shapes)) < height * width * ref * ref
    assert has_dimension(shapes, height * width) == []
    assert any(prod(shape) == height * width * ref * ref // 8 for shape in shapes)


# Memory ------------------------------------------------------------------------------------------


def holding_scores(program, points: int, heads: int, latents: int) -> list[tuple[int, ...]]:
    """Arrays with an entry for each point, head and latent; the number of latents is a prime."""
    scores = points * heads * latents
    shapes = array_shapes(program.as_text())
    return [shape for shape in shapes if prod(shape) >= scores and prod(shape) % latents == 0]


@pytest.fixture(scope="module")
def wide_model():
    return small_flare(n_hidden=64, n_head=4, slice_num=127)


def training_step(model, points: int) -> jax.stages.Compiled:
    _, state = nnx.split(placed(model))
    arguments = shape_of(1, points, 2), shape_of(1, points, 3), shape_of(1, points, dtype=bool)
    return compile_for(model_programs(model)["step"], state, *arguments)


def test_memory_of_a_training_step_is_linear_in_the_points_and_holds_no_scores(wide_model):
    temporary = {}
    for points in (4096, 16384, 65536):
        program = training_step(wide_model, points)
        temporary[points] = program.memory_analysis().temp_size_in_bytes
        assert holding_scores(program, points, 4, 127) == []
    # At most linear: what does not grow, the weights and one chunk of scores, makes it less.
    assert temporary[16384] <= 4 * temporary[4096]
    assert temporary[65536] <= 4 * temporary[16384]


def test_memory_of_a_device_shrinks_with_the_number_of_devices(wide_model):
    points = 2**18
    alone = training_step(wide_model, points).memory_analysis().temp_size_in_bytes
    with on_mesh(MESHES["points8"]):
        program = training_step(wide_model, points)
    # Weights, and what is made of one chunk, are on every device.
    assert program.memory_analysis().temp_size_in_bytes < alone / 6
    assert holding_scores(program, points // 8, 4, 127) == []


def test_layer_of_65536_points_holds_less_than_half_a_score_array():
    points, heads, latents = 65536, 8, 61
    layer = nnx.split(FLAREAttention(128, heads, latents, rngs=nnx.Rngs(0)))

    def forward_and_backward(weights, x, d_y):
        y, pull = jax.vjp(lambda weights, x: layer_forward(layer)(weights, x, None), weights, x)
        return y, pull(d_y)

    x = shape_of(1, points, 128)
    program = compile_for(forward_and_backward, layer[1], x, x)
    assert program.memory_analysis().temp_size_in_bytes < points * heads * latents * 4 / 2
    assert holding_scores(program, points, heads, latents) == []


@pytest.mark.parametrize("causal", [False, True], ids=["key_mask", "key_mask_and_causal"])
def test_layers_of_self_attention_hold_no_scores(causal):
    points = 4096

    def loss(x, mask):
        def layer(x, _):
            y = parallel.attention(
                x, x, x, queries_sharded=True, keys_sharded=True, key_mask=mask, causal=causal
            )
            return x + y, None

        return jnp.sum(jax.lax.scan(layer, x, length=2)[0])

    for axes in (None, MESHES["points8"]):
        with on_mesh(axes):
            x, mask = shape_of(1, points, 2, 4), shape_of(1, points, dtype=bool)
            shapes = array_shapes(text_of(jax.grad(loss), x, mask))
        shards = (axes or {}).get("points", 1)
        assert max(map(prod, shapes)) < points * points // shards
