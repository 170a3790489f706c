"""Linear maps of points into, within and out of attention heads, on a chunk of points.

Weights come with a leading axis of heads, as `parallel.streaming` wants them, and are multiplied in
the type of the points; sums are in float32 or wider. Inside the heads the points are the last axis,
as they are of scores: products of the two then need no other layout.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from flare_jax.linear import Linear
from flare_jax.norm import LayerNorm, standardize
from parallel.contraction import contract


class HeadLinear(NamedTuple):
    """Weights of a linear map of each head.

    Attributes:
        kernel: `(H, I, O)`.
        bias: `(H, O)`, or `(1, O)` for an output that the heads sum to.
    """

    kernel: Float[Array, "H I O"]
    bias: Float[Array, "#H O"]


class HeadScores(NamedTuple):
    """Weights of scores of each head; laid out as their gradient comes out of a product.

    Attributes:
        kernel: `(H, S, D)`.
        bias: `(H, S)`.
    """

    kernel: Float[Array, "H S D"]
    bias: Float[Array, "H S"]

    @classmethod
    def of(cls, linear: HeadLinear) -> "HeadScores":
        """Those of a linear map `(H, D, S)`."""
        return cls(linear.kernel.swapaxes(1, 2), linear.bias)

    def __call__(self, heads: Float[Array, "B H D n"]) -> Float[Array, "B H S n"]:
        """Scores of a chunk of points, in float32 or wider."""
        scores = contract("bhdn,hsd->bhsn", heads, self.kernel)
        return scores + self.bias.astype(scores.dtype)[..., None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentWeights:
    """Weights by which points and latents see each other.

    Attributes:
        point: `(H, C, D)`, from the input to the heads.
        scores: from the heads to their scores, see `flare_jax.mixer.score_weights`.
        normalized: whether points are standardized in front.
    """

    point: HeadLinear
    scores: HeadScores
    normalized: bool = field(default=False, metadata={"static": True})


def head_width(dim: int, heads: int) -> int:
    """Width of a head.

    Raises:
        ValueError: `heads` does not divide `dim`.
    """
    if heads < 1 or dim % heads:
        raise ValueError(f"heads: expected a divisor of dim={dim}; got {heads}")
    return dim // heads


def into(linear: Linear, heads: int, norm: LayerNorm | None = None) -> HeadLinear:
    """A layer whose outputs are those of the heads one after another.

    Args:
        linear: the layer.
        heads: number of heads.
        norm: normalization in front, whose scale and shift the result has in it.
    """
    kernel, bias = linear.weights(norm)
    assert bias is not None, "layers into heads have a bias"
    split = kernel.reshape(kernel.shape[0], heads, -1).swapaxes(0, 1)
    return HeadLinear(split, bias.reshape(heads, -1))


def out_of(linear: Linear, heads: int) -> HeadLinear:
    """A layer whose inputs are those of the heads one after another."""
    kernel = linear.kernel[...]
    return HeadLinear(kernel.reshape(heads, -1, kernel.shape[-1]), linear.bias[...][None])


def within(linear: Linear, heads: int) -> HeadLinear:
    """A layer that every head applies."""
    kernel, bias = linear.kernel[...], linear.bias[...]
    return HeadLinear(
        jnp.broadcast_to(kernel, (heads, *kernel.shape)),
        jnp.broadcast_to(bias, (heads, *bias.shape)),
    )


def visible(
    x: Float[Array, "B n C"], mask: Bool[Array, "B n"] | None, normalized: bool
) -> Float[Array, "B n C"]:
    """Points as a layer sees them: zeros where they are padding, and standardized if it says so."""
    x = hide(x, mask)
    return standardize(x) if normalized else x


def map_into(weights: HeadLinear, x: Float[Array, "B n C"]) -> Float[Array, "B H D n"]:
    """Heads of the points."""
    return _biased(contract("bnc,hcd->bhdn", x, weights.kernel), weights.bias, x.dtype)


def map_within(weights: HeadLinear, x: Float[Array, "B H D n"]) -> Float[Array, "B H E n"]:
    """A linear map of each head."""
    return _biased(contract("bhdn,hde->bhen", x, weights.kernel), weights.bias, x.dtype)


def map_out(
    weights: HeadLinear, x: Float[Array, "B H D n"], mask: Bool[Array, "B n"] | None
) -> Float[Array, "B n C"]:
    """The output that the heads sum to; zero where points are padding."""
    y = contract("bhdn,hdc->bnc", x, weights.kernel)
    return hide((y + weights.bias[0].astype(y.dtype)).astype(x.dtype), mask)


def hide(x: Float[Array, "B n C"], mask: Bool[Array, "B n"] | None) -> Float[Array, "B n C"]:
    """Points with zeros where they are padding, whatever these hold."""
    return x if mask is None else jnp.where(mask[..., None], x, 0)


def _biased(product: jax.Array, bias: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    return (product + bias.astype(product.dtype)[..., None]).astype(dtype)
