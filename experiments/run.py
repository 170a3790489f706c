"""What training and evaluation build from a configuration: device mesh, data and model."""

import dataclasses
import math

import jax
from flax import nnx

import parallel
from experiments.config import FlareConfig, MeshConfig, ModelConfig
from experiments.data import Dataset
from flare_jax import FLARE


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
    if not isinstance(config, FlareConfig):
        raise ValueError(f"model.name: no model {config.name!r}")
    train = dataset.splits["train"]
    arguments = dataclasses.asdict(config)
    del arguments["name"]
    structured = arguments.pop("structured") or config.unified_pos
    return FLARE(
        functional_dim=train.fx.shape[-1],
        out_dim=train.target.shape[-1],
        embedding_dim=None if config.unified_pos else train.embedding.shape[-1],
        structured_shape=dataset.structured_shape if structured else None,
        rngs=nnx.Rngs(params=seed, dropout=seed),
        **arguments,
    )


def describe_mesh(mesh: jax.sharding.Mesh) -> str:
    """The device mesh in words, as in `data=1 x points=4 x heads=1 (4 cpu devices)`."""
    sizes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
    devices = math.prod(mesh.shape.values())
    kind = mesh.devices.flat[0].device_kind
    return f"{sizes} ({devices} {kind} device{'s' if devices > 1 else ''})"


def count_parameters(params) -> int:
    """Number of weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
