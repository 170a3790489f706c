"""Small GeoTransolvers, their inputs and their gradients, on one device and on a mesh."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from conftest import without_vanishing
from flax import nnx

import parallel
from geotransolver_jax import GeoTransolver

CONTEXT = dict(geometry_dim=3, global_dim=2)
LOCAL = dict(include_local_features=True, radii=[0.8, 2.0], neighbors_in_radius=[3, 6])
STREAMS = dict(functional_dim=(2, 3), out_dim=(2, 1))  # of different length
OPTIONS = {
    "plain": {},
    "geometry_plus": dict(geometry_dim=3, plus=True),
    "global_concat": dict(global_dim=2, state_mixing_mode="concat_project"),
    "fa_concat_streams": dict(
        **CONTEXT, **STREAMS, attention_type="GALE_FA", state_mixing_mode="concat_project"
    ),
    "local_streams": dict(**CONTEXT, **LOCAL, **STREAMS, n_hidden_local=4),
    "fa": dict(**CONTEXT, attention_type="GALE_FA"),
    "local": dict(**CONTEXT, **LOCAL, n_hidden_local=5),
}
CLOUDS = ("local_embedding", "local_positions", "geometry")


def untouched(**options) -> GeoTransolver:
    """A small model with its initial weights."""
    sizes = dict(functional_dim=2, out_dim=2, n_layers=2, n_hidden=16, n_head=4, slice_num=8)
    return GeoTransolver(**sizes | options, rngs=nnx.Rngs(0, dropout=1))


def small(**options) -> GeoTransolver:
    """A model of width 16, with weights far from zero."""
    model = untouched(**options)
    generator = np.random.default_rng(0)

    def perturb(value):
        return value + (0.2 * generator.standard_normal(value.shape)).astype(value.dtype)

    nnx.update(model, jax.tree.map(perturb, nnx.state(model, nnx.Param)))
    return model


@cache
def double_model(option: str, **options) -> GeoTransolver:
    return evaluated(small(**OPTIONS[option], **options, param_dtype=np.float64))


def evaluated(model: GeoTransolver) -> GeoTransolver:
    model.eval()
    return model


def inputs_of(model: GeoTransolver, points: int, geometry: int, batch: int = 2, grid=None) -> dict:
    """Arguments by name; the second of two streams is longer."""
    generator = np.random.default_rng(points)
    shape = (points,) if grid is None else grid

    def draw(*shape):
        return generator.standard_normal((batch, *shape))

    embeddings, positions = [], []
    for i, width in enumerate(model.functional_dims):
        length = shape if i == 0 else (points + 16,)
        embeddings.append(draw(*length, width))
        positions.append(draw(*length, 3))
    single = len(embeddings) == 1
    inputs = {"local_embedding": embeddings[0] if single else tuple(embeddings)}
    if model.include_local_features:
        inputs["local_positions"] = positions[0] if single else tuple(positions)
    if model.geometry_dim is not None:
        inputs["geometry"] = draw(*((geometry,) if grid is None else grid), model.geometry_dim)
    if model.global_dim is not None:
        inputs["global_embedding"] = draw(3, model.global_dim)
    return inputs


@partial(jax.jit, static_argnums=0)
def _step(graph, state, inputs, others):
    def loss(model, inputs):
        outputs, context, features = model(
            **inputs, **others, return_embedding_states=True, return_point_features=True
        )
        # The gradient at padding rows is not zero: it is the model that must not let it through.
        total = sum(jnp.sum((leaf + 1) ** 2) for leaf in jax.tree.leaves((outputs, features)))
        return total / 2, (outputs, context, features)

    differentiate = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, results), (d_model, d_inputs) = differentiate(nnx.merge(graph, state), inputs)
    return results, nnx.to_pure_dict(d_model), d_inputs


@partial(jax.jit, static_argnums=0)
def _forward(graph, state, inputs):
    model = nnx.merge(graph, state)
    return model(**inputs, return_embedding_states=True, return_point_features=True)


def forward(model: GeoTransolver, inputs: dict):
    """Outputs, context and point features."""
    return _forward(*nnx.split(model), inputs)


def step(model: GeoTransolver, inputs: dict, others: dict | None = None):
    """Outputs, context and point features, and the gradients of weights and of `inputs`."""
    results, d_params, d_inputs = _step(*nnx.split(model), inputs, others or {})
    return results, without_vanishing(d_params, 1e-6), d_inputs


def is_cloud(x) -> bool:
    return not isinstance(x, tuple)


def shard(inputs: dict, grid=None) -> tuple[dict, dict]:
    """The inputs on the mesh of the context, and their masks."""
    arrays, masks = dict(inputs), {}
    for name in inputs.keys() & set(CLOUDS):
        pairs = jax.tree.map(
            lambda x: parallel.shard_points(x, grid), inputs[name], is_leaf=is_cloud
        )
        single = is_cloud(inputs[name])
        arrays[name] = pairs[0] if single else tuple(x for x, _ in pairs)
        masks[name] = pairs[1] if single else tuple(mask for _, mask in pairs)
    return arrays, {"point_mask": masks["local_embedding"], "geometry_mask": masks.get("geometry")}


def sharded_step(model: GeoTransolver, inputs: dict, grid=None):
    """Like `step` on the mesh of the context, its results without padding on the host."""
    arrays, masks = shard(inputs, grid)
    (outputs, context, features), d_params, d_inputs = step(model, arrays, masks)

    def bring_back(x, like, flat=False):
        shape = grid if grid is None or not flat else None
        lengths = [len(sample) for sample in like] if isinstance(like, list) else None
        if shape is not None:
            return parallel.unshard_points(x, structured_shape=shape)
        count = int(np.prod(grid)) if grid is not None else (lengths or like.shape[1])
        return parallel.unshard_points(x, count)

    clouds = inputs["local_embedding"]
    outputs = jax.tree.map(bring_back, outputs, clouds, is_leaf=is_cloud)
    features = jax.tree.map(partial(bring_back, flat=True), features, clouds, is_leaf=is_cloud)
    for name in d_inputs.keys() & set(CLOUDS):
        d_inputs[name] = jax.tree.map(bring_back, d_inputs[name], inputs[name], is_leaf=is_cloud)
    return (outputs, context, features), d_params, d_inputs
