"""Floating-point operations of the matrix products and convolutions of a function."""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import jax
from jaxtyping import PyTree


def matrix_flops(function: Callable, *arguments: PyTree) -> int:
    """Operations of one call on all devices together, two for each multiplication.

    Counted in the traced function, whatever a compiler makes of it: a loop of known length counts
    as often as it runs, one of unknown length once, and of a choice the longest way.

    Args:
        function: what is counted.
        arguments: its arguments, or their shapes.
    """
    return _of(jax.make_jaxpr(function)(*arguments).jaxpr)


def _of(jaxpr: Any) -> int:
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: Any) -> int:
    name, parameters = equation.primitive.name, equation.params
    if name == "dot_general":
        (summed, _), _ = parameters["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2 * equation.outvars[0].aval.size * prod(shape[axis] for axis in summed)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval
        outputs = kernel.shape[parameters["dimension_numbers"].rhs_spec[0]]
        return 2 * equation.outvars[0].aval.size * kernel.size // outputs
    inside = [_of(jaxpr) for jaxpr in _jaxprs(parameters)]
    if name == "scan":
        return parameters["length"] * sum(inside)
    if name == "cond":
        return max(inside)
    if name == "shard_map":
        mesh, manual = parameters["mesh"], parameters["newly_manual_axes"]
        return sum(inside) * prod(mesh.shape[axis] for axis in manual)
    return sum(inside)


def _jaxprs(parameters: dict) -> Iterator:
    for value in parameters.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns"):
                yield item
            elif hasattr(item, "jaxpr"):
                yield item.jaxpr
