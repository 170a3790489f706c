"""The transformer over points that FLARE and Transolver share; they differ in their attention."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Key, PyTree

from flare_jax.block import Block, BlockStack, PointAttention
from flare_jax.checks import (
    check_dropout,
    check_heads,
    check_heads_divide,
    check_positive,
    check_types,
)
from flare_jax.embeddings import TimeEmbedding, unified_position
from flare_jax.heads import hide
from flare_jax.inputs import PointLayout, check_mask, check_points, check_real
from flare_jax.linear import LayerOptions, Linear
from flare_jax.mlp import MLP
from flare_jax.norm import LayerNorm
from parallel import mesh as mesh_lib
from parallel.annotations import AnyArray, Integer
from parallel.parameters import place_parameters
from parallel.points import grid_shape


class PointTransformer(nnx.Module):
    """Input perceptron, a stack of blocks, normalization and output layer, on points.

    The shell of Transolver (arXiv 2402.02366, section 3.3). Subclasses give it their attention.
    """

    def __init__(
        self,
        make_attention: Callable[
            [nnx.Rngs, jax.typing.DTypeLike, tuple[int, ...] | None], PointAttention
        ],
        *,
        functional_dim: int,
        out_dim: int,
        embedding_dim: int | None,
        n_layers: int,
        n_hidden: int,
        dropout: float = 0.0,
        n_head: int = 1,
        act: str = "gelu",
        mlp_ratio: int,
        unified_pos: bool = False,
        ref: int = 8,
        structured_shape: Sequence[Integer] | None = None,
        time_input: bool = False,
        noisy: bool = False,
        remat: str = "none",
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> None:
        """Makes the weights and places them on the mesh of the context.

        By default a model has nothing of what a subclass may lack.

        Args:
            make_attention: makes the attention layer of one block from its random streams, the type
                to compute in, and the shape of the grid.
            functional_dim: width of the input values, without embeddings.
            out_dim: width of the prediction.
            embedding_dim: width of the embeddings; needed unless `unified_pos`.
            n_layers: number of blocks.
            n_hidden: width of the points inside.
            dropout: dropout rate of the attention layers' outputs.
            n_head: attention heads; a divisor of `n_hidden`. With 1, for layers without heads, the
                model is refused on a mesh that splits heads.
            act: activation, one of `flare_jax.activations`.
            mlp_ratio: hidden width of the blocks' perceptrons, in units of `n_hidden`.
            unified_pos: embed points by their distances to a reference grid (2-D grids only).
            ref: points of that reference grid along each axis.
            structured_shape: shape of a structured grid, 2 or 3 axes; `None` for clouds.
            time_input: take the time of each sample.
            noisy: whether the blocks draw random numbers in training.
            remat: what is computed again for the gradient, see `BlockStack`.
            rngs: random streams; `params` makes the weights, `dropout` is drawn from in training.
            dtype: type to compute in, `param_dtype` if it is `None`.
            param_dtype: type of the weights.

        Raises:
            ValueError: arguments that do not fit together.
        """
        if structured_shape is not None:
            structured_shape = grid_shape(structured_shape)
        check_heads(n_hidden, n_head)
        if unified_pos:
            if structured_shape is None or len(structured_shape) != 2:
                raise ValueError(
                    f"unified_pos: expected a structured_shape of 2 axes; got {structured_shape}"
                )
            embedding_dim = ref * ref
        elif embedding_dim is None:
            raise ValueError("embedding_dim: expected a width, since unified_pos=False; got None")
        check_positive(
            functional_dim=functional_dim,
            out_dim=out_dim,
            embedding_dim=embedding_dim,
            n_layers=n_layers,
            n_hidden=n_hidden,
            mlp_ratio=mlp_ratio,
        )
        check_dropout(dropout)
        dtype = param_dtype if dtype is None else dtype
        check_types(param_dtype=param_dtype, dtype=dtype)
        self.functional_dim = functional_dim
        self.noisy = noisy
        self.n_head = n_head
        self.embedding_dim = embedding_dim
        self.structured_shape = structured_shape
        self.unified_pos = unified_pos
        self.ref = ref
        self.time_input = time_input
        self.dtype = dtype
        self.deterministic = False
        self.dropout_rngs = rngs.dropout.fork()

        types: LayerOptions = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.preprocess = MLP(
            functional_dim + embedding_dim, 2 * n_hidden, n_hidden, act=act, **types
        )
        if time_input:
            self.time_embedding = TimeEmbedding(n_hidden, **types)

        def make_block(rngs: nnx.Rngs) -> Block:
            return Block(
                make_attention(rngs, dtype, structured_shape),
                n_hidden,
                mlp_ratio=mlp_ratio,
                act=act,
                rngs=rngs,
                dtype=dtype,
                param_dtype=param_dtype,
            )

        self.stack = BlockStack(make_block, n_layers, remat=remat, rngs=rngs)
        self.norm_out = LayerNorm(n_hidden, dtype=dtype, param_dtype=param_dtype)
        self.project_out = Linear(n_hidden, out_dim, **types)
        place_parameters(self)

    def __call__(
        self,
        fx: Float[AnyArray, "B *N C_in"],
        embedding: Float[AnyArray, "B *_N C_emb"] | None = None,
        time: Float[AnyArray, " B"] | None = None,
        point_mask: Bool[AnyArray, "B *_N"] | None = None,
    ) -> Float[Array, "B *N C_out"]:
        """Predicts the fields at the points.

        Args:
            fx: values at the points, `(B, N, functional_dim)`; for a structured grid also
                `(B, *structured_shape, functional_dim)`.
            embedding: positions or other embeddings of the points, flat or spatial. Not with
                `unified_pos`.
            time: time of each sample; with `time_input` only.
            point_mask: True where a point is real, as `parallel.shard_points` makes it. Rows that
                are not change nothing and come out zero.

        Returns:
            The prediction `(B, N, out_dim)`, in the layout of `fx`.

        Raises:
            ValueError: an argument is missing, not taken, or of a wrong shape; or a sample has no
                real point.
        """
        layout = self._check(fx, embedding, time, point_mask)
        key = None
        if not self.deterministic and self.noisy:
            key = self.dropout_rngs()
        arrays = (fx, embedding, time, point_mask, key)
        graph, weights = nnx.split(self)
        return _apply(graph, layout, weights, *map(mesh_lib.replicate_unsharded, arrays))

    def _check(
        self,
        fx: AnyArray,
        embedding: AnyArray | None,
        time: AnyArray | None,
        point_mask: AnyArray | None,
    ) -> PointLayout:
        check_heads_divide(self.n_head)
        grid, padded = self.structured_shape, point_mask is not None
        layout = check_points("fx", fx, self.functional_dim, grid, padded=padded)
        check_mask("point_mask", point_mask, fx.shape[0], layout)
        if self.unified_pos and embedding is not None:
            raise ValueError("embedding: expected none, since unified_pos=True makes it; got one")
        if not self.unified_pos:
            if embedding is None:
                raise ValueError(
                    f"embedding: expected shape (B, N, {self.embedding_dim}), since "
                    "unified_pos=False; got None"
                )
            other = check_points("embedding", embedding, self.embedding_dim, grid, padded=padded)
            if embedding.shape[0] != fx.shape[0] or other.points != layout.points:
                raise ValueError(
                    f"embedding: expected {fx.shape[0]} samples of {layout.points} points, as in "
                    f"fx; got shape {tuple(embedding.shape)}"
                )
        if time is not None and not self.time_input:
            raise ValueError("time: expected none, since time_input=False; got one")
        if self.time_input:
            expected = f"shape ({fx.shape[0]},), one a sample"
            if time is None or check_real("time", time, expected) != (fx.shape[0],):
                got = None if time is None else tuple(time.shape)
                raise ValueError(f"time: expected {expected}; got {got}")
        return layout

    def _forward(
        self,
        layout: PointLayout,
        fx: Array,
        embedding: Array | None,
        time: Array | None,
        point_mask: Array | None,
        key: Key[Array, ""] | None,
    ) -> Array:
        mask = layout.flatten_mask(point_mask, fx.shape[0])
        fx = layout.flatten(fx.astype(self.dtype))
        if embedding is None:
            assert self.structured_shape is not None, "unified_pos is for grids alone"
            embedding = unified_position(self.structured_shape, self.ref, layout.rows)
            embedding = jnp.broadcast_to(
                embedding.astype(self.dtype), (fx.shape[0], *embedding.shape)
            )
        else:
            embedding = layout.flatten(embedding.astype(self.dtype))

        x = self.enter(fx, embedding, mask)
        if time is not None:
            x = x + self.time_embedding(time.astype(_time_dtype(self.dtype)))[:, None]
        x = self.stack(x, mask, key=key)
        return layout.unflatten(self.leave(x, mask))

    def enter(
        self,
        fx: Float[Array, "B N C_in"],
        embedding: Float[Array, "B N C_emb"],
        point_mask: Bool[Array, "B N"] | None,
    ) -> Float[Array, "B N C"]:
        """Points as the first block takes them."""
        x = jnp.concatenate([embedding, fx], axis=-1).astype(self.dtype)
        return self.preprocess(hide(x, point_mask))

    def leave(
        self, x: Float[Array, "B N C"], point_mask: Bool[Array, "B N"] | None
    ) -> Float[Array, "B N C_out"]:
        """Fields of the points that the last block returns."""
        return hide(self.project_out(x, self.norm_out), point_mask)


@partial(jax.jit, static_argnums=(0, 1))
def _apply(
    graph: nnx.GraphDef, layout: PointLayout, weights: PyTree, *arrays: Array | None
) -> Array:
    """Compiled once a shape; inside a compiled program it is inlined."""
    return nnx.merge(graph, weights)._forward(layout, *arrays)


def _time_dtype(dtype: DTypeLike) -> jnp.dtype:
    return jnp.result_type(jnp.float32, dtype)
