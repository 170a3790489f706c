"""Transformer blocks, and a stack of them that is compiled once whatever its depth."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from flare_jax.linear import LayerTypes
from flare_jax.mlp import MLP
from flare_jax.norm import LayerNorm
from parallel import mesh as mesh_lib
from parallel.mesh import DATA, POINTS
from parallel.streaming import GATHERED

REMAT_POLICIES = ("none", "attention", "block")


@runtime_checkable
class PointAttention(Protocol):
    """An attention layer of points without a context."""

    def __call__(
        self, x: Array, point_mask: Array | None, key: Array | None, norm: LayerNorm, /
    ) -> Array:
        """Mixes points that `norm` normalizes first."""


@runtime_checkable
class PhasedAttention(PointAttention, Protocol):
    """One that can be applied to a cloud in parts; see `flare_jax.phases`."""

    def gather(self, x: Array, point_mask: Array | None, norm: LayerNorm, /) -> Any:
        """What a part of the points gives to the latents."""

    def give_back(
        self,
        x: Array,
        latents: Array,
        point_mask: Array | None,
        norm: LayerNorm,
        context: None,
        key: Array | None,
        /,
    ) -> Array:
        """What points get of the latents."""


class Block(nnx.Module):
    """Attention and perceptron, each behind a normalization and beside a residual."""

    def __init__(
        self,
        attention: PointAttention,
        dim: int,
        *,
        mlp_ratio: int,
        act: str,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> None:
        """Puts a block around an attention layer.

        Args:
            attention: the attention layer; it normalizes the points first.
            dim: width of the points.
            mlp_ratio: hidden width of the perceptron, in units of `dim`.
            act: activation of the perceptron.
            rngs: random streams; `params` is used.
            dtype: type to compute in.
            param_dtype: type of the weights.
        """
        types: LayerTypes = dict(dtype=dtype, param_dtype=param_dtype)
        self.norm_attention = LayerNorm(dim, **types)
        self.attention = attention
        self.norm_mlp = LayerNorm(dim, **types)
        self.mlp = MLP(dim, dim * mlp_ratio, dim, act=act, rngs=rngs, **types)

    def __call__(
        self,
        x: Float[Array, "B N C"],
        point_mask: Bool[Array, "B N"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B N C"]:
        """Applies the block."""
        x = x + self.attention(x, point_mask, key, self.norm_attention)
        x = self.mlp.residual(x, self.norm_mlp)
        return mesh_lib.constrain(x, DATA, POINTS, None)

    @property
    def _phased(self) -> PhasedAttention:
        if not isinstance(self.attention, PhasedAttention):
            kind = type(self.attention).__name__
            raise ValueError(f"attention: expected a layer with gather and give_back; got {kind}")
        return self.attention

    def gather(self, x: Float[Array, "B N C"], point_mask: Bool[Array, "B N"] | None) -> Any:
        """What a part of the points gives to the block's latents; see `flare_jax.phases`."""
        return self._phased.gather(x, point_mask, self.norm_attention)

    def advance(
        self,
        x: Float[Array, "B N C"],
        latents: Float[Array, "B H S D"],
        point_mask: Bool[Array, "B N"] | None,
        context: None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B N C"]:
        """The block, on points whose latents are known."""
        norm = self.norm_attention
        x = x + self._phased.give_back(x, latents, point_mask, norm, context, key)
        x = self.mlp.residual(x, self.norm_mlp)
        return mesh_lib.constrain(x, DATA, POINTS, None)


class BlockStack(nnx.Module):
    """Blocks of one kind in a row. Their weights are stacked and the depth is scanned."""

    def __init__(
        self,
        make_block: Callable[[nnx.Rngs], nnx.Module],
        depth: int,
        *,
        remat: str = "none",
        rngs: nnx.Rngs,
    ) -> None:
        """Makes `depth` blocks.

        Args:
            make_block: makes one block from its random streams.
            depth: number of blocks.
            remat: what the forward pass keeps of the points for the gradient: `none`, the input of
                every attention and every perceptron; `attention`, the input of each block and the
                latents that its attention gathered, of which attention's output is made again;
                `block`, only the input of each block: points are gathered again, too.
            rngs: random streams; each block gets its own.

        Raises:
            ValueError: `remat` is unknown.
        """
        if remat not in REMAT_POLICIES:
            raise ValueError(f"remat: expected one of {', '.join(REMAT_POLICIES)}; got {remat!r}")
        self.blocks: Any = _stack([make_block(rngs) for _ in range(depth)])
        self.depth = depth
        self.remat = remat

    def block(self, number: int | Int[Array, ""]) -> Any:
        """One of the blocks, of the kind that `make_block` makes."""
        graph, weights = nnx.split(self.blocks)
        return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[number], weights))

    def __call__(self, x: Any, *shared: Any, key: Key[Array, ""] | None = None) -> Any:
        """Applies the blocks one after another; each draws its own numbers.

        Args:
            x: what goes from block to block: points `(B, N, C)`, or a tuple of several clouds.
            *shared: what every block is given, such as the mask.
            key: randomness; without it there is none.

        Returns:
            What the last block returns; each is called as `block(x, *shared, key)`.
        """
        graph, weights = nnx.split(self.blocks)

        def apply_block(x: PyTree, layer: tuple[PyTree, Array | None]) -> tuple[PyTree, None]:
            weights, key = layer
            return nnx.merge(graph, weights)(x, *shared, key), None

        if self.remat != "none":
            kept = [GATHERED] if self.remat == "attention" else []
            policy = jax.checkpoint_policies.save_only_these_names(*kept)
            # The scan already keeps the recomputation apart from the forward pass.
            apply_block = jax.checkpoint(apply_block, policy=policy, prevent_cse=False)
        keys = None if key is None else jax.random.split(key, self.depth)
        return jax.lax.scan(apply_block, x, (weights, keys))[0]


def _stack(blocks: list[nnx.Module]) -> nnx.Module:
    """One module whose variables hold those of all blocks, along a new first axis."""
    graph, _ = nnx.split(blocks[0])
    variables = jax.tree.map(
        lambda *values: jnp.stack(values), *(nnx.state(block) for block in blocks)
    )
    stacked = nnx.merge(graph, variables)
    for _, variable in nnx.iter_graph(stacked):
        if isinstance(variable, nnx.Variable):
            variable.set_metadata(out_sharding=(None, *variable.get_metadata("out_sharding")))
    return stacked
