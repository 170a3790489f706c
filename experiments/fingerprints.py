"""Numbers that tell whether arrays are still those that were saved, whatever mesh they lie on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@jax.jit
def _fingerprints(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([_fingerprint(leaf) for leaf in leaves])


def _fingerprint(leaf: jax.Array) -> jax.Array:
    """The sum modulo 2**32 of the words of an array, each times an odd number of its place.

    Sums of integers do not depend on their order, so that shards may add up in any. A word that
    differs changes the sum, since odd numbers divide nothing modulo 2**32.
    """
    if leaf.dtype == bool:
        leaf = leaf.astype(jnp.uint8)
    size = leaf.dtype.itemsize
    words = jax.lax.bitcast_convert_type(leaf, _WORDS[min(size, 4)]).astype(jnp.uint32)
    total = jnp.zeros((), jnp.uint32)
    places = jnp.zeros(words.shape, jnp.uint32)
    for axis, length in enumerate(words.shape):
        places = places * jnp.uint32(length % 2**32) + jax.lax.broadcasted_iota(
            jnp.uint32, words.shape, axis
        )
    return total + (words * (2 * places + 1)).sum(dtype=jnp.uint32)


def fingerprints(tree: dict[str, Any]) -> dict[str, int]:
    """One number of each array of a flat dictionary."""
    if not tree:
        return {}
    numbers = np.asarray(_fingerprints(list(tree.values())))
    return {path: int(number) for path, number in zip(tree, numbers, strict=True)}
