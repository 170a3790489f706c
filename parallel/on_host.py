"""Points that stay on the host while the devices work on others, and predictions on their way out.

Each process fetches what its own devices hold; whole arrays come together on hosts alone.
"""

from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Float

from parallel import mesh as mesh_lib
from parallel.annotations import Index, Position
from parallel.mesh import POINTS


class OnHost:
    """What the devices of this process hold of an array, fetched to the host."""

    def __init__(self, array: jax.Array) -> None:
        """Waits for the array; copies of one part are fetched once."""
        self._shape, self._sharding = array.shape, array.sharding
        self._parts: dict[tuple, np.ndarray] = {}
        for shard in array.addressable_shards:
            key = _slices(shard.index)
            if key not in self._parts:
                self._parts[key] = np.asarray(shard.data)

    def on_devices(self) -> jax.Array:
        """The array again, laid out as it was."""
        parts = self._parts
        return jax.make_array_from_callback(
            self._shape, self._sharding, lambda index: parts[_slices(index)]
        )


def _slices(index: Index) -> tuple:
    """The place of a shard as something that a dictionary takes; slices it does not."""
    return tuple((part.start, part.stop) for part in index)


def points_to_host(
    y: Float[jax.Array, "B N C"], points_at_once: int = 2**14
) -> Float[np.ndarray, "B N C"]:
    """An array of points, whole, on every host, while no device holds them all.

    Args:
        y: laid out over `points`, over which N divides.
        points_at_once: points of each shard that are exchanged at a time, where hosts have to.
    """
    if y.is_fully_addressable:
        return np.asarray(y)
    shards = mesh_lib.axis_size(POINTS)
    out = np.empty((y.shape[0], shards, y.shape[1] // shards, y.shape[2]), y.dtype)
    size = min(points_at_once, out.shape[2])
    for start in range(0, out.shape[2], size):
        # The last ones end with the shard.
        rows = slice(min(start, out.shape[2] - size), min(start + size, out.shape[2]))
        out[:, :, rows] = np.asarray(_of_each_shard(y, rows.start, size, shards))
    return out.reshape(y.shape)


@partial(jax.jit, static_argnums=(2, 3))
def _of_each_shard(y: Array, start: Position, size: int, shards: int) -> Array:
    """Some points of each shard, on every device."""
    y = mesh_lib.constrain(y.reshape(y.shape[0], shards, -1, y.shape[2]), None, POINTS, None, None)
    some = jax.lax.dynamic_slice_in_dim(y, start, size, axis=2)
    return mesh_lib.constrain(some, None, None, None, None)
