"""The mathematics of physics attention: points to slices and back (arXiv 2402.02366, section 3.2).

Each point belongs to each of S slices by a weight, a softmax over the slices of a projection of the
point. Slice tokens are weighted means of the points; what attention makes of them goes back to the
points by the same weights. Weights exist for a chunk of points at a time, forward and backward.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from parallel.softmax import accumulation_dtype
from parallel.streaming import map_points, sum_over_points

# Added to the sum of a slice's weights, as the reference does: an empty slice becomes zero.
_EMPTY_SLICE = 1e-2
_TEMPERATURE_RANGE = (0.5, 5.0)
_ADAPTIVE_TEMPERATURE_LEAST = 0.01
_GUMBEL_EPSILON = 1e-8


class AdaptiveTemperature(NamedTuple):
    """Perceptron that adds to the temperature of a point (Transolver++, arXiv 2502.02414).

    Attributes:
        kernel_in: `(D, S)`.
        bias_in: `(S,)`.
        kernel_out: `(S, 1)`.
        bias_out: `(1,)`.
    """

    kernel_in: Float[Array, "D S"]
    bias_in: Float[Array, " S"]
    kernel_out: Float[Array, "S 1"]
    bias_out: Float[Array, " 1"]


class SliceProjection(NamedTuple):
    """Weights by which points belong to slices.

    Attributes:
        kernel: `(D, S)`, shared by the heads.
        bias: `(S,)`.
        temperature: `(H,)`.
        adaptive: `None` for Transolver and GALE.
    """

    kernel: Float[Array, "D S"]
    bias: Float[Array, " S"]
    temperature: Float[Array, " H"]
    adaptive: AdaptiveTemperature | None = None


def points_to_slices(
    x: Float[Array, "B N H D"],
    values: Float[Array, "B N H D"],
    projection: SliceProjection,
    point_mask: Bool[Array, "B N"] | None = None,
    noise_key: Key[Array, ""] | None = None,
) -> Float[Array, "B H S D"]:
    """Slice tokens: means of the points' values by their slice weights; one packed all-reduce.

    Args:
        x: projected points that decide on the weights.
        values: projected points that are averaged.
        projection: see `SliceProjection`.
        point_mask: True where a point is real.
        noise_key: randomness of the Gumbel noise on the weights, with an adaptive temperature;
            without it there is none.

    Returns:
        `sum_n w_n values_n / (sum_n w_n + 0.01)`, replicated over the points, in float32 or wider.
    """
    points = {"x": x, "values": values} | ({} if point_mask is None else {"mask": point_mask})
    sums, totals = sum_over_points(
        _pool, _parameters(projection, noise_key), points, **_sizes(x, projection)
    )
    return sums / (totals + _EMPTY_SLICE)[..., None]


def slices_to_points(
    x: Float[Array, "B N H D"],
    tokens: Float[Array, "B H S D"],
    projection: SliceProjection,
    noise_key: Key[Array, ""] | None = None,
) -> Float[Array, "B N H D"]:
    """Gives each point the sum of the slice tokens by its weights; arguments as above.

    Nothing is exchanged forward, and one all-reduce of the tokens' gradient backward.
    """
    parameters = _parameters(projection, noise_key) | {"tokens": tokens}
    return map_points(_unpool, parameters, {"x": x}, **_sizes(x, projection))


def _sizes(x, projection: SliceProjection) -> dict[str, int]:
    return dict(heads=x.shape[2], width=projection.kernel.shape[-1])


def _parameters(projection: SliceProjection, noise_key) -> dict:
    """The weights with the leading axes of samples and heads that `parallel.streaming` wants."""
    shared = lambda array: array[None, None]  # noqa: E731
    parameters = {
        "kernel": shared(projection.kernel),
        "bias": shared(projection.bias),
        "temperature": projection.temperature[None],
    }
    if projection.adaptive is not None:
        parameters["adaptive"] = jax.tree.map(shared, projection.adaptive)
        if noise_key is not None:
            parameters["noise_key"] = shared(jax.random.key_data(noise_key))
    return parameters


def _pool(parameters, chunk, positions):
    x, values = chunk["x"], chunk["values"]
    weights = _weights(parameters, x, positions)
    if "mask" in chunk:
        weights = jnp.where(chunk["mask"][:, None, None], weights, 0)
        values = jnp.where(chunk["mask"][..., None, None], values, 0)
    sums = jnp.einsum(
        "bhsn,bnhd->bhsd",
        weights.astype(values.dtype),
        values,
        preferred_element_type=weights.dtype,
    )
    return sums, weights.sum(-1)


def _unpool(parameters, chunk, positions):
    x, tokens = chunk["x"], parameters["tokens"].astype(chunk["x"].dtype)
    weights = _weights(parameters, x, positions)
    product = partial(jnp.einsum, preferred_element_type=weights.dtype)
    return product("bhsn,bhsd->bnhd", weights.astype(x.dtype), tokens).astype(x.dtype)


def _weights(parameters, x, positions):
    """Slice weights (B, H, S, n) of a chunk."""
    dtype = accumulation_dtype(x.dtype)
    product = partial(jnp.einsum, preferred_element_type=dtype)
    scores = product("bhds,bnhd->bhsn", parameters["kernel"].astype(x.dtype), x)
    scores += parameters["bias"].astype(dtype)[..., None]
    temperature = parameters["temperature"].astype(dtype)[..., None, None]
    if "adaptive" in parameters:
        perceptron = jax.tree.map(lambda leaf: leaf.astype(dtype), parameters["adaptive"])
        hidden = product("bhds,bnhd->bhsn", perceptron.kernel_in.astype(x.dtype), x)
        hidden = jax.nn.gelu(hidden + perceptron.bias_in[..., None], approximate=False)
        added = product("bhst,bhsn->bhtn", perceptron.kernel_out, hidden)
        added = jax.nn.gelu(added + perceptron.bias_out[..., None], approximate=False)
        temperature = jnp.maximum(temperature + added, _ADAPTIVE_TEMPERATURE_LEAST)
        if "noise_key" in parameters:
            scores += _gumbel_noise(parameters["noise_key"], scores.shape, positions, dtype)
    else:
        temperature = jnp.clip(temperature, *_TEMPERATURE_RANGE)
    return jax.nn.softmax(scores / temperature, axis=2)


def _gumbel_noise(key_data, shape, positions, dtype):
    """Noise that belongs to a point by its place, whatever chunk or shard it is in."""
    batch, heads, slices, _ = shape
    key = jax.random.wrap_key_data(key_data[0, 0])
    draw = lambda position: jax.random.uniform(  # noqa: E731
        jax.random.fold_in(key, position), (batch, heads, slices), dtype
    )
    uniform = jnp.moveaxis(jax.vmap(draw)(positions), 0, -1)
    return -jnp.log(-jnp.log(uniform + _GUMBEL_EPSILON) + _GUMBEL_EPSILON)
