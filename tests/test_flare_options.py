"""FLARE's options, the programs that it compiles to, and its weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    MESHES,
    assert_trees_close,
    cloud_inputs,
    forward,
    on_mesh,
    padded_inputs,
    placed,
    small_flare,
    value_and_gradients,
)
from flax import nnx
from jax.sharding import PartitionSpec

import flare_jax.transformer
from flare_jax import FLARE

# Options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("remat", ["attention", "block"])
def test_rematerialization_changes_nothing(remat, single_device):
    output, gradients = value_and_gradients(small_flare(remat=remat), cloud_inputs(97))
    assert_trees_close(output, single_device[0], 1e-6)
    assert_trees_close(gradients, single_device[1], 1e-6)


@pytest.mark.parametrize("chunk_size", [1, 13])
def test_chunk_size_changes_nothing(chunk_size, float64):
    model = small_flare(chunk_size=chunk_size, param_dtype=float64)
    actual = value_and_gradients(model, cloud_inputs(97, 2, float64))
    expected = value_and_gradients(small_flare(param_dtype=float64), cloud_inputs(97, 2, float64))
    assert_trees_close(actual, expected, 1e-12)


def test_scale_multiplies_the_scores(model):
    scaled = small_flare(scale=0.5)
    # Halved keys score as half the scale does.
    halved = nnx.clone(model)
    for parameter in (
        halved.stack.blocks.attention.project_key.kernel,
        halved.stack.blocks.attention.project_key.bias,
    ):
        parameter[...] = parameter[...] / 2
    inputs = cloud_inputs(97)
    assert_trees_close(forward(scaled, inputs), forward(halved, inputs), 1e-6)
    assert np.abs(forward(scaled, inputs) - forward(model, inputs)).max() > 1e-3


# A rounding to bfloat16 is off by up to 0.4 %, and a few of them follow on each other.
BFLOAT16 = 3e-2


def dtypes(tree) -> set[str]:
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree)}


def test_bfloat16_computes_close_to_float32(single_device):
    narrow = small_flare(dtype=jnp.bfloat16)
    assert dtypes(nnx.state(narrow, nnx.Param)) == {"float32"}
    inputs, mask = padded_inputs([97, 97], 104, 0.0)

    def loss(model):
        output = model(**inputs, point_mask=mask)
        return ((output.astype(jnp.float32) + 1) ** 2).sum() / 2, output

    with on_mesh(MESHES["points8"]):
        (_, output), gradient = nnx.value_and_grad(loss, has_aux=True)(placed(narrow))
    assert output.dtype == jnp.bfloat16
    assert dtypes(gradient) == {"float32"}
    assert_trees_close(np.asarray(output, np.float32)[:, :97], single_device[0], BFLOAT16)
    assert_trees_close(nnx.to_pure_dict(gradient), single_device[1][0], BFLOAT16)


# Programs ----------------------------------------------------------------------------------------


def test_program_does_not_grow_with_depth():
    def size(depth):
        graph, state = nnx.split(small_flare(n_layers=depth))
        program = jax.jit(
            lambda state, inputs: jax.grad(
                lambda state: nnx.merge(graph, state)(**inputs).sum(), allow_int=True
            )(state)
        )
        return len(program.lower(state, cloud_inputs(8)).as_text())

    assert size(8) <= 1.2 * size(2)


def test_second_eager_call_compiles_nothing(model):
    compiled = flare_jax.transformer._apply._cache_size
    with on_mesh(MESHES["points8"]):
        on_the_mesh, inputs = placed(model), cloud_inputs(96)
        on_the_mesh(**inputs)
        before = compiled()
        on_the_mesh(**inputs)
        on_the_mesh.eval()
        evaluated = compiled()
        on_the_mesh(**inputs)
        on_the_mesh.train()
        on_the_mesh(**inputs)
        on_the_mesh(**inputs)
    assert before == evaluated
    assert compiled() <= before + 1  # that of evaluation


def test_works_inside_compiled_programs(model, single_device):
    inputs = cloud_inputs(97)

    def loss(model):
        return ((model(**inputs) + 1) ** 2).sum() / 2

    with on_mesh(MESHES["data2_points2_heads2"]):
        on_the_mesh = placed(model)
        graph, state = nnx.split(on_the_mesh)
        by_jax = jax.jit(lambda state: nnx.merge(graph, state)(**inputs))(state)
        by_nnx = nnx.jit(lambda model: model(**inputs))(on_the_mesh)
        gradient = nnx.grad(loss)(on_the_mesh)
    for output in (by_jax, by_nnx):
        assert_trees_close(output, single_device[0], 1e-5)
    assert_trees_close(nnx.to_pure_dict(gradient), single_device[1][0], 5e-5)


# Weights -----------------------------------------------------------------------------------------


def test_weights_are_split_over_heads_and_nowhere_else(model):
    expected = {
        "stack/blocks/attention/latent_queries": (None, "heads", None, None),
        "stack/blocks/attention/project_in/kernel": (None, None, "heads"),
        "stack/blocks/attention/project_in/bias": (None, "heads"),
        "stack/blocks/attention/project_out/kernel": (None, "heads", None),
        "stack/blocks/mlp/linear_in/kernel": (None, None, "heads"),
        "stack/blocks/mlp/linear_in/bias": (None, "heads"),
        "stack/blocks/mlp/linear_out/kernel": (None, "heads", None),
        "preprocess/linear_in/kernel": (None, "heads"),
        "preprocess/linear_in/bias": ("heads",),
        "preprocess/linear_out/kernel": ("heads", None),
    }
    for mesh, devices in ((MESHES["points8"], 1), (MESHES["points4_heads2"], 2)):
        with on_mesh(mesh):
            params = nnx.state(placed(model), nnx.Param)
        for path, variable in nnx.to_flat_state(params):
            value, name = variable[...], "/".join(path)
            spec = expected.get(name, (None,) * value.ndim)
            held = [
                size // devices if axis == "heads" else size
                for size, axis in zip(value.shape, spec, strict=True)
            ]
            assert value.sharding.shard_shape(value.shape) == tuple(held), name
            wanted = jax.sharding.NamedSharding(value.sharding.mesh, PartitionSpec(*spec))
            assert value.sharding.is_equivalent_to(wanted, value.ndim), name


def test_initial_weights_have_the_distributions_of_the_reference():
    model = FLARE(
        functional_dim=2, out_dim=1, embedding_dim=3, n_layers=2, n_hidden=128, rngs=nnx.Rngs(0)
    )
    block = model.stack.blocks
    for linear in (model.preprocess.linear_out, block.attention.project_in, block.mlp.linear_in):
        kernel = np.asarray(linear.kernel[...])
        np.testing.assert_allclose(kernel.std(), 0.02, rtol=0.05)
        np.testing.assert_allclose(kernel.mean(), 0, atol=0.02 * 5 / np.sqrt(kernel.size))
        np.testing.assert_array_equal(linear.bias[...], 0)
    queries = np.asarray(block.attention.latent_queries[...])
    assert queries.shape == (2, 8, 32, 16)
    np.testing.assert_allclose(queries.std(), 1, rtol=0.05)
    for norm in (block.norm_attention, block.norm_mlp, model.norm_out):
        np.testing.assert_array_equal(norm.scale[...], 1)
        np.testing.assert_array_equal(norm.bias[...], 0)
    # Layers and kernels are drawn apart.
    kernel = np.asarray(block.attention.project_in.kernel[...])
    assert abs(np.corrcoef(kernel[0].ravel(), kernel[1].ravel())[0, 1]) < 0.05
