"""Dropout whose rate is learned (concrete dropout: Gal, Hron and Kendall, arXiv 1705.07832)."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from parallel.parameters import parameter
from parallel.precision import accumulation_dtype
from parallel.random import points_dropout, points_uniform

_TEMPERATURE = 0.1
_EPSILON = 1e-7
_LEAST_INITIAL_RATE, _LARGEST_INITIAL_RATE = 0.05, 0.99
_LOGIT_BOUND = 10.0


class ConcreteDropout(nnx.Module):
    """Dropout by a smooth mask, through which the rate gets a gradient.

    The rate is learned only if `regularization_loss` is added to the loss.
    """

    def __init__(self, rate: float, *, param_dtype: jax.typing.DTypeLike = jnp.float32) -> None:
        """Makes the rate.

        Args:
            rate: initial rate; at least 0.05 is taken, as in the reference.
            param_dtype: type of the logit of the rate.
        """
        rate = min(max(rate, _LEAST_INITIAL_RATE), _LARGEST_INITIAL_RATE)
        self.logit = parameter(jnp.log(jnp.asarray(rate / (1 - rate), param_dtype)))

    def __call__(
        self, x: Float[Array, "B N *C"], key: Key[Array, ""] | None = None
    ) -> Float[Array, "B N *C"]:
        """Drops entries; the same ones on every mesh.

        Args:
            x: points, or anything that is replicated over the points.
            key: randomness; without it (in evaluation) `x` is returned as it is.
        """
        if key is None:
            return x
        dtype = accumulation_dtype(x.dtype)
        logit = _bounded(self.logit[...].astype(dtype))
        uniform = jnp.clip(points_uniform(key, x.shape, dtype), _EPSILON, 1 - _EPSILON)
        dropped = jax.nn.sigmoid(
            (jnp.log(uniform) - jnp.log1p(-uniform) + logit) / jnp.asarray(_TEMPERATURE, dtype)
        )
        kept = x.astype(dtype) * (1 - dropped) / (1 - jax.nn.sigmoid(logit) + _EPSILON)
        return kept.astype(x.dtype)


def output_dropout(
    concrete: ConcreteDropout | None,
    rate: float,
    y: Float[Array, "B N C"],
    key: Key[Array, ""] | None,
) -> Float[Array, "B N C"]:
    """Dropout of a layer's output: of a learned rate where it has one, else of `rate`."""
    return points_dropout(y, rate, key) if concrete is None else concrete(y, key)


def _bounded(logit: Array) -> Array:
    """The logit within bounds where its rate can still change; its gradient passes."""
    bounded = jnp.clip(logit, -_LOGIT_BOUND, _LOGIT_BOUND)
    return logit + jax.lax.stop_gradient(bounded - logit)


def regularization_loss(model: nnx.Module) -> Float[Array, ""]:
    """Sum over all concrete dropouts of the negative entropy of their rate; zero without any.

    What the reference's `collect_concrete_dropout_losses` returns: times a weight, it is added to
    the training loss.
    """
    total = jnp.zeros(())
    for _, dropout in _concrete_dropouts(model):
        rate = jax.nn.sigmoid(dropout.logit[...].astype(jnp.float32))
        entropy = rate * jnp.log(rate + _EPSILON) + (1 - rate) * jnp.log(1 - rate + _EPSILON)
        total += entropy.sum()
    return total


def dropout_rates(model: nnx.Module) -> dict[str, float]:
    """The learned rates by the path of their layer; those of stacked blocks are numbered."""
    rates = {}
    for path, dropout in _concrete_dropouts(model):
        rate = jax.nn.sigmoid(dropout.logit[...])
        if not rate.ndim:
            rates[path] = float(rate)
            continue
        for layer, value in enumerate(rate):
            rates[path.replace("blocks", f"blocks.{layer}", 1)] = float(value)
    return rates


def _concrete_dropouts(model: nnx.Module) -> Iterator[tuple[str, ConcreteDropout]]:
    for path, node in nnx.iter_graph(model):
        if isinstance(node, ConcreteDropout):
            yield ".".join(map(str, path)), node
