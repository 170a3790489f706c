"""The FLARE model."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from flare_jax.attention import FLAREAttention
from flare_jax.transformer import PointTransformer
from parallel.annotations import Integer


class FLARE(PointTransformer):
    """FLARE: a transformer over points with attention through learned latents (arXiv 2508.12594).

    The model of `physicsnemo.models.flare.FLARE` 2.2.2 with its arguments, names and defaults.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> model = FLARE(
        ...     functional_dim=2, out_dim=1, embedding_dim=3, n_hidden=32, rngs=nnx.Rngs(0)
        ... )
        >>> model(jnp.ones((1, 100, 2)), jnp.ones((1, 100, 3))).shape
        (1, 100, 1)
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
        *,
        rngs: nnx.Rngs,
        scale: float = 1.0,
        remat: str = "none",
        chunk_size: int | None = None,
        attention_backend: str = "auto",
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
            slice_num: latent queries of each head.
            unified_pos: embed points by their distances to a reference grid (2-D grids only).
            ref: points of that reference grid along each axis.
            structured_shape: shape of a structured grid, 2 or 3 axes; `None` for clouds.
            time_input: take the time of each sample.
            rngs: random streams; `params` makes the weights, `dropout` is drawn from in training.
            scale: factor of the attention scores. The reference has 1; the paper's rule is
                `dim_head ** -0.5` where `dim_head` is above 8.
            remat: what is computed again for the gradient instead of being kept: `none`,
                `attention` or `block`, see `BlockStack`.
            chunk_size: points of a device that attention works on at once, see `flare_mixer`.
            attention_backend: `auto`, `xla` or `cudnn`, see `flare_jax.fused.check_backend`.
            dtype: type to compute in, `param_dtype` by default. Softmax and reductions are in
                float32 or wider whatever it is.
            param_dtype: type of the weights.

        Raises:
            ValueError: arguments that do not fit together, or do not fit the mesh.
        """
        if slice_num < 1:
            raise ValueError(f"slice_num: expected at least 1; got {slice_num}")
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size: expected at least 1, or None; got {chunk_size}")

        def make_attention(
            rngs: nnx.Rngs, dtype: jax.typing.DTypeLike, grid: tuple[int, ...] | None
        ) -> FLAREAttention:
            return FLAREAttention(
                n_hidden,
                n_head,
                slice_num,
                dropout=dropout,
                scale=scale,
                chunk_size=chunk_size,
                attention_backend=attention_backend,
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
            noisy=dropout > 0,
            remat=remat,
            rngs=rngs,
            dtype=dtype,
            param_dtype=param_dtype,
        )
