"""Products, softmaxes over latents and normalizations of a chunk equal their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_trees_close

from flare_jax.norm import LayerNorm, standardize
from parallel import softmax
from parallel.contraction import contract, product, sum_of_products

SIZES = dict(b=2, n=5, h=3, s=4, d=6, c=7, i=8, o=9)
EQUATIONS = [
    "bnc,hcd->bhdn",
    "bhdn,hsd->bhsn",
    "bhsn,bhdn->hsd",
    "bhsn,bhsd->bhdn",
    "bhdn,hdc->bnc",
    "hse,he->hs",
    "c,cd->d",
]


def draw(*shape: int, seed: int = 0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def operands(equation: str):
    sizes = SIZES | {"e": 5}
    left, right = equation.split("->")[0].split(",")
    return draw(*(sizes[i] for i in left)), draw(*(sizes[i] for i in right), seed=1)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_product_is_the_einsum_whatever_order_it_multiplies_in(equation, float64):
    left, right = operands(equation)
    expected = np.einsum(equation, left, right)
    assert_trees_close(product(equation, left, right), expected, 1e-13)
    a, b, y = *equation.split("->")[0].split(","), equation.split("->")[1]
    assert_trees_close(product(f"{b},{a}->{y}", right, left), expected, 1e-13)


@pytest.mark.parametrize("equation", ["bnc,hcd->bhdn", "bhdn,hsd->bhsn", "bhsn,bhsd->bhdn"])
def test_gradients_of_a_contraction_are_those_of_the_einsum(equation, float64):
    def loss(multiply):
        return lambda left, right: jnp.sum(jnp.sin(multiply(equation, left, right)))

    left, right = map(jnp.asarray, operands(equation))
    actual = jax.grad(loss(contract), argnums=(0, 1))(left, right)
    assert_trees_close(actual, jax.grad(loss(jnp.einsum), argnums=(0, 1))(left, right), 1e-13)


def test_contraction_takes_any_leading_axes(float64):
    x, kernel = draw(2, 3, 4, 5), draw(5, 6)
    assert_trees_close(contract("...i,io->...o", x, kernel), x @ kernel, 1e-13)
    gradient = jax.grad(lambda k: contract("...i,io->...o", x, k).sum())(kernel)
    assert_trees_close(gradient, np.einsum("abci,abco->io", x, np.ones((2, 3, 4, 6))), 1e-13)


@pytest.mark.parametrize("multiply", [product, contract])
def test_narrow_operands_are_summed_in_float32(multiply):
    # In bfloat16 a sum of ones stops at 256.
    ones = jnp.ones((1, 4096), jnp.bfloat16)
    total = multiply("an,nb->ab", ones, ones.T)
    assert total.dtype == jnp.float32
    assert total.item() == 4096


@pytest.mark.parametrize("axis", [-1, -2])
def test_sum_of_products_keeps_its_axis(axis, float64):
    x, y = draw(2, 3, 4, 5), draw(2, 3, 4, 5, seed=1)
    assert_trees_close(sum_of_products(x, y, axis), (x * y).sum(axis, keepdims=True), 1e-13)


def test_sum_of_products_of_one_axis(float64):
    x = draw(7)
    assert_trees_close(sum_of_products(x, x, -1), (x * x).sum(keepdims=True), 1e-13)
    expected = jax.grad(lambda x: standardize(x[None])[0, 0])(x)
    assert_trees_close(jax.grad(lambda x: standardize(x)[0])(x), expected, 1e-13)


@pytest.mark.parametrize("latents", [1, 4])
def test_gradient_of_scores_in_bfloat16_sums_to_nothing(latents):
    scores = jnp.asarray(3 * draw(2, 3, latents, 5), jnp.float32)
    values = jnp.asarray(draw(2, 3, latents, 6) + 3, jnp.float32)

    def loss(scores):
        return jnp.sum(jnp.sin(softmax.mix(jnp.bfloat16, scores, values)))

    gradient = jax.grad(loss)(scores)
    # By a common part from the output it would be as large as the rounding of the weights, 1e-2.
    np.testing.assert_allclose(gradient.sum(2), 0, atol=1e-5)


@pytest.mark.parametrize("shift", [0, 1e4, -1e4])
def test_mix_is_a_softmax_over_the_latents(shift, float64):
    scores, values = jnp.asarray(draw(2, 3, 4, 5) + shift), jnp.asarray(draw(2, 3, 4, 6))

    def by_definition(scores, values):
        return jnp.einsum("bhsn,bhsd->bhdn", jax.nn.softmax(scores, axis=2), values)

    def by_shares(scores, values):
        return jnp.einsum("bhsn,bhsd->bhdn", softmax.shares(scores), values)

    def mixed(scores, values):
        return softmax.mix(np.float64, scores, values)

    def gradients(function):
        loss = lambda *arrays: jnp.sum(jnp.sin(function(*arrays)))  # noqa: E731
        return function(scores, values), jax.grad(loss, argnums=(0, 1))(scores, values)

    expected = gradients(by_definition)
    assert_trees_close(gradients(mixed), expected, 1e-12)
    assert_trees_close(gradients(by_shares), expected, 1e-12)


def test_scores_far_apart_have_finite_gradients():
    scores = jnp.array([-1e4, 0, 1e4], jnp.float32).reshape(1, 1, 3, 1)
    values = jnp.ones((1, 1, 3, 2))
    gradient = jax.grad(lambda s: jnp.sum(softmax.mix(jnp.float32, s, values) ** 2))(scores)
    assert np.isfinite(gradient).all()


def test_standardized_points_have_mean_zero_and_deviation_one(float64):
    x = jnp.asarray(3 + 2 * draw(2, 5, 64))
    y = standardize(x)
    np.testing.assert_allclose(y.mean(-1), 0, atol=1e-12)
    np.testing.assert_allclose(y.std(-1), 1, rtol=1e-5)

    def by_definition(x):
        deviation = x - x.mean(-1, keepdims=True)
        return deviation / jnp.sqrt(jnp.mean(deviation**2, -1, keepdims=True) + 1e-5)

    def gradient(function):
        return jax.grad(lambda x: jnp.sum(jnp.sin(function(x))))(x)

    assert_trees_close(y, by_definition(x), 1e-13)
    assert_trees_close(gradient(standardize), gradient(by_definition), 1e-12)


def test_normalization_in_bfloat16_takes_its_statistics_in_float32():
    norm = LayerNorm(512, dtype=jnp.bfloat16)
    x = jnp.asarray(1 + 0.1 * draw(1, 3, 512), jnp.bfloat16)
    y = norm(x)
    assert y.dtype == jnp.bfloat16
    wide = np.asarray(x, np.float32)
    expected = (wide - wide.mean(-1, keepdims=True)) / wide.std(-1, keepdims=True)
    np.testing.assert_allclose(np.asarray(y, np.float32), expected, atol=0.03)
