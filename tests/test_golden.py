"""The models give the numbers of PhysicsNeMo 2.2.2: outputs, losses and every gradient."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    GOLDEN,
    assert_trees_close,
    load_golden,
    on_any_mesh,
    on_mesh,
    placed,
)
from flax import nnx

import parallel
from experiments.physicsnemo.weights import load_state_dict
from flare_jax import FLARE
from geotransolver_jax import Transolver

MODELS = {"FLARE": FLARE, "Transolver": Transolver}
CASES = sorted(
    path.stem
    for path in GOLDEN.glob("*_*.npz")
    if path.stem.partition("_")[0] in ("flare", "transolver")
)
# float32 against float32; see the note beside the reference cases.
OUTPUT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 5e-5


def build(case: dict, weights: dict) -> FLARE:
    kwargs = {key: value for key, value in case["meta"]["kwargs"].items() if key != "use_te"}
    model = MODELS[case["meta"]["model"]](**kwargs, rngs=nnx.Rngs(0))
    load_state_dict(model, weights)
    model.eval()
    return model


@cache
def reference(name: str):
    """A case, its model, and its gradients as those of our weights; made once for all meshes."""
    case = load_golden(name)
    model = build(case, case["param"])
    gradients = nnx.clone(model)
    load_state_dict(gradients, case["grad"])
    return case, model, nnx.to_pure_dict(nnx.state(gradients, nnx.Param))


@on_any_mesh
@pytest.mark.parametrize("name", CASES)
def test_reference_case(name, mesh):
    case, model, expected = reference(name)
    shape = case["meta"]["kwargs"].get("structured_shape")
    # A batch of one is repeated where the mesh wants two samples: means do not change.
    copies = 2 if mesh and case["in"]["fx"].shape[0] % mesh.get("data", 1) else 1
    with on_mesh(mesh):
        model = placed(model)
        inputs, mask = {}, None
        for key, value in case["in"].items():
            inputs[key] = np.concatenate([value] * copies)
            if key != "time":
                inputs[key], point_mask = parallel.shard_points(inputs[key], shape)
                mask = point_mask if key == "fx" else mask
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, inputs):
            output = nnx.merge(graph, params, rest)(**inputs, point_mask=mask)
            return jnp.sum(output**2) / (2 * copies * case["out"]["0"].size), output

        step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        step = jax.jit(step)
        (value, output), (d_params, d_inputs) = step(params, inputs)

        fx = case["in"]["fx"]
        points = fx.shape[1] if shape is None else None
        output = parallel.unshard_points(output, points, shape)
        for key in d_inputs:
            gradient = np.asarray(d_inputs[key])
            if key != "time":
                gradient = parallel.unshard_points(
                    d_inputs[key], points if shape is None else None, shape
                )
            d_inputs[key] = gradient.reshape(copies, *case["in"][key].shape).sum(0)

    assert_trees_close(output, np.concatenate([case["out"]["0"]] * copies), OUTPUT_TOLERANCE)
    assert_trees_close(value, case["loss"], OUTPUT_TOLERANCE)
    assert_trees_close(nnx.to_pure_dict(d_params), expected, GRADIENT_TOLERANCE)
    assert_trees_close(d_inputs, case["grad_in"], GRADIENT_TOLERANCE)
