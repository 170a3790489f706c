"""A model on a cloud that is larger than the devices, a part of its points at a time, exactly.

Inside a layer points meet in its latents alone. So the points of the whole cloud stay on the host,
and their parts go through one layer after another: each part gives to the latents of the layer
(`gather`), the host merges what all parts gave (`merge`), the latents are made of it (`latents`),
and each part gets of them (`give_back`) and gives to those of the next layer on the same way. Once
the latents of all layers are known, any further point is predicted from them, without the cloud.

A model takes part that has `stack`, a `BlockStack` whose blocks and attention layers have these
methods. Points of structured grids also meet in convolutions, and cannot come in parts.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Key, PyTree

from flare_jax.block import BlockStack
from parallel.annotations import AnyArray
from parallel.on_host import OnHost
from parallel.placement import to_host

Mask = Bool[Array, "B n"] | None
# Makes the points of a part as the first block takes them, and their mask, from its number.
Enter = Callable[[int], tuple[Float[Array, "B n C"], Mask]]
# Is handed the number of a part and its points as the last block returns them.
Leave = Callable[[int, Float[Array, "B n C"]], None]


@runtime_checkable
class Stacked(Protocol):
    """A model whose points go through a stack of blocks."""

    stack: BlockStack


class Phases:
    """The blocks of a model, compiled for parts of one cloud."""

    def __init__(self, model: Stacked) -> None:
        """Takes the weights that the model has now."""
        self._graph, self._weights = nnx.split(model)
        self.depth = model.stack.depth
        self._merge = type(model.stack.block(0).attention).merge
        self._gather = jax.jit(self._gather_first)
        self._advance = jax.jit(self._through_block)
        self._advance_last = jax.jit(self._through_last)
        self._latents = jax.jit(self._make_latents)
        self._all = jax.jit(self._through_all)

    def latents_of_cloud(
        self,
        parts: int,
        enter: Enter,
        leave: Leave,
        context: PyTree = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[np.ndarray, "L B H S D"]:
        """Sends all parts of a cloud through all layers.

        Args:
            parts: number of parts, all of one shape.
            enter: see `Enter`.
            leave: see `Leave`.
            context: what attention layers are given, or `None`.
            key: randomness of dropouts; without it there are none.

        Returns:
            The latents of all layers, from which `points_alone` predicts further points.
        """
        held: list[Any] = [None] * parts
        gathered: list[Any] = [None] * parts
        states = []

        def keep(number: int, x: Array, mask: Array | None, part: PyTree) -> None:
            held[number], gathered[number] = (OnHost(x), mask), jax.tree.map(to_host, part)

        def first(number: int) -> tuple[Array, Array | None, PyTree]:
            x, mask = enter(number)
            return x, mask, self._gather(self._weights, x, mask)

        _one_behind(parts, first, keep)
        for layer in range(self.depth):
            merged = np.asarray(self._merge(gathered), gathered[0][0].dtype)
            states.append(self._latents(self._weights, layer, merged, context))
            latents, last = states[-1], layer == self.depth - 1

            def go_on(
                number: int, layer: int = layer, latents: Array = latents, last: bool = last
            ) -> tuple:
                on_host, mask = held[number]
                x, held[number] = on_host.on_devices(), None
                own = None if key is None else jax.random.fold_in(key, layer * parts + number)
                if last:
                    return self._advance_last(self._weights, x, mask, latents, context, own), mask
                x, part = self._advance(self._weights, layer, x, mask, latents, context, own)
                return x, mask, part

            if last:
                _one_behind(parts, go_on, lambda number, x, mask: leave(number, x))
            else:
                _one_behind(parts, go_on, keep)
        return np.stack([to_host(state) for state in states])

    def points_alone(
        self,
        parts: int,
        enter: Enter,
        leave: Leave,
        latents: Float[np.ndarray, "L B H S D"],
        context: PyTree,
    ) -> None:
        """Sends points through all layers whose latents are known; arguments as before."""

        def through(number: int) -> tuple[Array]:
            x, mask = enter(number)
            return (self._all(self._weights, x, mask, latents, context),)

        _one_behind(parts, through, leave)

    def _block(self, weights: PyTree, layer: int | Array) -> Any:
        return nnx.merge(self._graph, weights).stack.block(layer)

    def _gather_first(self, weights: PyTree, x: Array, mask: Array | None) -> PyTree:
        return self._block(weights, 0).gather(x, mask)

    def _make_latents(
        self, weights: PyTree, layer: int | Array, merged: AnyArray, context: PyTree
    ) -> Array:
        return self._block(weights, layer).attention.latents(merged, context)

    def _through_block(
        self,
        weights: PyTree,
        layer: int | Array,
        x: Array,
        mask: Array | None,
        latents: Array,
        context: PyTree,
        key: Key[Array, ""] | None,
    ) -> tuple[Array, PyTree]:
        x = self._block(weights, layer).advance(x, latents, mask, context, key)
        return x, self._block(weights, layer + 1).gather(x, mask)

    def _through_last(
        self,
        weights: PyTree,
        x: Array,
        mask: Array | None,
        latents: Array,
        context: PyTree,
        key: Key[Array, ""] | None,
    ) -> Array:
        return self._block(weights, self.depth - 1).advance(x, latents, mask, context, key)

    def _through_all(
        self, weights: PyTree, x: Array, mask: Array | None, latents: Array, context: PyTree
    ) -> Array:
        def advance(x: Array, layer: tuple[Array, Array]) -> tuple[Array, None]:
            number, own = layer
            return self._block(weights, number).advance(x, own, mask, context), None

        return jax.lax.scan(advance, x, (jnp.arange(self.depth), jnp.asarray(latents)))[0]


def _one_behind(parts: int, start: Callable[[int], tuple], finish: Callable[..., None]) -> None:
    """`finish(number, *start(number))` of each part, when the next one has been started.

    What `start` returns is being computed still: the devices go on while the host fetches.
    """
    waiting = None
    for number in range(parts):
        started = start(number)
        if waiting is not None:
            finish(number - 1, *waiting)
        waiting = started
    if waiting is not None:
        finish(parts - 1, *waiting)
