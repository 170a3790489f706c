"""Embeddings that need no data: of grid positions and of time."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from flare_jax.linear import LayerOptions, Linear

_LONGEST_PERIOD = 10_000


def unified_position(
    shape: tuple[int, ...], ref: int, rows: int | None = None
) -> Float[Array, "N {ref}*{ref}"]:
    """Distances of each point of a 2-D grid on the unit square to a coarse reference grid.

    The unified position of Transolver (arXiv 2402.02366, appendix). It is computed from indices,
    so that under `jax.jit` each device makes the rows of its own points and nothing is stored.

    Args:
        shape: grid points along both axes; the points lie on `linspace(0, 1)`.
        ref: points of the reference grid along each axis.
        rows: rows to make if not `shape[0]`: more of them where a grid is padded.

    Returns:
        Distances, points and reference points in row-major order.
    """
    rows = shape[0] if rows is None else rows
    point = jnp.arange(rows * shape[1])
    row, column = point // shape[1], point % shape[1]
    # A grid of one row lies at 0.
    x = row / max(shape[0] - 1, 1)
    y = column / max(shape[1] - 1, 1)
    reference = jnp.linspace(0, 1, ref)
    square = (x[:, None, None] - reference[:, None]) ** 2 + (y[:, None, None] - reference) ** 2
    return jnp.sqrt(square).reshape(rows * shape[1], ref * ref)


def time_frequencies(width: int) -> np.ndarray:
    """Angular frequencies of the sinusoidal time embedding, from 1 down to 1 / 10,000."""
    half = width // 2
    return (1 / _LONGEST_PERIOD) ** (np.arange(half, dtype=np.float32) / half)


class TimeEmbedding(nnx.Module):
    """Sinusoids of time (Vaswani et al., arXiv 1706.03762, section 3.5), then a perceptron."""

    def __init__(
        self,
        width: int,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ):
        """Makes the weights.

        Args:
            width: width of the embedding.
            rngs: random streams; `params` is used.
            dtype: type to compute in.
            param_dtype: type of the weights.

        Raises:
            ValueError: the width is odd.
        """
        if width % 2:
            raise ValueError(f"time_input: expected an even n_hidden, got {width}")
        types: LayerOptions = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.linear_in = Linear(width, width, **types)
        self.linear_out = Linear(width, width, **types)
        self.width = width

    def __call__(self, time: Float[Array, " B"]) -> Float[Array, "B C"]:
        """Embeds the time of each sample, in whatever unit it was trained with."""
        # Angles in float32 at least: a bfloat16 angle above 256 is off by more than a radian.
        angles = time[:, None] * time_frequencies(self.width).astype(time.dtype)
        waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
        return self.linear_out(jax.nn.silu(self.linear_in(waves)))
