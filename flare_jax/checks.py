"""Checks of the arguments that models are made with; each error is one line."""

from numbers import Integral

import jax
import jax.numpy as jnp

from parallel import mesh as mesh_lib
from parallel.mesh import HEADS


def check_heads(n_hidden: int, n_head: int) -> None:
    """Refuses heads that do not divide the width, or do not divide over the mesh."""
    if n_head < 1 or n_hidden % n_head:
        raise ValueError(
            f"n_head: expected a divisor of n_hidden={n_hidden}; got {n_head} "
            f"(remainder {n_hidden % n_head if n_head else 'undefined'})"
        )
    check_heads_divide(n_head)


def check_heads_divide(n_head: int) -> None:
    """Refuses heads that do not divide over the mesh axis `heads` of the context."""
    groups = mesh_lib.axis_size(HEADS)
    if n_head % groups:
        raise ValueError(
            f"n_head: expected a multiple of the mesh axis 'heads' of {groups}; got {n_head}"
        )


def check_positive(**sizes: int) -> None:
    """Refuses what is no integer or below one, by the names that sizes are given here."""
    for name, size in sizes.items():
        if not isinstance(size, Integral) or isinstance(size, bool):
            raise ValueError(f"{name}: expected an integer of at least 1; got {size!r}")
        if size < 1:
            raise ValueError(f"{name}: expected at least 1; got {size}")


def check_dropout(rate: float) -> None:
    """Refuses a dropout rate outside of [0, 1)."""
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: expected a rate in [0, 1); got {rate}")


def check_types(**types: jax.typing.DTypeLike) -> None:
    """Refuses what is not a real floating type, by the names that they are given here."""
    for name, dtype in types.items():
        try:
            valid = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
        except TypeError:
            valid = False
        if not valid:
            raise ValueError(f"{name}: expected a floating type; got {dtype!r}")
