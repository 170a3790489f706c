"""Activation functions by the names that PhysicsNeMo gives them, with its constants."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from parallel.parameters import parameter


def gelu(x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
    """`x` times the normal distribution function, exactly.

    By `erf`, as the reference does; `jax.nn.gelu` takes `erfc`, which costs twice as much.
    """
    return 0.5 * x * (1 + jax.lax.erf(x * np.sqrt(0.5).astype(x.dtype)))


_FUNCTIONS = {
    "relu": jax.nn.relu,
    "leaky_relu": lambda x: jax.nn.leaky_relu(x, 0.1),
    "relu6": jax.nn.relu6,
    "elu": jax.nn.elu,
    "celu": jax.nn.celu,
    "selu": jax.nn.selu,
    "silu": jax.nn.silu,
    "gelu": gelu,
    "sin": jnp.sin,
    "sigmoid": jax.nn.sigmoid,
    "logsigmoid": jax.nn.log_sigmoid,
    "softplus": jax.nn.softplus,
    "softshrink": lambda x: jnp.sign(x) * jax.nn.relu(jnp.abs(x) - 0.5),
    "softsign": jax.nn.soft_sign,
    "tanh": jnp.tanh,
    "tanhshrink": lambda x: x - jnp.tanh(x),
    "threshold": lambda x: jnp.where(x > 1, x, 1),
    "hardtanh": jax.nn.hard_tanh,
    "identity": lambda x: x,
    "squareplus": lambda x: 0.5 * (x + jnp.sqrt(x * x + 4)),
    "cappek_leaky_relu": lambda x: jnp.minimum(jax.nn.leaky_relu(x, 0.01), 1),
    "capped_gelu": lambda x: jnp.minimum(gelu(x), 1),
}
# Activations with one learned number, and its initial value.
_LEARNED = {
    # He et al., arXiv 1502.01852.
    "prelu": (0.25, lambda x, slope: jnp.where(x >= 0, x, slope * x)),
    # Self-scalable tanh, arXiv 2204.12589; one number for all features.
    "stan": (1.0, lambda x, beta: jnp.tanh(x) * (1 + beta * x)),
}


class Activation(nnx.Module):
    """A pointwise nonlinearity; `prelu` and `stan` hold one learned number."""

    def __init__(self, name: str, *, param_dtype: jax.typing.DTypeLike = jnp.float32):
        """Looks the function up.

        Args:
            name: name of the function, in any case.
            param_dtype: type of the learned number.

        Raises:
            ValueError: there is no such activation.
        """
        self.name = str(name).lower()
        if self.name in _LEARNED:
            initial = jnp.full((1,), _LEARNED[self.name][0], param_dtype)
            self.parameter = parameter(initial, None)
        elif self.name not in _FUNCTIONS:
            raise ValueError(
                f"act: expected one of {', '.join(sorted([*_FUNCTIONS, *_LEARNED]))}; got {name!r}"
            )

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        """Applies the function to every entry."""
        return activate(self.name, x, self.learned)

    @property
    def learned(self) -> Float[Array, " 1"] | None:
        """The learned number, if there is one."""
        return self.parameter[...] if self.name in _LEARNED else None


def activate(
    name: str, x: Float[Array, "*B C"], learned: Float[Array, " 1"] | None
) -> Float[Array, "*B C"]:
    """Applies the activation of a name, in lower case, with its learned number if it has one."""
    if name not in _LEARNED:
        return _FUNCTIONS[name](x)
    # Added in float32: the gradient of the one number is a sum over all points.
    wide = x.astype(jnp.result_type(x, learned))
    return _LEARNED[name][1](wide, learned).astype(x.dtype)
