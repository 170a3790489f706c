"""The Transolver model."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from flare_jax.transformer import PointTransformer
from geotransolver_jax.attention import PhysicsAttention
from parallel.annotations import Integer


class Transolver(PointTransformer):
    """Transolver (arXiv 2402.02366) and Transolver++ (arXiv 2502.02414).

    The model of `physicsnemo.models.transolver.Transolver` 2.2.2 with its arguments, names and
    defaults; there is no Transformer Engine.
    """

    def __init__(
        self,
        functional_dim: int,
        out_dim: int,
        embedding_dim: int | None = None,
        n_layers: int = 4,
        n_hidden: int = 256,
        dropout: float = 0.0,
        n_head: int = 8,
        act: str = "gelu",
        mlp_ratio: int = 4,
        slice_num: int = 32,
        unified_pos: bool = False,
        ref: int = 8,
        structured_shape: Sequence[Integer] | None = None,
        time_input: bool = False,
        plus: bool = False,
        *,
        rngs: nnx.Rngs,
        remat: str = "none",
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> None:
        """Makes the weights and places them on the mesh of the context.

        Args:
            functional_dim: width of the input values, without embeddings.
            out_dim: width of the prediction.
            embedding_dim: width of the embeddings; needed unless `unified_pos`.
            n_layers: number of blocks.
            n_hidden: width of the points inside.
            dropout: dropout rate of the attention layers' outputs.
            n_head: attention heads; a divisor of `n_hidden`.
            act: activation, one of `flare_jax.activations`.
            mlp_ratio: hidden width of the blocks' perceptrons, in units of `n_hidden`.
            slice_num: slices of each head.
            unified_pos: embed points by their distances to a reference grid (2-D grids only).
            ref: points of that reference grid along each axis.
            structured_shape: shape of a structured grid, 2 or 3 axes, which is then projected by
                convolutions; `None` for clouds.
            time_input: take the time of each sample.
            plus: the layers of Transolver++: adaptive temperature, Gumbel noise in training.
            rngs: random streams; `params` makes the weights, `dropout` is drawn from in training.
            remat: what is computed again for the gradient: `none`, `attention` or `block`, see
                `flare_jax.block.BlockStack`.
            dtype: type to compute in, `param_dtype` by default.
            param_dtype: type of the weights.

        Raises:
            ValueError: arguments that do not fit together, or do not fit the mesh.
        """
        if slice_num < 1:
            raise ValueError(f"slice_num: expected at least 1; got {slice_num}")

        def make_attention(
            rngs: nnx.Rngs, dtype: jax.typing.DTypeLike, grid: tuple[int, ...] | None
        ) -> PhysicsAttention:
            return PhysicsAttention(
                n_hidden,
                n_head,
                slice_num,
                dropout=dropout,
                plus=plus,
                structured_shape=grid,
                rngs=rngs,
                dtype=dtype,
                param_dtype=param_dtype,
            )

        super().__init__(
            make_attention,
            functional_dim=functional_dim,
            out_dim=out_dim,
            embedding_dim=embedding_dim,
            n_layers=n_layers,
            n_hidden=n_hidden,
            dropout=dropout,
            n_head=n_head,
            act=act,
            mlp_ratio=mlp_ratio,
            unified_pos=unified_pos,
            ref=ref,
            structured_shape=structured_shape,
            time_input=time_input,
            noisy=dropout > 0 or plus,
            remat=remat,
            rngs=rngs,
            dtype=dtype,
            param_dtype=param_dtype,
        )
