"""Which tensor of a PhysicsNeMo model is which variable of ours."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from experiments.models import Model
from flare_jax import FLARE, FLAREAttention
from flare_jax.block import Block
from flare_jax.embeddings import time_frequencies, unified_position
from flare_jax.linear import Linear
from flare_jax.mlp import MLP
from flare_jax.norm import LayerNorm
from flare_jax.transformer import PointTransformer
from geotransolver_jax import GALE, GALEFA, GeoTransolver, PhysicsAttention, Transolver
from geotransolver_jax.block import GALEBlock
from geotransolver_jax.concrete_dropout import ConcreteDropout
from geotransolver_jax.context import ContextBuilder, ContextTokenizer
from geotransolver_jax.projection import GridProjection, SliceProjection


@dataclass(frozen=True)
class Entry:
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

    def tensor(self) -> np.ndarray:
        """The tensor with the values of the variable."""
        values = np.asarray(self.variable[...])
        values = values if self.layer is None else values[self.layer]
        if self.kernel:
            return values.transpose(-1, -2, *range(values.ndim - 2))
        return values.reshape(self.shape)


def _linear(name: str, layer: int | None, linear: Linear | GridProjection) -> Iterator[Entry]:
    yield Entry(f"{name}.weight", linear.kernel, layer, kernel=True)
    if hasattr(linear, "bias"):
        yield Entry(f"{name}.bias", linear.bias, layer)


def _norm(name: str, layer: int | None, norm: LayerNorm) -> Iterator[Entry]:
    yield Entry(f"{name}.weight", norm.scale, layer)
    yield Entry(f"{name}.bias", norm.bias, layer)


def _mlp(name: str, layer: int | None, mlp: MLP) -> Iterator[Entry]:
    yield from _linear(f"{name}.layers.0", layer, mlp.linear_in)
    yield from _linear(f"{name}.layers.2", layer, mlp.linear_out)
    learned = {"prelu": "weight", "stan": "beta"}.get(mlp.activation.name)
    if learned is not None:
        yield Entry(f"{name}.layers.1.{learned}", mlp.activation.parameter, layer)


def _flare_attention(name: str, layer: int | None, attention: FLAREAttention) -> Iterator[Entry]:
    yield Entry(f"{name}.q_global", attention.latent_queries, layer, leading=1)
    yield from _linear(f"{name}.in_project_x", layer, attention.project_in)
    yield from _linear(f"{name}.self_k", layer, attention.project_key)
    yield from _linear(f"{name}.self_v", layer, attention.project_value)
    yield from _linear(f"{name}.out_linear", layer, attention.project_out)


def _slices(name: str, layer: int | None, attention: SliceProjection) -> Iterator[Entry]:
    yield from _linear(f"{name}.in_project_x", layer, attention.project_point)
    if attention.plus:
        yield from _linear(f"{name}.proj_temperature.0", layer, attention.temperature_in)
        yield from _linear(f"{name}.proj_temperature.2", layer, attention.temperature_out)
    else:
        yield from _linear(f"{name}.in_project_fx", layer, attention.project_value)
    yield Entry(f"{name}.temperature", attention.temperature, layer, leading=2, trailing=1)
    yield from _linear(f"{name}.in_project_slice", layer, attention.project_slice)


def _physics_attention(
    name: str, layer: int | None, attention: PhysicsAttention
) -> Iterator[Entry]:
    yield from _slices(name, layer, attention)
    yield from _linear(f"{name}.qkv_project", layer, attention.project_qkv)
    yield from _linear(f"{name}.out_linear", layer, attention.project_out)


def _with_context(
    attention_entries: Callable[..., Iterator[Entry]],
) -> Callable[..., Iterator[Entry]]:
    """Entries of an attention layer that also attends to a context."""

    def entries(name: str, layer: int | None, attention: GALE | GALEFA) -> Iterator[Entry]:
        yield from attention_entries(name, layer, attention)
        yield from _concrete(f"{name}.out_dropout", layer, attention.concrete)
        cross = attention.cross
        if cross is None:
            return
        yield from _linear(f"{name}.cross_q", layer, cross.query)
        yield from _linear(f"{name}.cross_k", layer, cross.key)
        yield from _linear(f"{name}.cross_v", layer, cross.value)
        if isinstance(cross.mixing, Linear):
            yield from _linear(f"{name}.concat_project.0", layer, cross.mixing)
        else:
            yield Entry(f"{name}.state_mixing", cross.mixing, layer)

    return entries


_ATTENTION: dict[type, Callable[..., Iterator[Entry]]] = {
    FLAREAttention: _flare_attention,
    PhysicsAttention: _physics_attention,
    GALE: _with_context(_physics_attention),
    GALEFA: _with_context(_flare_attention),
}


def _concrete(name: str, layer: int | None, dropout: ConcreteDropout | None) -> Iterator[Entry]:
    if dropout is not None:
        yield Entry(f"{name}.p_logit", dropout.logit, layer)


def _block(name: str, layer: int, block: Block | GALEBlock) -> Iterator[Entry]:
    yield from _norm(f"{name}.ln_1", layer, block.norm_attention)
    yield from _ATTENTION[type(block.attention)](f"{name}.Attn", layer, block.attention)
    yield from _norm(f"{name}.ln_mlp1.0", layer, block.norm_mlp)
    yield from _mlp(f"{name}.ln_mlp1.1", layer, block.mlp)


def _point_transformer(model: PointTransformer) -> Iterator[Entry]:
    yield from _mlp("preprocess", None, model.preprocess)
    if model.time_input:
        yield from _linear("time_fc.0", None, model.time_embedding.linear_in)
        yield from _linear("time_fc.2", None, model.time_embedding.linear_out)
    depth = model.stack.depth
    for layer in range(depth):
        yield from _block(f"blocks.{layer}", layer, model.stack.blocks)
    # The reference keeps the output layer in its last block.
    yield from _norm(f"blocks.{depth - 1}.ln_mlp2.0", None, model.norm_out)
    yield from _linear(f"blocks.{depth - 1}.ln_mlp2.1", None, model.project_out)


def _geotransolver(model: GeoTransolver) -> Iterator[Entry]:
    yield from _context("context_builder", model.context)
    for i, preprocess in enumerate(model.preprocess):
        yield from _mlp(f"preprocess.{i}", None, preprocess)
    block = model.stack.blocks
    for layer in range(model.stack.depth):
        name = f"blocks.{layer}"
        yield from _block(name, layer, block)
        yield from _concrete(f"{name}.attn_dropout", layer, block.attention_dropout)
        yield from _concrete(f"{name}.ffn_dropout", layer, block.mlp_dropout)
    for i, (norm, linear) in enumerate(zip(model.norm_out, model.project_out, strict=True)):
        yield from _norm(f"ln_mlp_out.{i}.0", None, norm)
        yield from _linear(f"ln_mlp_out.{i}.1", None, linear)
    if model.time_in is not None and model.time_out is not None:
        yield from _linear("time_fc.0", None, model.time_in)
        yield from _linear("time_fc.2", None, model.time_out)


def _context(name: str, context: ContextBuilder) -> Iterator[Entry]:
    for i, scales in enumerate(context.local or []):
        local = f"{name}.local_extractors.{i}"
        pairs = zip(scales.scales, context.local_tokenizers[i], strict=True)
        for j, (scale, tokenizer) in enumerate(pairs):
            for place, linear in (
                (0, scale.linear_in),
                (2, scale.linear_mid),
                (4, scale.linear_out),
            ):
                yield from _linear(f"{local}.processors.{j}.mlp.layers.{place}", None, linear)
            yield from _tokenizer(f"{local}.tokenizers.{j}", tokenizer)
    if context.geometry is not None:
        yield from _tokenizer(f"{name}.geometry_tokenizer", context.geometry)
    if context.globals is not None:
        yield from _tokenizer(f"{name}.global_tokenizer", context.globals)


def _tokenizer(name: str, tokenizer: ContextTokenizer) -> Iterator[Entry]:
    yield from _slices(name, None, tokenizer)
    yield from _concrete(f"{name}.output_dropout", None, tokenizer.concrete)


def entries(model: Model) -> Iterator[Entry]:
    """Every tensor of the reference that a model has a variable for.

    Raises:
        TypeError: there is no correspondence for this kind of model.
    """
    for kind, of_kind in _MODELS.items():
        if isinstance(model, kind):
            return of_kind(model)
    kinds = ", ".join(kind.__name__ for kind in _MODELS)
    raise TypeError(f"load_state_dict: expected one of {kinds}; got {type(model).__name__}")


_MODELS = {
    FLARE: _point_transformer,
    Transolver: _point_transformer,
    GeoTransolver: _geotransolver,
}


def unused(model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors that the reference holds and never reads, and their shapes; there is no variable.

    Of the last two names a model has one, by how it would mix states.
    """
    attention = model.stack.blocks.attention
    if not isinstance(attention, GALE) or attention.cross is not None:
        return
    width = attention.project_slice.kernel.shape[-2]
    shapes: dict[str, tuple[int, ...]] = {f"cross_{part}.bias": (width,) for part in "qkv"}
    shapes |= {"cross_q.weight": (width, width)}
    shapes |= {f"cross_{part}.weight": (width, 0) for part in "kv"}
    shapes |= {"concat_project.0.weight": (width, 2 * width), "concat_project.0.bias": (width,)}
    shapes |= {"state_mixing": ()}
    for layer in range(model.stack.depth):
        yield from ((f"blocks.{layer}.Attn.{name}", shape) for name, shape in shapes.items())


def buffers(model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors of the reference that are computed here, and their values."""
    several = isinstance(model, GeoTransolver)
    perceptrons: Any = model.preprocess if several else [model.preprocess]
    if isinstance(model, PointTransformer):
        if model.unified_pos and model.structured_shape is not None:
            yield "embedding", np.asarray(unified_position(model.structured_shape, model.ref))[None]
        if model.time_input:
            yield "time_embed.freqs", time_frequencies(model.time_embedding.width)
    if perceptrons[0].activation.name in ("cappek_leaky_relu", "capped_gelu"):
        mlps = [f"preprocess.{i}" for i in range(len(perceptrons))] if several else ["preprocess"]
        mlps += [f"blocks.{i}.ln_mlp1.1" for i in range(model.stack.depth)]
        for name in mlps:
            yield f"{name}.layers.1.cap", np.ones((), np.float32)
