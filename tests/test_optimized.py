"""Programs optimized, as users compile them, give the numbers of those that the tests compile."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilation import OPTIMIZED
from conftest import (
    MESHES,
    assert_trees_close,
    cloud_inputs,
    on_mesh,
    placed,
    small_flare,
    small_transolver,
    without_vanishing,
)
from flax import nnx
from geotransolver_steps import CONTEXT, inputs_of, small

MODELS = {
    "flare": small_flare,
    "transolver": small_transolver,
    "geotransolver": partial(small, **CONTEXT, attention_type="GALE_FA"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_optimization_changes_no_output_and_no_gradient(kind):
    model = MODELS[kind]()
    model.eval()
    inputs = inputs_of(model, 96, 64) if kind == "geotransolver" else cloud_inputs(96)
    inputs = {name: np.float32(value) for name, value in inputs.items()}
    with on_mesh(MESHES["data2_points2_heads2"]):
        graph, params, rest = nnx.split(placed(model), nnx.Param, ...)

        def loss(params, inputs):
            output = nnx.merge(graph, params, rest)(**inputs)
            return jnp.sum((output + 1) ** 2) / 2, output

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        lowered = step.lower(params, inputs)
        programs = lowered.compile(), lowered.compile(OPTIMIZED)
        results = [program(params, inputs) for program in programs]
    ((_, fast), fast_gradients), ((_, optimized), gradients) = results
    assert_trees_close(optimized, fast, 1e-5)
    assert_trees_close(gradients[1], fast_gradients[1], 5e-5)
    d_params = [nnx.to_pure_dict(each[0]) for each in (gradients, fast_gradients)]
    assert_trees_close(*(without_vanishing(each, 1e-3) for each in d_params), 5e-5)
