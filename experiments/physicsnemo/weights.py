"""Weights from PhysicsNeMo and for it: its state dict, as NumPy arrays."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from experiments.models import Model
from experiments.physicsnemo import names

# Largest difference allowed between a buffer of the reference and what is computed here instead.
_BUFFER_TOLERANCE = 1e-5


def load_state_dict(model: Model, state_dict: Mapping[str, np.ndarray]) -> None:
    """Copies the weights of a PhysicsNeMo 2.2.2 model into ours, in place.

    Buffers of the reference that are computed here (unified positions, time frequencies, activation
    caps) may be there or not; where they are, they must agree. Weights that the reference makes and
    never reads (cross-attention of a GeoTransolver without context) are passed over.

    Args:
        model: a model with the same arguments as the one that the weights come from. Its weights
            stay where they are placed.
        state_dict: the tensors by their PyTorch names, as NumPy arrays.

    Raises:
        ValueError: names every missing, surplus and misshapen key; the model is then unchanged.
        TypeError: there is no correspondence for this kind of model.
    """
    entries = list(names.entries(model))
    problems = _problems(model, entries, state_dict)
    if problems:
        raise ValueError(
            f"load_state_dict: the weights do not fit this {type(model).__name__}: "
            + "; ".join(problems)
        )

    # Everything is made before anything is set, so that a failure leaves the model as it was.
    layers: dict[int, list[tuple[int | None, np.ndarray]]] = {}
    variables = {id(entry.variable): entry.variable for entry in entries}
    for entry in entries:
        tensor = entry.convert(np.asarray(state_dict[entry.name]))
        layers.setdefault(id(entry.variable), []).append((entry.layer, tensor))
    values = {}
    for key, pieces in layers.items():
        variable = variables[key]
        pieces.sort(key=lambda piece: -1 if piece[0] is None else piece[0])
        stacked = pieces[0][1] if pieces[0][0] is None else np.stack([p[1] for p in pieces])
        value = stacked.astype(variable[...].dtype)
        values[key] = jax.device_put(value, variable[...].sharding)
    for key, value in values.items():
        variables[key][...] = value


def state_dict(model: Model, state_mixing_mode: str = "weighted") -> dict[str, np.ndarray]:
    """The state dict of the reference's model that computes what ours does.

    Args:
        model: a model of ours.
        state_mixing_mode: of a GeoTransolver. One without context has nothing to mix, but the
            reference holds weights for it all the same, here zeros.

    Returns:
        float32 tensors by their PyTorch names.

    Raises:
        TypeError: there is no correspondence for this kind of model.
    """
    tensors = {entry.name: entry.tensor() for entry in names.entries(model)}
    other = {"weighted": "concat_project", "concat_project": "state_mixing"}[state_mixing_mode]
    for name, shape in names.unused(model):
        if f".{other}" not in name:
            tensors[name] = np.zeros(shape)
    tensors |= dict(names.buffers(model))
    return {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}


def _problems(
    model: Model, entries: Sequence[names.Entry], state_dict: Mapping[str, np.ndarray]
) -> list[str]:
    problems, buffers = [], dict(names.buffers(model))
    expected = {entry.name: entry.shape for entry in entries}
    missing = sorted(expected.keys() - state_dict.keys())
    known = {*expected, *buffers, *dict(names.unused(model))}
    surplus = sorted(state_dict.keys() - known)
    if missing:
        problems.append("missing " + ", ".join(missing))
    if surplus:
        problems.append("surplus " + ", ".join(surplus))
    for name, shape in expected.items():
        if name in state_dict and np.shape(state_dict[name]) != shape:
            problems.append(f"{name} expected shape {shape}, got {np.shape(state_dict[name])}")
    for name, value in buffers.items():
        if name not in state_dict:
            continue
        given = np.asarray(state_dict[name])
        if given.shape != value.shape:
            problems.append(f"{name} expected shape {value.shape}, got {given.shape}")
        elif not np.abs(given - value).max() <= _BUFFER_TOLERANCE:
            problems.append(f"{name} differs from the values that the model computes")
    return problems
