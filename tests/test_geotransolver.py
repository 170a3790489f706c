"""GeoTransolver: one source on any mesh, with every source of context, stream, grid and noise."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    COMPILE_FAST,
    assert_trees_close,
    on_mesh,
    placed,
    without_vanishing,
)
from flax import nnx

import parallel
from geotransolver_jax import GeoTransolver, Neighborhoods
from geotransolver_jax.concrete_dropout import ConcreteDropout, dropout_rates, regularization_loss
from parallel.neighbors import Neighbors

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
on_two_meshes = pytest.mark.parametrize(
    "mesh", [dict(points=8), dict(data=2, points=2, heads=2)], ids=str
)
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
def double_model(option: str) -> GeoTransolver:
    return evaluated(small(**OPTIONS[option], param_dtype=np.float64))


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


@partial(jax.jit, static_argnums=0, compiler_options=COMPILE_FAST)
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


# Law 1 -------------------------------------------------------------------------------------------


@cache
def single_device(option: str):
    model = double_model(option)
    return step(model, inputs_of(model, 97, 61))


# The reference cases run on every mesh.
@on_two_meshes
@pytest.mark.parametrize("option", list(OPTIONS)[:5])
def test_clouds_are_the_same_on_every_mesh(option, mesh, float64):
    expected = single_device(option)
    model = double_model(option)
    with on_mesh(mesh):
        actual = sharded_step(placed(model), inputs_of(model, 97, 61))
    assert_trees_close(actual, expected, 1e-12)


NOISY = {
    "concrete": dict(**CONTEXT, concrete_dropout=True, dropout=0.2),
    "concrete_fa": dict(**CONTEXT, concrete_dropout=True, attention_type="GALE_FA"),
    "gumbel": dict(**CONTEXT, **STREAMS, plus=True, dropout=0.2),
}


@pytest.mark.parametrize("mesh", [dict(data=2, points=2, heads=2)], ids=str)
@pytest.mark.parametrize("option", NOISY)
def test_noise_is_the_same_on_every_mesh(option, mesh, float64):
    model = small(**NOISY[option], param_dtype=np.float64)
    inputs = inputs_of(model, 97, 61)
    expected = step(nnx.clone(model), inputs)
    with on_mesh(mesh):
        actual = sharded_step(placed(model), inputs)
    assert_trees_close(actual, expected, 1e-12)
    quiet, *_ = step(evaluated(nnx.clone(model)), inputs)
    difference = jax.tree.map(lambda a, b: np.abs(a - b).max(), quiet, expected[0])
    assert min(jax.tree.leaves(difference)) > 1e-3


def test_every_option_at_once_compiles_on_samples_and_heads_alone(float64):
    model = small(
        **CONTEXT, **LOCAL, **STREAMS, n_hidden_local=4, plus=True, concrete_dropout=True,
        remat="block", param_dtype=np.float64,
    )  # fmt: skip
    inputs = inputs_of(model, 9, 11)
    expected = step(nnx.clone(model), inputs)
    with on_mesh(dict(data=2, heads=4)):
        actual = sharded_step(placed(model), inputs)
    assert_trees_close(actual, expected, 1e-12)


@pytest.mark.parametrize(
    ("option", "mesh"), [("fa", dict(points=8)), ("local", dict(data=2, points=4))], ids=str
)
def test_samples_of_different_length_equal_each_alone(option, mesh, float64):
    model = double_model(option)
    whole = inputs_of(model, 97, 61)
    lengths = {"local_embedding": [97, 31], "local_positions": [97, 31], "geometry": [40, 61]}
    ragged = {
        name: [x[i, :n] for i, n in enumerate(lengths[name])] if name in lengths else x
        for name, x in whole.items()
    }
    with on_mesh(mesh):
        (outputs, context, features), _, d_inputs = sharded_step(placed(model), ragged)
    for i in range(2):
        alone = {name: x[i][None] for name, x in ragged.items()}
        expected, _, d_expected = step(model, alone)
        own = (outputs[i][None], context[i : i + 1], features[i][None])
        assert_trees_close(own, expected, 1e-12)
        own = {name: x[i][None] for name, x in d_inputs.items()}
        assert_trees_close(own, d_expected, 1e-12)


# Grids -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention_type", ["GALE", "GALE_FA"])
@pytest.mark.parametrize("grid", [(9, 7), (5, 4, 3), (3, 2)], ids=str)
def test_grids_of_any_number_of_rows_are_the_same_on_every_mesh(grid, attention_type, float64):
    options = dict(structured_shape=list(grid), n_layers=1, attention_type=attention_type)
    model = evaluated(small(**CONTEXT, **options, param_dtype=np.float64))
    inputs = inputs_of(model, 0, 0, grid=grid)
    expected = step(model, inputs)
    with on_mesh(dict(points=8)):
        actual = sharded_step(placed(model), inputs, grid)
    assert_trees_close(actual, expected, 1e-12)


def test_a_large_grid_is_the_same_on_a_mesh(float64):
    grid = (85, 85)
    model = evaluated(small(geometry_dim=3, structured_shape=grid, n_layers=1, param_dtype=float64))
    inputs = inputs_of(model, 0, 0, batch=1, grid=grid)
    expected = step(model, inputs)
    with on_mesh(dict(points=8)):
        actual = sharded_step(placed(model), inputs, grid)
    assert_trees_close(actual, expected, 1e-12)


def test_flat_and_spatial_grids_agree(float64):
    grid = (9, 7)
    model = evaluated(small(geometry_dim=3, structured_shape=grid, n_layers=1, param_dtype=float64))
    inputs = inputs_of(model, 0, 0, grid=grid)
    flat = {name: x.reshape(2, 63, -1) for name, x in inputs.items()}
    mixed = {**inputs, "geometry": flat["geometry"]}
    expected = model(**inputs)
    assert expected.shape == (2, 9, 7, 2)
    np.testing.assert_array_equal(model(**flat), expected.reshape(2, 63, 2))
    np.testing.assert_array_equal(model(**mixed), expected)


# Local features ----------------------------------------------------------------------------------


def neighbors_by_hand(queries, points, radius: float, count: int) -> Neighbors:
    """What a data pipeline would find with a k-d tree."""
    distances = np.linalg.norm(queries[:, :, None] - points[:, None], axis=-1)
    order = np.argsort(distances, axis=-1, kind="stable")[..., :count]
    nearest = np.take_along_axis(distances, order, -1)
    inside = nearest <= radius
    return Neighbors(
        np.where(inside, order, -1).astype(np.int32), np.where(inside, nearest, np.inf)
    )


@pytest.mark.parametrize("mesh", [None, dict(points=8)], ids=str)
def test_neighbours_may_be_found_before(mesh, float64, monkeypatch):
    model = double_model("local")
    inputs = inputs_of(model, 97, 61)
    positions, geometry = inputs["local_positions"], inputs["geometry"]
    expected = step(model, inputs)
    found = Neighborhoods(
        neighbors_by_hand(positions, geometry, 2.0, 6),
        neighbors_by_hand(geometry, positions, 2.0, 6),
    )
    assert (found.of_points.indices < 0).any()

    def refuse(*_):
        raise AssertionError("nothing is to be searched")

    monkeypatch.setattr("geotransolver_jax.context.ContextBuilder.search", refuse)
    with on_mesh(mesh):
        actual = step(placed(model), inputs, {"neighborhoods": found})
    assert_trees_close(actual, expected, 1e-12)


def test_points_and_geometry_far_apart_have_no_local_features():
    model = evaluated(small(**OPTIONS["local"]))
    inputs = {k: x.astype(np.float32) for k, x in inputs_of(model, 20, 10).items()}
    far = inputs | {"local_positions": inputs["local_positions"] + 100}
    farther = inputs | {"local_positions": inputs["local_positions"] + 1000}
    np.testing.assert_array_equal(model(**far), model(**farther))
    assert np.abs(model(**inputs) - model(**far)).max() > 1e-4


# Dropout rates -----------------------------------------------------------------------------------


def test_rates_of_concrete_dropout_are_read_and_regularized():
    model = untouched(**CONTEXT, concrete_dropout=True, dropout=0.2)
    rates = dropout_rates(model)
    of_block = ("attention.concrete", "attention_dropout", "mlp_dropout")
    blocks = [f"stack.blocks.{i}.{name}" for i in range(2) for name in of_block]
    assert set(rates) == {"context.geometry.concrete", "context.globals.concrete", *blocks}
    assert all(rate == pytest.approx(0.2) for rate in rates.values())
    entropy = 0.2 * np.log(0.2) + 0.8 * np.log(0.8)
    assert regularization_loss(model) == pytest.approx(8 * entropy, rel=1e-5)
    gradient = nnx.grad(regularization_loss)(model)
    slopes = [leaf for leaf in jax.tree.leaves(gradient) if np.abs(leaf).max() > 0]
    # d/dlogit of the negative entropy is rate (1 - rate) logit.
    for slope in slopes:
        np.testing.assert_allclose(slope, 0.2 * 0.8 * np.log(0.25), rtol=1e-4)
    assert sum(np.size(slope) for slope in slopes) == 8


def test_models_without_concrete_dropout_have_no_rates():
    model = small(**CONTEXT)
    assert dropout_rates(model) == {}
    assert regularization_loss(model) == 0


def test_concrete_dropout_starts_at_no_less_than_the_reference_does():
    rates = dropout_rates(untouched(concrete_dropout=True, dropout=0.0))
    assert len(rates) == 6
    assert all(rate == pytest.approx(0.05) for rate in rates.values())


def test_rate_beyond_its_bound_still_gets_a_gradient():
    dropout = ConcreteDropout(0.1)
    dropout.logit[...] = -30.0

    def loss(dropout):
        return jnp.sum(dropout(jnp.ones((4, 4096, 8)), jax.random.key(0)) ** 2)

    gradient = nnx.grad(loss)(dropout)["logit"][...]
    assert np.isfinite(gradient)
    assert np.abs(gradient) > 0


# Weights -----------------------------------------------------------------------------------------


def test_initial_weights_are_distributed_as_in_the_reference():
    model = GeoTransolver(
        5, 1, 3, 2, n_hidden=128, n_head=4, slice_num=16, n_layers=1, rngs=nnx.Rngs(0)
    )
    attention = model.stack.blocks.attention
    slices = np.asarray(attention.project_slice.kernel[...])[0]
    np.testing.assert_allclose(slices.T @ slices, np.eye(16), atol=1e-5)
    for layer, inputs in (
        (attention.project_point, 128),
        (attention.cross.key, 64),
        (model.context.geometry.project_point, 3),
        (model.context.geometry.project_slice, 32),
        (model.preprocess[0].linear_in, 5),
        (model.project_out[0], 128),
    ):
        bound = inputs**-0.5
        for weight in (layer.kernel[...], layer.bias[...]):
            assert np.abs(weight).max() <= bound
        assert np.std(layer.kernel[...]) == pytest.approx(bound / np.sqrt(3), rel=0.1)
    np.testing.assert_array_equal(attention.temperature[...], 0.5)
    np.testing.assert_array_equal(attention.cross.mixing[...], 0)


def test_width_of_heads_need_not_divide_that_of_the_points():
    # 16 + 2 x 5 channels in 4 heads of 6: as in the reference, the heads are narrower together.
    model = evaluated(small(**OPTIONS["local"]))
    attention = model.stack.blocks.attention
    assert attention.project_point.kernel.shape[1:] == (26, 24)
    assert attention.project_out.kernel.shape[1:] == (24, 26)
