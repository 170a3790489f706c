"""What training and evaluation build from a configuration: device mesh, data and model."""

import dataclasses
import math

import jax
from flax import nnx

import parallel
from experiments.data import Dataset
from experiments.prediction import input_widths
from experiments.schema import (
    FlareConfig,
    GeoTransolverConfig,
    MeshConfig,
    ModelConfig,
    TransolverConfig,
)
from flare_jax import FLARE
from geotransolver_jax import GeoTransolver, Transolver


def make_device_mesh(config: MeshConfig) -> jax.sharding.Mesh:
    """Makes the device mesh, on virtual CPU devices if asked for.

    Raises:
        ValueError: see `parallel.make_mesh`.
    """
    if config.cpu_devices is not None:
        if config.cpu_devices < 1:
            raise ValueError(f"mesh.cpu_devices: expected at least 1; got {config.cpu_devices}")
        try:
            jax.config.update("jax_num_cpu_devices", config.cpu_devices)
        except RuntimeError:
            # JAX has started, as in the second job of a sweep.
            if len(jax.devices()) != config.cpu_devices:
                raise ValueError(
                    f"mesh.cpu_devices: expected {len(jax.devices())}, as this process started "
                    f"with; got {config.cpu_devices}"
                ) from None
    return parallel.make_mesh(config.data, config.points, config.heads)


def build_model(config: ModelConfig, dataset: Dataset, seed: int) -> nnx.Module:
    """Makes the model that a configuration names, its widths taken from the data.

    Raises:
        ValueError: arguments that do not fit together, the data or the mesh.
    """
    widths = input_widths(dataset)
    arguments = dataclasses.asdict(config)
    for name in ("name", "structured", "concrete_dropout_weight"):
        arguments.pop(name, None)
    arguments |= {"out_dim": widths["target"], "rngs": nnx.Rngs(params=seed, dropout=seed)}
    structured = getattr(config, "structured", False) or getattr(config, "unified_pos", False)
    if structured:
        if dataset.structured_shape is None:
            raise ValueError("model.structured: expected False for data without a grid; got True")
        arguments["structured_shape"] = dataset.structured_shape
    if isinstance(config, FlareConfig | TransolverConfig):
        kind = FLARE if isinstance(config, FlareConfig) else Transolver
        of_tokens = widths.get("global_tokens", 0) * (widths["global_embedding"] or 0)
        return kind(
            functional_dim=(widths["fx"] or 0) + of_tokens,
            embedding_dim=None if config.unified_pos else widths["embedding"],
            **arguments,
        )
    if isinstance(config, GeoTransolverConfig):
        geometry = widths["geometry"]
        if config.include_local_features and geometry is not None:
            geometry = widths["embedding"]
        return GeoTransolver(
            functional_dim=widths["embedding"] + (widths["fx"] or 0),
            geometry_dim=geometry,
            global_dim=widths["global_embedding"],
            **arguments,
        )
    raise ValueError(f"model.name: no model {config.name!r}")


def describe_mesh(mesh: jax.sharding.Mesh) -> str:
    """The device mesh in words, as in `data=1 x points=4 x heads=1 (4 cpu devices)`."""
    sizes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
    devices = math.prod(mesh.shape.values())
    kind = mesh.devices.flat[0].device_kind
    return f"{sizes} ({devices} {kind} device{'s' if devices > 1 else ''})"


def count_parameters(params) -> int:
    """Number of weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
