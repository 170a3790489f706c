"""What a model is given of a batch, and what its output means."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from experiments.data.batch import Batch, Cloud, Scale, Statistics, Stream, StreamStatistics
from experiments.models import Model
from geotransolver_jax import GeoTransolver
from parallel.annotations import AnyArray

COORDINATES = 3


def predict(
    model: Model, statistics: Statistics, batch: Batch
) -> tuple[Float[Array, "B N C_out"], ...]:
    """The fields of each stream of a batch, in the units of the targets."""
    masks = tuple(stream.mask for stream in batch.streams)
    outputs = model(**model_inputs(model, statistics, batch), point_mask=_one_or_all(masks))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple(
        of.target.restore(output.astype(jnp.float32))
        for of, output in zip(statistics.streams, outputs, strict=True)
    )


def model_inputs(model: Model, statistics: Statistics, batch: Batch) -> dict:
    """The arguments of a model, normalized, by their names.

    FLARE and Transolver see input values and, for want of a better place, the global tokens at
    every point; GeoTransolver sees embedding and input values side by side as its local embedding,
    with geometry and global tokens as its context. Where it looks at neighbours, coordinates and
    geometry keep their own unit.
    """
    tokens = batch.global_embedding
    if tokens is not None:
        tokens = _normalized(statistics.global_embedding, tokens)
    if not isinstance(model, GeoTransolver):
        (stream,), (of,) = batch.streams, statistics.streams
        embedding = of.embedding.normalize(stream.embedding)
        values = [] if stream.fx is None else [_normalized(of.fx, stream.fx)]
        if tokens is not None:
            flat = tokens.reshape(tokens.shape[0], 1, -1)
            values.append(jnp.broadcast_to(flat, (*embedding.shape[:2], flat.shape[-1])))
        # Where points have nothing but their places, these are values too.
        values = values or [embedding]
        unified = getattr(model, "unified_pos", False)
        return {
            "fx": jnp.concatenate(values, axis=-1),
            "embedding": None if unified else embedding,
        }

    embeddings = map(local_embedding, statistics.streams, batch.streams)
    inputs = {"local_embedding": _one_or_all(tuple(embeddings)), "global_embedding": tokens}
    if batch.geometry is not None:
        inputs["geometry"] = (
            batch.geometry[..., :COORDINATES]
            if model.include_local_features
            else _normalized(statistics.geometry, batch.geometry)
        )
        inputs["geometry_mask"] = batch.geometry_mask
    if model.include_local_features:
        inputs["local_positions"] = _one_or_all(tuple(map(positions, batch.streams)))
        found = tuple(stream.neighborhoods for stream in batch.streams)
        inputs["neighborhoods"] = None if None in found else _one_or_all(found)
    return inputs


def local_embedding(of: StreamStatistics, stream: Stream) -> Float[Array, "B N C"]:
    """What GeoTransolver sees of the points of a stream."""
    embedding = of.embedding.normalize(stream.embedding)
    if stream.fx is None:
        return embedding
    return jnp.concatenate([embedding, _normalized(of.fx, stream.fx)], axis=-1)


def positions(stream: Stream | Cloud) -> Float[AnyArray, "*B N 3"]:
    """The coordinates by which neighbours are searched."""
    return stream.embedding if stream.positions is None else stream.positions


def _one_or_all(values: tuple) -> Any:
    """A model of one stream takes it alone."""
    return values[0] if len(values) == 1 else values


def _normalized(scale: Scale | None, values: jax.Array) -> jax.Array:
    if scale is None:
        raise ValueError("statistics: expected those of all that a batch has; got fewer")
    return scale.normalize(values)
