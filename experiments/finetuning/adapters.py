"""Low-rank adapters beside linear layers (LoRA, Hu et al., arXiv 2106.09685).

A layer of kernel `W` computes with `W + (alpha / rank) D U`, of which the narrow matrices `D` and
`U` train. The sum is made once a step, before any point is touched: it takes no memory or time that
grows with the points, every layer computes as without, and `W` gets no gradient. Adapters lie in
the tree of weights beside their kernel.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Key

from experiments.finetuning.weight_groups import Path, names_of
from flare_jax.linear import Linear, uniform

DOWN, UP, SCALE = "adapter_down", "adapter_up", "adapter_scale"


def linear_layers(model: nnx.Module) -> dict[Path, list[str]]:
    """Paths of the linear layers of a model, and their names, one of each block."""
    return {
        path: names_of(path, module.kernel.shape)
        for path, module in nnx.iter_graph(model)
        if isinstance(module, Linear)
    }


def with_adapters(
    params: Mapping[str, Any],
    layers: Sequence[Path],
    rank: int,
    alpha: float,
    key: Key[Array, ""],
) -> Mapping[str, Any]:
    """Weights with adapters beside the kernels of layers, which change nothing yet.

    `D` is drawn as PyTorch draws linear layers and `U` is zero, both in float32 at least.

    Args:
        params: the weights, as nested dictionaries.
        layers: paths of the layers, which may be stacked.
        rank: columns of `D`; of a layer that is narrower, as many as it has.
        alpha: see above.
        key: random key.
    """
    flat = dict(flatten_dict(params))
    for path in layers:
        kernel = flat[*path, "kernel"]
        *stack, width, out = kernel.shape
        narrow = min(rank, width, out)
        dtype = jnp.promote_types(kernel.dtype, jnp.float32)
        own = jax.random.fold_in(key, zlib.crc32(".".join(map(str, path)).encode()))
        flat[*path, DOWN] = uniform(own, (*stack, width, narrow), width**-0.5, dtype)
        flat[*path, UP] = jnp.zeros((*stack, narrow, out), dtype)
        flat[*path, SCALE] = jnp.full(stack, alpha / rank, dtype)
    return unflatten_dict(flat)


def merged(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights that a model computes with: adapters are in the kernels, and not in the tree."""
    flat = dict(flatten_dict(params))
    adapted = [path[:-1] for path in flat if path[-1] == DOWN]
    if not adapted:
        return params
    for path in adapted:
        down, up, scale = (flat.pop((*path, name)) for name in (DOWN, UP, SCALE))
        # In full precision: it is no part of what is computed in a narrow type.
        product = jnp.einsum("...ir,...ro->...io", down, up, precision=jax.lax.Precision.HIGHEST)
        flat[*path, "kernel"] = flat[*path, "kernel"] + scale[..., None, None] * product
    return unflatten_dict(flat)
