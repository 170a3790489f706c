"""Masked reductions: exact on every mesh, blind to padding, in float32, one small exchange."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import collectives, shapes_of, text_of
from conftest import MESHES, assert_trees_close, on_any_mesh, on_mesh

import parallel

POINTS = 24
# The last shards of sample 1 are all padding.
MASK = np.arange(POINTS) < np.array([[19], [5]])


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape)


def numpy_reductions(x, mask):
    """Sum, mean and variance over the real rows of each sample, one after another."""
    rows = [sample[real] for sample, real in zip(x, mask, strict=True)]
    return tuple(np.stack([reduce(row) for row in rows]) for reduce in (_sum, _mean, _variance))


def _sum(row):
    return row.sum(0)


def _mean(row):
    return row.mean(0)


def _variance(row):
    return row.var(0)


def reductions(x, mask):
    mean, variance = parallel.masked_mean_and_variance(x, mask)
    return parallel.masked_sum(x, mask), mean, variance


def value_and_gradient(x, mask, cotangents):
    """The three reductions, and the gradient of their weighted sum."""

    def weighted(x):
        values = reductions(x, mask)
        return sum((c * value).sum() for c, value in zip(cotangents, values, strict=True)), values

    (_, values), gradient = jax.jit(jax.value_and_grad(weighted, has_aux=True))(x)
    return values, gradient


# Sums, means, variances --------------------------------------------------------------------------


@on_any_mesh
@pytest.mark.parametrize("channels", [(), (2, 3)], ids=["scalar", "heads"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "all_points"])
def test_equals_numpy_on_the_real_rows(mesh, channels, masked, float64):
    x, cotangents = draw(2, POINTS, *channels), draw(3, 2, *channels)
    mask = MASK if masked else np.ones_like(MASK)
    expected = numpy_reductions(x, mask)
    counts = mask.sum(1).reshape(2, *[1] * (x.ndim - 1))
    deviation = x - expected[1][:, None]
    d_sum, d_mean, d_variance = (cotangent[:, None] for cotangent in cotangents)
    gradient = (d_sum + d_mean / counts + 2 * deviation * d_variance / counts) * (
        mask.reshape(2, POINTS, *[1] * len(channels))
    )
    with on_mesh(mesh):
        actual = value_and_gradient(x, mask if masked else None, cotangents)
        np.testing.assert_allclose(parallel.masked_mean(x, mask), expected[1], rtol=1e-12)
    assert_trees_close(actual, (expected, gradient), 1e-12)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("mesh", [None, MESHES["points8"]], ids=["single", "points8"])
def test_padding_is_invisible(mesh, garbage):
    x, cotangents = draw(2, POINTS, 3).astype(np.float32), draw(3, 2, 3).astype(np.float32)
    x = np.where(MASK[..., None], x, np.float32(0))
    with on_mesh(mesh):
        expected = value_and_gradient(x, MASK, cotangents)
        filled = np.where(MASK[..., None], x, np.float32(garbage))
        actual = value_and_gradient(filled, MASK, cotangents)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    np.testing.assert_array_equal(np.asarray(actual[1])[~MASK], 0)


def test_variance_keeps_its_digits_far_from_zero():
    # The spacing of float32 at 1e6 is 0.06, so the input itself is known to 2 % of its spread; the
    # difference of mean squares would be off by whole orders.
    x = (1e6 + draw(1, 4096, 1)).astype(np.float32)
    for axes in (None, MESHES["points8"]):
        with on_mesh(axes):
            mean, variance = parallel.masked_mean_and_variance(x, np.ones((1, 4096), bool))
        np.testing.assert_allclose(mean, x.astype(np.float64).mean(1), rtol=1e-6)
        np.testing.assert_allclose(variance, x.astype(np.float64).var(1), rtol=1e-2)


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "all_points"])
def test_bfloat16_is_added_in_float32(masked):
    # A bfloat16 sum of ones stops growing at 256.
    ones = jnp.ones((1, 4096, 1), jnp.bfloat16)
    mask = np.ones((1, 4096), bool) if masked else None
    for value, expected in [
        (parallel.masked_sum(ones, mask), 4096),
        (parallel.masked_mean(ones, mask), 1),
        (parallel.masked_mean_and_variance(ones, mask)[1], 0),
    ]:
        assert value.dtype == jnp.float32
        assert value.item() == expected


def test_sample_without_a_point_has_mean_zero():
    mask = np.array([[True, False], [False, False]])
    mean, variance = parallel.masked_mean_and_variance(np.ones((2, 2, 1), np.float32), mask)
    np.testing.assert_array_equal(mean, [[1], [0]])
    np.testing.assert_array_equal(variance, 0)


@pytest.mark.usefixtures("unchecked_calls")
def test_mask_of_another_shape_is_named():
    with pytest.raises(ValueError, match=r"expected a mask of shape \(2, 4\), got \(2, 3\)"):
        parallel.masked_sum(np.ones((2, 4, 1), np.float32), np.ones((2, 3), bool))


@pytest.mark.parametrize(
    "reduce",
    [parallel.masked_sum, parallel.masked_mean, parallel.masked_mean_and_variance],
    ids=lambda function: function.__name__,
)
def test_reductions_exchange_sums_only(reduce):
    with on_mesh(MESHES["points8"]):
        x, mask = parallel.shard_points(draw(2, 96, 3).astype(np.float32))
        found = collectives(text_of(reduce, x, mask))
    assert found
    assert {each.kind for each in found} == {"all-reduce"}
    assert {shape for each in found for shape in each.shapes} <= {(2, 3), (2,)}


# Slices ------------------------------------------------------------------------------------------


def slice_inputs(dtype=np.float64):
    weights, values = draw(2, POINTS, 4, 5).astype(dtype), draw(2, POINTS, 4, 3).astype(dtype)
    cotangents = draw(2, 4, 5, 3).astype(dtype), draw(2, 4, 5).astype(dtype)
    return weights, values, cotangents


def numpy_slice_sums(weights, values, mask, cotangents):
    """The sums by their definition, and the gradients of their weighted sum."""
    mask, (d_sums, d_counts) = mask[..., None, None], cotangents
    sums = np.einsum("bnhs,bnhd->bhsd", weights * mask, values), (weights * mask).sum(1)
    d_weights = np.einsum("bhsd,bnhd->bnhs", d_sums, values * mask) + d_counts[:, None] * mask
    return sums, (d_weights, np.einsum("bhsd,bnhs->bnhd", d_sums, weights * mask))


def slices_and_gradients(function, weights, values, cotangents):
    def weighted(weights, values):
        sums, counts = function(weights, values)
        return (sums * cotangents[0]).sum() + (counts * cotangents[1]).sum(), (sums, counts)

    step = jax.jit(jax.value_and_grad(weighted, argnums=(0, 1), has_aux=True))
    (_, sums), gradients = step(weights, values)
    return sums, gradients


@on_any_mesh
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "all_points"])
def test_slice_sums_equal_einsum(mesh, masked, float64):
    weights, values, cotangents = slice_inputs()
    mask = MASK if masked else np.ones_like(MASK)
    expected = numpy_slice_sums(weights, values, mask, cotangents)
    with on_mesh(mesh):
        actual = slices_and_gradients(
            lambda w, v: parallel.slice_sums(w, v, mask if masked else None),
            weights,
            values,
            cotangents,
        )
    assert_trees_close(actual, expected, 1e-12)


@pytest.mark.parametrize("garbage", [np.nan, 1e30])
def test_slice_sums_do_not_see_padding(garbage):
    weights, values, cotangents = slice_inputs(np.float32)
    real = MASK[..., None, None]
    with on_mesh(MESHES["points8"]):
        expected, actual = (
            slices_and_gradients(
                lambda w, v: parallel.slice_sums(w, v, MASK),
                np.where(real, weights, np.float32(fill)),
                np.where(real, values, np.float32(fill)),
                cotangents,
            )
            for fill in (0, garbage)
        )
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_slice_sums_of_bfloat16_are_float32():
    ones = jnp.ones((1, 4096, 1, 1), jnp.bfloat16)
    sums, counts = parallel.slice_sums(ones, ones)
    assert sums.dtype == counts.dtype == jnp.float32
    assert sums.item() == counts.item() == 4096


def test_slice_sums_exchange_one_packed_sum_forward_and_nothing_backward():
    weights, values, cotangents = slice_inputs(np.float32)
    with on_mesh(MESHES["points8"]):
        (weights, mask), (values, _) = (
            parallel.shard_points(x.reshape(2, POINTS, 4, -1)) for x in (weights, values)
        )

        def gradients(weights, values):
            function = lambda w, v: parallel.slice_sums(w, v, mask)  # noqa: E731
            return jax.vjp(function, weights, values)[1](cotangents)

        forward = collectives(text_of(parallel.slice_sums, weights, values, mask))
        backward = collectives(text_of(gradients, weights, values))
    assert shapes_of(forward) == Counter({("all-reduce", (2, 4, 5, 4)): 1})
    assert backward == []
