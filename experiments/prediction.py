"""What a model is given of a batch, and what its output means."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from experiments.data import Batch, Statistics
from geotransolver_jax import GeoTransolver

_COORDINATES = 3


def predict(model: nnx.Module, statistics: Statistics, batch: Batch) -> Float[Array, "B N C_out"]:
    """The fields of a batch in physical units."""
    output = model(**model_inputs(model, statistics, batch), point_mask=batch.point_mask)
    output = output.astype(jnp.float32)
    return output * statistics.target_deviation + statistics.target_mean


def model_inputs(model: nnx.Module, statistics: Statistics, batch: Batch) -> dict[str, jax.Array]:
    """The arguments of a model, normalized, by their names.

    FLARE and Transolver see input values and, for want of a better place, the global tokens at
    every point; GeoTransolver sees positions and input values, with geometry and global tokens as
    its context. Where it looks at neighbours, positions and geometry keep their own unit.
    """
    fx = _normalized(statistics, batch, "fx")
    embedding = _normalized(statistics, batch, "embedding")
    tokens = _normalized(statistics, batch, "global_embedding")
    if not isinstance(model, GeoTransolver):
        values = [] if fx is None else [fx]
        if tokens is not None:
            flat = tokens.reshape(len(tokens), 1, -1)
            values.append(jnp.broadcast_to(flat, (*embedding.shape[:2], flat.shape[-1])))
        unified = getattr(model, "unified_pos", False)
        return {
            "fx": jnp.concatenate(values, axis=-1),
            "embedding": None if unified else embedding,
        }

    values = [embedding] if fx is None else [embedding, fx]
    inputs = {"local_embedding": jnp.concatenate(values, axis=-1), "global_embedding": tokens}
    if batch.geometry is not None:
        inputs["geometry"] = _normalized(statistics, batch, "geometry")
        inputs["geometry_mask"] = batch.geometry_mask
    if model.include_local_features:
        inputs["local_positions"] = batch.embedding
        inputs["geometry"] = batch.geometry[..., :_COORDINATES]
        inputs["neighborhoods"] = batch.neighborhoods
    return inputs


def input_widths(dataset) -> dict[str, int | None]:
    """Widths of the arrays of a data set, `None` for those that it lacks."""
    train = dataset.splits["train"]
    names = ("fx", "embedding", "target", "geometry", "global_embedding")
    arrays = {name: getattr(train, name) for name in names}
    widths = {name: None if x is None else x.shape[-1] for name, x in arrays.items()}
    if arrays["global_embedding"] is not None:
        widths["global_tokens"] = arrays["global_embedding"].shape[-2]
    return widths


def _normalized(statistics: Statistics, batch: Batch, name: str) -> jax.Array | None:
    values = getattr(batch, name)
    if values is None:
        return None
    mean, deviation = (getattr(statistics, f"{name}_{of}") for of in ("mean", "deviation"))
    return (values - mean) / deviation
