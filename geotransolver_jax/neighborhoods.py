"""Features of what lies around a point, at several radii (GeoTransolver, arXiv 2512.20399)."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from flare_jax.activations import gelu
from flare_jax.linear import LayerOptions, Linear, LinearOptions
from parallel.annotations import AnyArray
from parallel.neighbor_features import project_neighbors
from parallel.neighbors import Neighbors, radius_search, within


class Neighborhoods(NamedTuple):
    """Neighbours of one stream, at the largest of the model's radii.

    Attributes:
        of_points: points of the geometry around each point of the stream, `(B, N, K)`.
        of_geometry: points of the stream around each point of the geometry, `(B, M, K)`.
    """

    of_points: Neighbors
    of_geometry: Neighbors


class Cloud(NamedTuple):
    """A cloud that is searched.

    Attributes:
        coordinates: of its points.
        real: number of its real points, in each sample.
        first: index of the first of them.
    """

    coordinates: Float[Array, "B M D"]
    real: Int[Array, " B"]
    first: Int[Array, " B"]

    @classmethod
    def of(cls, coordinates: Float[Array, "B M D"], mask: Bool[Array, "B M"] | None) -> "Cloud":
        """A cloud of which `mask` is True where a point is real."""
        batch, points = coordinates.shape[:2]
        if mask is None:
            return cls(coordinates, jnp.full(batch, points), jnp.zeros(batch, jnp.int32))
        places = jnp.where(mask, jnp.arange(points), points)
        return cls(coordinates, mask.sum(1), places.min(1))

    def fill(self, indices: Int[AnyArray, "B Q K"]) -> Int[Array, "B Q K"]:
        """Neighbours whose slots beyond the number of points hold the first point.

        So does the reference, whatever the radius, where it is asked for more neighbours than there
        are points; within their number an empty slot is empty.
        """
        beyond = jnp.arange(indices.shape[-1]) >= self.real[:, None, None]
        return jnp.where(beyond, self.first[:, None, None], indices)


class NeighborFeatures(nnx.Module):
    """A perceptron on the coordinates of the neighbours within one radius."""

    def __init__(
        self,
        dim: int,
        radius: float,
        count: int,
        features: int,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ):
        """Makes the weights.

        Args:
            dim: number of coordinates.
            radius: largest distance of a neighbour.
            count: number of neighbours that are looked at, the nearest.
            features: width of the output.
            rngs: random streams; `params` is used.
            dtype: type to compute in.
            param_dtype: type of the weights.
        """
        types: LinearOptions = dict(
            rngs=rngs, initial="uniform", dtype=dtype, param_dtype=param_dtype
        )
        self.linear_in = Linear(count * dim, features, **types)
        self.linear_mid = Linear(features, features // 2, **types)
        self.linear_out = Linear(features // 2, features, **types)
        self.radius = radius
        self.count = count
        self.dtype = dtype

    def __call__(self, searched: Cloud, neighbors: Neighbors) -> Float[Array, "B Q F"]:
        """Features of the queries, in (-1, 1).

        Args:
            searched: the points that were searched.
            neighbors: what was found, within at least this layer's radius and count.
        """
        indices = searched.fill(within(neighbors, self.radius, self.count).indices)
        kernel = self.linear_in.kernel[...]
        kernel = kernel.reshape(self.count, -1, kernel.shape[-1])
        x = project_neighbors(searched.coordinates.astype(self.dtype), indices, kernel)
        x = (x + self.linear_in.bias[...].astype(x.dtype)).astype(self.dtype)
        x = self.linear_mid(gelu(x))
        return jnp.tanh(self.linear_out(gelu(x)))


class MultiScaleFeatures(nnx.Module):
    """Neighbour features at several radii, from one search."""

    def __init__(
        self,
        dim: int,
        radii: Sequence[float],
        counts: Sequence[int],
        features: int,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
    ):
        """Makes the weights; arguments as of `NeighborFeatures`, one radius and count a scale."""
        types: LayerOptions = dict(rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.scales = nnx.List(
            [
                NeighborFeatures(dim, radius, count, features, **types)
                for radius, count in zip(radii, counts, strict=True)
            ]
        )

    @property
    def radius(self) -> float:
        """The largest radius."""
        return max(scale.radius for scale in self.scales)

    @property
    def count(self) -> int:
        """The largest number of neighbours."""
        return max(scale.count for scale in self.scales)

    def search(
        self,
        positions: Float[Array, "B N D"],
        geometry: Float[Array, "B M D"],
        point_mask: Bool[Array, "B N"] | None,
        geometry_mask: Bool[Array, "B M"] | None,
    ) -> Neighborhoods:
        """The neighbours at the largest radius and count, which serve every scale."""
        return Neighborhoods(
            self.nearest(positions, geometry, geometry_mask),
            self.nearest(geometry, positions, point_mask),
        )

    def nearest(
        self,
        queries: Float[Array, "B Q D"],
        points: Float[Array, "B M D"],
        mask: Bool[Array, "B M"] | None,
    ) -> Neighbors:
        """The neighbours of queries at the largest radius and count; `mask` is of the points."""
        return radius_search(queries, points, self.radius, self.count, mask)

    def __call__(self, searched: Cloud, neighbors: Neighbors) -> list[Float[Array, "B Q F"]]:
        """Features of the queries at each scale; arguments as of `NeighborFeatures`."""
        return [scale(searched, neighbors) for scale in self.scales]
