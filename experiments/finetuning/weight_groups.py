"""Which weights train, and how fast, by patterns of their names.

A weight is named by where it lies in the model: `project_out.kernel`. The blocks of a model lie
in one array for all, and are named by their number: `blocks.3.attention.project_in.kernel`; a group
may hold some of them and not the others.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

Path = tuple[Any, ...]
_STACK = ("stack", "blocks")


def names_of(path: Path, shape: Sequence[int]) -> list[str]:
    """Names of a weight, or of a layer: one, or one of each block.

    Args:
        path: where it lies in the model.
        shape: its shape; that of a stack begins with the number of blocks.
    """
    if path[:2] == _STACK:
        rest = ".".join(map(str, path[2:]))
        return [f"blocks.{block}.{rest}" for block in range(shape[0])]
    return [".".join(map(str, path))]


class Names:
    """The names that patterns are held against."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)

    def matched(self, option: str, patterns: Iterable[str]) -> set[str]:
        """The names that one of the patterns matches, as file names in a shell.

        Raises:
            ValueError: a pattern matches none.
        """
        found = set()
        for pattern in patterns:
            matches = {name for name in self._names if fnmatchcase(name, pattern)}
            if not matches:
                raise ValueError(
                    f"{option}: expected a pattern that matches a name, as in "
                    f"{', '.join(self._names[:1] + self._names[-1:])}; got {pattern!r}"
                )
            found |= matches
        return found


class Rates:
    """Factors on the learning rate; what has the factor 0 does not train.

    Without any factor, all weights train at the optimizer's own rate.
    """

    def __init__(self, factors: Mapping[Path, np.ndarray] | None = None) -> None:
        """Takes the factors.

        Args:
            factors: of weights by their path, each of a shape that goes with the weight's.
        """
        self._factors = dict(factors or {})

    @classmethod
    def by_name(cls, params: Mapping[str, Any], factors: Mapping[str, float]) -> "Rates":
        """Rates of named weights; all others have the factor 1.

        Args:
            params: the weights, as nested dictionaries; shapes are enough.
            factors: by the names of `names_of`.

        Raises:
            ValueError: nothing trains.
        """
        found = {}
        for path, leaf in flatten_dict(params).items():
            values = [factors.get(name, 1.0) for name in names_of(path, leaf.shape)]
            stacked = path[:2] == _STACK
            shape = (-1,) + (1,) * (len(leaf.shape) - 1) if stacked else ()
            found[path] = np.reshape(np.asarray(values, np.float32), shape)
        if not any(np.any(values) for values in found.values()):
            raise ValueError("finetune: expected a weight that trains; got all frozen")
        return cls({path: values for path, values in found.items() if np.any(values != 1)})

    def trained(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """The weights that train, in whole or in part; the others are not in the tree."""
        if not self._factors:
            return params
        flat = flatten_dict(params)
        return unflatten_dict(
            {path: leaf for path, leaf in flat.items() if np.any(self._factors.get(path, 1))}
        )

    def gradient(self, gradient: Mapping[str, Any]) -> Mapping[str, Any]:
        """A gradient without that of blocks that do not train: it counts in no norm or moment."""
        return self._mapped(
            lambda leaf, factor: jnp.where(factor == 0, jnp.zeros((), leaf.dtype), leaf), gradient
        )

    def updates(self, updates: Mapping[str, Any]) -> Mapping[str, Any]:
        """The optimizer's updates at the rate of each weight."""
        return self._mapped(lambda leaf, factor: (leaf * factor).astype(leaf.dtype), updates)

    def _mapped(self, function: Callable[..., Any], tree: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._factors:
            return tree
        return unflatten_dict(
            {
                path: function(leaf, self._factors[path]) if path in self._factors else leaf
                for path, leaf in flatten_dict(tree).items()
            }
        )

    def count(self, params: Mapping[str, Any]) -> int:
        """Number of weights that train."""
        flat = flatten_dict(params)
        return sum(
            int(np.broadcast_to(self._factors.get(path, 1) != 0, leaf.shape).sum())
            for path, leaf in flat.items()
        )


def replaced(params: Mapping[str, Any], part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Weights with those of a part of the tree in their place."""
    whole, new = flatten_dict(params), flatten_dict(part)
    return part if whole.keys() == new.keys() else unflatten_dict(whole | new)
