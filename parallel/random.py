"""Random numbers for points that do not depend on the mesh.

JAX's partitionable counter-based generator gives entry `i` of an array the same bits however the
array is split. Padding moves the entries of a `(B, N, C)` array, though, so the numbers are drawn
in the order `(N, B, C)`: those of the real points then come first, and padding only appends.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


def points_uniform(
    key: Key[Array, ""], shape: tuple[int, ...], dtype: jax.typing.DTypeLike = jnp.float32
) -> Float[Array, "B N *C"]:
    """Uniform numbers in [0, 1) of shape `(B, N, ...)`, the same on every mesh and padding of N."""
    batch, points, *rest = shape
    return jax.random.uniform(key, (points, batch, *rest), dtype).swapaxes(0, 1)


def points_dropout(
    x: Float[Array, "B N C"], rate: float, key: Key[Array, ""] | None
) -> Float[Array, "B N C"]:
    """Inverted dropout: each entry is zero with probability `rate`, else divided by `1 - rate`.

    Without a key (in evaluation) `x` is returned as it is.
    """
    if key is None or rate == 0:
        return x
    keep = points_uniform(key, x.shape) >= rate
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
