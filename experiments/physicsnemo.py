"""Weights from PhysicsNeMo: its state dict, as NumPy arrays, copied into a model of ours."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx

from flare_jax import FLARE, FLAREAttention
from flare_jax.embeddings import time_frequencies, unified_position
from flare_jax.linear import Linear
from flare_jax.transformer import PointTransformer
from geotransolver_jax import PhysicsAttention, Transolver
from geotransolver_jax.attention import GridProjection

# Largest difference allowed between a buffer of the reference and what is computed here instead.
_BUFFER_TOLERANCE = 1e-5
_MODELS = (FLARE, Transolver)


@dataclass(frozen=True)
class _Entry:
    """One tensor of the reference and where it goes.

    Attributes:
        name: its key in the state dict.
        variable: the variable it belongs to, whole or stacked over layers.
        layer: its place in the stack; `None` where the variable is not stacked.
        kernel: whether it is a kernel, `(out, in, ...)` there and `(..., in, out)` here.
        leading: axes of 1 that it has before those of the variable.
        trailing: axes of 1 that it has after them.
    """

    name: str
    variable: nnx.Variable
    layer: int | None
    kernel: bool = False
    leading: int = 0
    trailing: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the state dict."""
        shape = self._own_shape
        shape = (shape[-1], shape[-2], *shape[:-2]) if self.kernel else shape
        return (1,) * self.leading + shape + (1,) * self.trailing

    @property
    def _own_shape(self) -> tuple[int, ...]:
        return self.variable.shape if self.layer is None else self.variable.shape[1:]

    def convert(self, tensor: np.ndarray) -> np.ndarray:
        """The tensor in the layout of the variable."""
        if self.kernel:
            return tensor.transpose(*range(2, tensor.ndim), 1, 0)
        return tensor.reshape(self._own_shape)


def load_state_dict(model: PointTransformer, state_dict: Mapping[str, np.ndarray]) -> None:
    """Copies the weights of a PhysicsNeMo 2.2.2 model into ours, in place.

    Buffers of the reference that are computed here (unified positions, time frequencies, activation
    caps) may be there or not; where they are, they must agree.

    Args:
        model: a model with the same arguments as the one that the weights come from. Its weights
            stay where they are placed.
        state_dict: the tensors by their PyTorch names, as NumPy arrays.

    Raises:
        ValueError: names every missing, surplus and misshapen key; the model is then unchanged.
        TypeError: there is no correspondence for this kind of model.
    """
    if not isinstance(model, _MODELS):
        kinds = " or ".join(kind.__name__ for kind in _MODELS)
        raise TypeError(f"load_state_dict: expected a {kinds} model; got {type(model).__name__}")
    entries, buffers = list(_entries(model)), dict(_buffers(model))
    problems = _problems(entries, buffers, state_dict)
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


def _problems(entries, buffers, state_dict) -> list[str]:
    problems = []
    expected = {entry.name: entry.shape for entry in entries}
    missing = sorted(expected.keys() - state_dict.keys())
    surplus = sorted(state_dict.keys() - expected.keys() - buffers.keys())
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


def _linear(name: str, layer, linear: Linear | GridProjection) -> Iterator[_Entry]:
    yield _Entry(f"{name}.weight", linear.kernel, layer, kernel=True)
    if hasattr(linear, "bias"):
        yield _Entry(f"{name}.bias", linear.bias, layer)


def _norm(name: str, layer, norm) -> Iterator[_Entry]:
    yield _Entry(f"{name}.weight", norm.scale, layer)
    yield _Entry(f"{name}.bias", norm.bias, layer)


def _mlp(name: str, layer, mlp) -> Iterator[_Entry]:
    yield from _linear(f"{name}.layers.0", layer, mlp.linear_in)
    yield from _linear(f"{name}.layers.2", layer, mlp.linear_out)
    learned = {"prelu": "weight", "stan": "beta"}.get(mlp.activation.name)
    if learned is not None:
        yield _Entry(f"{name}.layers.1.{learned}", mlp.activation.parameter, layer)


def _flare_attention(name: str, layer, attention: FLAREAttention) -> Iterator[_Entry]:
    yield _Entry(f"{name}.q_global", attention.latent_queries, layer, leading=1)
    yield from _linear(f"{name}.in_project_x", layer, attention.project_in)
    yield from _linear(f"{name}.self_k", layer, attention.project_key)
    yield from _linear(f"{name}.self_v", layer, attention.project_value)
    yield from _linear(f"{name}.out_linear", layer, attention.project_out)


def _physics_attention(name: str, layer, attention: PhysicsAttention) -> Iterator[_Entry]:
    yield from _linear(f"{name}.in_project_x", layer, attention.project_point)
    if attention.plus:
        yield from _linear(f"{name}.proj_temperature.0", layer, attention.temperature_in)
        yield from _linear(f"{name}.proj_temperature.2", layer, attention.temperature_out)
    else:
        yield from _linear(f"{name}.in_project_fx", layer, attention.project_value)
    yield _Entry(f"{name}.temperature", attention.temperature, layer, leading=2, trailing=1)
    yield from _linear(f"{name}.in_project_slice", layer, attention.project_slice)
    yield from _linear(f"{name}.qkv_project", layer, attention.project_qkv)
    yield from _linear(f"{name}.out_linear", layer, attention.project_out)


_ATTENTION = {FLAREAttention: _flare_attention, PhysicsAttention: _physics_attention}


def _entries(model: PointTransformer) -> Iterator[_Entry]:
    yield from _mlp("preprocess", None, model.preprocess)
    if model.time_input:
        yield from _linear("time_fc.0", None, model.time_embedding.linear_in)
        yield from _linear("time_fc.2", None, model.time_embedding.linear_out)
    block, depth = model.stack.blocks, model.stack.depth
    for layer in range(depth):
        name = f"blocks.{layer}"
        yield from _norm(f"{name}.ln_1", layer, block.norm_attention)
        yield from _ATTENTION[type(block.attention)](f"{name}.Attn", layer, block.attention)
        yield from _norm(f"{name}.ln_mlp1.0", layer, block.norm_mlp)
        yield from _mlp(f"{name}.ln_mlp1.1", layer, block.mlp)
    # The reference keeps the output layer in its last block.
    yield from _norm(f"blocks.{depth - 1}.ln_mlp2.0", None, model.norm_out)
    yield from _linear(f"blocks.{depth - 1}.ln_mlp2.1", None, model.project_out)


def _buffers(model: PointTransformer) -> Iterator[tuple[str, np.ndarray]]:
    if model.unified_pos:
        yield "embedding", np.asarray(unified_position(model.structured_shape, model.ref))[None]
    if model.time_input:
        yield "time_embed.freqs", time_frequencies(model.time_embedding.width)
    if model.preprocess.activation.name in ("cappek_leaky_relu", "capped_gelu"):
        mlps = ["preprocess"] + [f"blocks.{i}.ln_mlp1.1" for i in range(model.stack.depth)]
        for name in mlps:
            yield f"{name}.layers.1.cap", np.ones((), np.float32)
