"""Were the check of `checked_calls` off, no other test would tell."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import small_flare
from jaxtyping import TypeCheckError

import parallel
from flare_jax import fused
from geotransolver_jax.attention import attend_latents


def test_wrong_rank_is_caught():
    with pytest.raises(TypeCheckError, match="'mask'"):
        parallel.masked_mean(jnp.ones((2, 5, 3)), jnp.ones(5, bool))


def test_sizes_that_differ_are_caught():
    tokens = jnp.ones((1, 2, 4, 8))
    with pytest.raises(TypeCheckError, match="'value'"):
        attend_latents(tokens, tokens, jnp.ones((1, 2, 5, 8)))


def test_wrong_type_of_numbers_is_caught():
    with pytest.raises(TypeCheckError, match="'mask'"):
        parallel.masked_sum(np.ones((2, 5, 3)), np.ones((2, 5)))


def test_method_is_checked_inside_a_compiled_program():
    model = small_flare()
    leave = jax.jit(lambda x: model.leave(x, None))
    assert leave(jnp.ones((1, 5, 16))).shape == (1, 5, 2)
    with pytest.raises(TypeCheckError, match="'x'"):
        leave(jnp.ones((5, 16)))


def test_function_is_checked_where_it_was_imported_to():
    with pytest.raises(TypeCheckError, match="'x'"):
        fused.hide(jnp.ones(3), None)


@pytest.mark.usefixtures("unchecked_calls")
def test_check_can_be_switched_off():
    assert fused.hide(jnp.ones(3), None).shape == (3,)
