"""The context of GeoTransolver: latents of the geometry and of global quantities.

Each tokenizer sums a cloud into slices, one packed all-reduce, after which every shard of the
points has its latents. They are made once and read by every block.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from flare_jax.linear import LayerOptions
from geotransolver_jax.concrete_dropout import ConcreteDropout
from geotransolver_jax.neighborhoods import Cloud, MultiScaleFeatures, Neighborhoods
from geotransolver_jax.projection import SliceProjection
from geotransolver_jax.slices import points_to_slices
from parallel.neighbors import Neighbors


class ContextTokenizer(SliceProjection):
    """The first half of physics attention: a cloud summed into slices, the context's latents."""

    def __init__(
        self,
        dim: int,
        heads: int,
        width: int,
        slices: int,
        *,
        dropout: float = 0.0,
        concrete_dropout: bool = False,
        plus: bool = False,
        structured_shape: tuple[int, ...] | None = None,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> None:
        """Makes the weights; arguments as of `SliceProjection`.

        Args:
            dim: width of the cloud's features.
            heads: number of heads.
            width: width of a head.
            slices: number of slices of each head.
            dropout: initial rate of the concrete dropout.
            concrete_dropout: whether there is one, of the latents.
            plus: see `SliceProjection`.
            structured_shape: shape of a grid.
            rngs: random streams; `params` is used.
            dtype: type to compute in.
            param_dtype: type of the weights.
        """
        super().__init__(
            dim,
            heads,
            width,
            slices,
            plus=plus,
            structured_shape=structured_shape,
            initial="uniform",
            initial_slices="uniform",
            rngs=rngs,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        self.concrete = (
            ConcreteDropout(dropout, param_dtype=param_dtype) if concrete_dropout else None
        )

    def __call__(
        self,
        x: Float[Array, "B M C"],
        mask: Bool[Array, "B M"] | None = None,
        key: Key[Array, ""] | None = None,
        number: Int[Array, "B M"] | None = None,
    ) -> Float[Array, "B H S D"]:
        """Latents of a cloud, replicated over the points; `number` as of `slices.Points`."""
        noise_key, dropout_key = (None, None) if key is None else jax.random.split(key)
        points = self.points(x, mask)._replace(number=number)
        latents, _ = points_to_slices(points, self.slice_weights(noise_key))
        latents = latents.astype(self.dtype)
        return latents if self.concrete is None else self.concrete(latents, dropout_key)


class ContextBuilder(nnx.Module):
    """Everything that makes the context, and the local features of the points."""

    def __init__(
        self,
        streams: int,
        heads: int,
        width: int,
        slices: int,
        *,
        geometry_dim: int | None,
        global_dim: int | None,
        local_features: bool,
        radii: Sequence[float],
        counts: Sequence[int],
        n_hidden_local: int,
        structured_shape: tuple[int, ...] | None,
        plus: bool,
        dropout: float,
        concrete_dropout: bool,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike,
        param_dtype: jax.typing.DTypeLike,
    ) -> None:
        """Makes the weights.

        Args:
            streams: number of clouds that the model predicts on.
            heads: number of heads of the latents.
            width: width of a head.
            slices: latents of each head.
            geometry_dim: width of the geometry's features; `None` for no geometry.
            global_dim: width of the global embedding; `None` for none.
            local_features: whether points and geometry see each other's neighbourhoods.
            radii: radii of these neighbourhoods.
            counts: neighbours looked at within each radius.
            n_hidden_local: width of the features of one radius.
            structured_shape: shape of a grid, which the geometry then shares.
            plus: see `SliceProjection`.
            dropout: initial rate of the concrete dropouts.
            concrete_dropout: whether there are some, of the latents.
            rngs: random streams; `params` is used.
            dtype: type to compute in.
            param_dtype: type of the weights.
        """
        types: LayerOptions = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)

        def tokenizer(dim: int, grid: tuple[int, ...] | None = None) -> ContextTokenizer:
            return ContextTokenizer(
                dim,
                heads,
                width,
                slices,
                dropout=dropout,
                concrete_dropout=concrete_dropout,
                plus=plus,
                structured_shape=grid,
                **types,
            )

        local, tokenizers = [], []
        if local_features:
            assert geometry_dim is not None, "local features are of the geometry's coordinates"
            local = [
                MultiScaleFeatures(geometry_dim, radii, counts, n_hidden_local, **types)
                for _ in range(streams)
            ]
            tokenizers = [
                nnx.List([tokenizer(n_hidden_local) for _ in radii]) for _ in range(streams)
            ]
        self.local = nnx.List(local)
        self.local_tokenizers = nnx.List(tokenizers)
        self.geometry = None if geometry_dim is None else tokenizer(geometry_dim, structured_shape)
        self.globals = None if global_dim is None else tokenizer(global_dim)
        self.sources = streams * len(radii) * local_features
        self.sources += (geometry_dim is not None) + (global_dim is not None)
        self.dim = width * self.sources

    def search(
        self,
        positions: Sequence[Float[Array, "B _N D"]],
        geometry: Float[Array, "B M D"],
        point_masks: Sequence[Bool[Array, "B _N"] | None],
        geometry_mask: Bool[Array, "B M"] | None,
    ) -> tuple[Neighborhoods, ...]:
        """The neighbourhoods of every stream."""
        return tuple(
            scales.search(stream, geometry, mask, geometry_mask)
            for scales, stream, mask in zip(self.local, positions, point_masks, strict=True)
        )

    def __call__(
        self,
        positions: Sequence[Float[Array, "B _N D"]] | None,
        geometry: Float[Array, "B M C_geo"] | None,
        global_embedding: Float[Array, "B G C_g"] | None,
        around_geometry: Sequence[Neighbors] | None,
        point_masks: Sequence[Bool[Array, "B _N"] | None],
        geometry_mask: Bool[Array, "B M"] | None,
        global_mask: Bool[Array, "B G"] | None,
        key: Key[Array, ""] | None,
        global_number: Int[Array, "B G"] | None = None,
    ) -> Float[Array, "B H S D_c"] | None:
        """The context.

        Args:
            positions: coordinates of the points of each stream; for local features.
            geometry: points of the geometry; with local features they are their coordinates.
            global_embedding: tokens of global quantities.
            around_geometry: points of each stream around those of the geometry; for local features.
            point_masks: True where a point of a stream is real.
            geometry_mask: True where a point of the geometry is real.
            global_mask: True where a global token is real.
            key: randomness of noise and dropout; without it there is none.
            global_number: of each global token, by default its row.

        Returns:
            Latents side by side, replicated over the points, or `None` without any source.
        """
        parts = []
        keys = iter(() if key is None else jax.random.split(key, self.sources))

        def tokenize(
            tokenizer: ContextTokenizer, x: Array, mask: Array | None, number: Array | None = None
        ) -> None:
            parts.append(tokenizer(x, mask, next(keys, None), number))

        if positions is not None and around_geometry is not None:
            streams = zip(
                self.local,
                self.local_tokenizers,
                positions,
                point_masks,
                around_geometry,
                strict=True,
            )
            for scales, tokenizers, stream, mask, found in streams:
                features = scales(Cloud.of(stream, mask), found)
                for tokenizer, x in zip(tokenizers, features, strict=True):
                    tokenize(tokenizer, x, geometry_mask)
        if geometry is not None and self.geometry is not None:
            tokenize(self.geometry, geometry, geometry_mask)
        if global_embedding is not None and self.globals is not None:
            tokenize(self.globals, global_embedding, global_mask, global_number)
        return jnp.concatenate(parts, axis=-1) if parts else None

    def local_features(
        self,
        stream: int,
        geometry: Float[Array, "B M D"],
        geometry_mask: Bool[Array, "B M"] | None,
        around_points: Neighbors,
    ) -> Float[Array, "B N F"]:
        """What the points of a stream see of the geometry around them.

        Args:
            stream: number of the stream.
            geometry: coordinates of the geometry.
            geometry_mask: True where a point of the geometry is real.
            around_points: points of the geometry around each point of the stream.
        """
        scales = self.local[stream](Cloud.of(geometry, geometry_mask), around_points)
        return jnp.concatenate(scales, axis=-1)
