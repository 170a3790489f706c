"""The type in which sums are taken."""

import jax
import jax.numpy as jnp


def accumulation_dtype(*dtypes: jax.typing.DTypeLike) -> jnp.dtype:
    """The type in which to reduce: float32, or wider where an operand is wider."""
    return jnp.result_type(jnp.float32, *dtypes)
