"""The models that are measured, and their inputs, as those of the reference's own benchmark."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, PyTree

from flare_jax import FLARE
from geotransolver_jax import GeoTransolver, Transolver
from parallel.parameters import split_weights

MODELS = ("flare", "transolver", "gale", "gale_fa", "gale_local")
DTYPES = ("float32", "bfloat16")
_VALUES, _POSITIONS, _FIELDS, _GLOBALS = 3, 3, 4, 2
# The geometry has a quarter of the points.
_POINTS_A_GEOMETRY_POINT = 4


@dataclass(frozen=True)
class Case:
    """One model and the size of its input.

    Attributes:
        model: one of `MODELS`; `gale_local` is `gale` with features of neighbours.
        points: points of a sample.
        batch: samples.
        width: width of the points inside the model.
        heads: attention heads.
        latents: latent queries or slices of each head.
        layers: blocks.
        mlp_ratio: hidden width of the blocks' perceptrons, in units of `width`.
        dtype: type to compute in.
        remat: what is computed again for the gradient.
    """

    model: str
    points: int
    batch: int = 1
    width: int = 128
    heads: int = 8
    latents: int = 64
    layers: int = 4
    mlp_ratio: int = 4
    dtype: str = "float32"
    remat: str = "none"

    def __post_init__(self) -> None:
        for name, names in (("model", MODELS), ("dtype", DTYPES)):
            if getattr(self, name) not in names:
                raise ValueError(
                    f"{name}: expected one of {', '.join(names)}; got {getattr(self, name)!r}"
                )
        for name in ("points", "batch", "width", "heads", "latents", "layers", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1; got {getattr(self, name)}")

    def make_model(self) -> FLARE | Transolver | GeoTransolver:
        """The model with its initial weights."""
        common: dict[str, Any] = dict(
            out_dim=_FIELDS,
            n_layers=self.layers,
            n_hidden=self.width,
            n_head=self.heads,
            slice_num=self.latents,
            mlp_ratio=self.mlp_ratio,
            dtype=self.dtype,
            remat=self.remat,
            rngs=nnx.Rngs(0),
        )
        if self.model in ("flare", "transolver"):
            kind = FLARE if self.model == "flare" else Transolver
            return kind(functional_dim=_VALUES, embedding_dim=_POSITIONS, **common)
        if self.model == "gale_local":
            common |= dict(
                include_local_features=True, radii=[0.05, 0.25], neighbors_in_radius=[8, 32]
            )
        return GeoTransolver(
            functional_dim=_VALUES + _POSITIONS,
            geometry_dim=_POSITIONS,
            global_dim=_GLOBALS,
            attention_type="GALE_FA" if self.model == "gale_fa" else "GALE",
            **common,
        )

    def input_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the arguments of a call, by name."""
        points = (self.batch, self.points)
        geometry = (self.batch, max(self.points // _POINTS_A_GEOMETRY_POINT, 1))
        if self.model in ("flare", "transolver"):
            shapes = {"fx": (*points, _VALUES), "embedding": (*points, _POSITIONS)}
        else:
            shapes = {
                "local_embedding": (*points, _VALUES + _POSITIONS),
                "geometry": (*geometry, _POSITIONS),
                "global_embedding": (self.batch, 1, _GLOBALS),
            }
            if self.model == "gale_local":
                shapes["local_positions"] = (*points, _POSITIONS)
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def make_inputs(self) -> dict[str, np.ndarray]:
        """Arguments of a call: positions uniform in a unit cube, the rest normal."""
        generator = np.random.default_rng(0)
        draw = {
            name: generator.random
            if name in ("local_positions", "geometry")
            else generator.standard_normal
            for name in self.input_shapes()
        }
        return {
            name: draw[name](shape.shape, dtype=np.float32)
            for name, shape in self.input_shapes().items()
        }


def make_function(model: nnx.Module, mode: str) -> tuple[nnx.State, Callable[..., PyTree]]:
    """A function of weights and inputs: `forward`, the prediction; `train`, the gradients.

    The loss is the mean square of the prediction, as in the reference's benchmark.
    """
    model.eval()
    graph, weights, rest = split_weights(model)

    def forward(weights: nnx.State, inputs: dict[str, Array]) -> Array:
        return nnx.merge(graph, weights, rest)(**inputs)

    def loss(weights: nnx.State, inputs: dict[str, Array]) -> Array:
        return jnp.mean(forward(weights, inputs).astype(jnp.float32) ** 2)

    return weights, forward if mode == "forward" else jax.grad(loss)
