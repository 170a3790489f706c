"""Convolution on row-sharded grids equals that on one device, and exchanges only a halo."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import collectives, text_of
from conftest import assert_trees_close, on_mesh, on_meshes

from parallel.convolution import grid_convolution

CASES = {
    "2d": ((16, 7), (3, 3)),
    "3d": ((8, 4, 3), (3, 3, 3)),
    "halo_of_several_shards": ((8, 3), (7, 3)),
    "halo_beyond_the_grid": ((8, 3), (19, 1)),
}


def value_and_gradients(grid, kernel_size):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((2, *grid, 3))
    kernel = generator.standard_normal((*kernel_size, 3, 4))
    factor = generator.standard_normal((2, *grid, 4))

    def loss(x, kernel):
        y = grid_convolution(x, kernel)
        return (y * factor).sum(), y

    step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    return jax.jit(step)(x, kernel)


@on_meshes
@pytest.mark.parametrize("case", CASES)
def test_rows_of_a_shard_see_those_of_their_neighbours(case, mesh, float64):
    expected = value_and_gradients(*CASES[case])
    with on_mesh(mesh):
        actual = value_and_gradients(*CASES[case])
    assert_trees_close(actual, expected, 1e-12)


def test_it_is_the_cross_correlation_with_zeros_beyond_the_border(float64):
    generator = np.random.default_rng(0)
    x, kernel = generator.standard_normal((1, 5, 4, 2)), generator.standard_normal((3, 3, 2, 1))
    padded = np.pad(x[0], ((1, 1), (1, 1), (0, 0)))
    expected = [
        [(padded[i : i + 3, j : j + 3, :, None] * kernel).sum() for j in range(4)] for i in range(5)
    ]
    actual = grid_convolution(x, kernel)[0, :, :, 0]
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.parametrize("rows", [16, 256])
def test_only_a_halo_travels_whatever_the_number_of_rows(rows):
    def step(x, kernel, factor):
        return jax.grad(lambda x, kernel: (grid_convolution(x, kernel) * factor).sum(), (0, 1))(
            x, kernel
        )

    shape = lambda *s: jax.ShapeDtypeStruct(s, np.float32)  # noqa: E731
    with on_mesh(dict(points=8)):
        text = text_of(step, shape(1, rows, 7, 3), shape(3, 3, 3, 3), shape(1, rows, 7, 3))
    found = [(c.kind, c.shapes) for c in collectives(text)]
    one_row, kernel = ((1, 1, 7, 3),), ((3, 3, 3, 3),)
    # The gradient needs a halo of the input again and sends one of its own back.
    assert found.count(("collective-permute", one_row)) <= 4
    assert set(found) == {("collective-permute", one_row), ("all-reduce", kernel)}


@pytest.mark.parametrize("size", [(2, 3), (3,), (3, 3, 3)])
def test_a_kernel_that_does_not_fit_is_named(size):
    with pytest.raises(ValueError, match=r"expected an odd kernel of 2 axes .* got \("):
        grid_convolution(jnp.ones((1, 4, 4, 2)), jnp.ones((*size, 2, 2)))
