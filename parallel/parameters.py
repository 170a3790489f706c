"""Parameters on the mesh, each by the `PartitionSpec` that it carries."""

from typing import TypeVar

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from parallel import mesh as mesh_lib

Model = TypeVar("Model", bound=nnx.Module)


def parameter(value: jax.Array, *axes: str | None) -> nnx.Param:
    """A weight that carries its layout: one mesh axis, or `None`, for each of its dimensions.

    It is not placed yet, so that layers can be made with or without a mesh; see `place_parameters`.
    """
    return nnx.Param(value, out_sharding=axes, eager_sharding=False)


def split_weights(model: Model) -> tuple[nnx.GraphDef[Model], nnx.State, nnx.State]:
    """The graph of a model, its weights, and its other variables; `nnx.merge` makes it of them."""
    graph, weights, *rest = nnx.split(model, nnx.Param, ...)
    return graph, weights, rest[0]


def partition_specs(module: nnx.Module) -> PyTree:
    """The `PartitionSpec` of every variable of a module, for the mesh of the context.

    A dimension that a mesh axis does not divide is not split over it.
    """
    state = nnx.state(module)
    specs = nnx.get_partition_spec(state)

    def on_mesh(spec: P, leaf: Array) -> P:
        sizes = zip(spec, leaf.shape, strict=False)
        return mesh_lib.spec(
            *(
                None if axis is None or size % mesh_lib.axis_size(axis) else axis
                for axis, size in sizes
            )
        )

    is_spec = lambda leaf: isinstance(leaf, P)  # noqa: E731
    return jax.tree.map(on_mesh, specs, state, is_leaf=is_spec)


def place_parameters(module: nnx.Module) -> None:
    """Places the variables of a module on the mesh of the context, in place; without one, nothing.

    Weights made from one seed are the same on every mesh: they are drawn before they are placed,
    or, where this runs under `jax.jit`, by a generator whose bits do not depend on the layout.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return
    specs, state = partition_specs(module), nnx.state(module)

    def put(leaf: Array, spec: P) -> Array:
        if isinstance(leaf, jax.core.Tracer):
            return jax.lax.with_sharding_constraint(leaf, spec)
        return jax.device_put(leaf, mesh_lib.sharding(*spec))

    nnx.update(module, jax.tree.map(put, state, specs))
