"""What training and evaluation build from a configuration: device mesh, data and model."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx
from jaxtyping import PyTree

import parallel
from experiments.configuration.schema import (
    ExperimentConfig,
    FlareConfig,
    GeoTransolverConfig,
    MeshConfig,
    ModelConfig,
    StoreConfig,
    TransolverConfig,
)
from experiments.data.dataset import Dataset
from experiments.data.description import Description
from experiments.models import Model
from experiments.prediction import COORDINATES
from flare_jax import FLARE
from geotransolver_jax import GeoTransolver, Transolver


def make_device_mesh(config: MeshConfig) -> jax.sharding.Mesh:
    """Makes the device mesh, on virtual CPU devices if asked for.

    Raises:
        ValueError: see `parallel.make_mesh`; or a process has no device in the mesh.
    """
    if config.cpu_devices is not None:
        if config.cpu_devices < 1:
            raise ValueError(f"mesh.cpu_devices: expected at least 1; got {config.cpu_devices}")
        try:
            jax.config.update("jax_num_cpu_devices", config.cpu_devices)
        except RuntimeError:
            # JAX has started, as in the second job of a sweep.
            if jax.local_device_count() != config.cpu_devices:
                raise ValueError(
                    f"mesh.cpu_devices: expected {jax.local_device_count()}, as this process "
                    f"started with; got {config.cpu_devices}"
                ) from None
    try:
        mesh = parallel.make_mesh(config.data, config.points, config.heads)
    except ValueError as error:
        if jax.default_backend() == "cpu":
            raise ValueError(f"{error}, or set mesh.cpu_devices") from error
        raise
    processes = {device.process_index for device in mesh.devices.flat}
    if len(processes) < jax.process_count():
        raise ValueError(
            f"mesh: expected devices of all {jax.process_count()} processes, each with "
            f"{jax.local_device_count()}; got a mesh of {mesh.size}"
        )
    return mesh


def build_model(config: ModelConfig, data: Description, seed: int) -> Model:
    """Makes the model that a configuration names, its widths taken from the data.

    Raises:
        ValueError: arguments that do not fit together, the data or the mesh.
    """
    arguments = dataclasses.asdict(config)
    for name in ("name", "structured", "concrete_dropout_weight"):
        arguments.pop(name, None)
    arguments["rngs"] = nnx.Rngs(params=seed, dropout=seed)
    structured = getattr(config, "structured", False) or getattr(config, "unified_pos", False)
    if structured:
        if data.structured_shape is None:
            raise ValueError("model.structured: expected False for data without a grid; got True")
        arguments["structured_shape"] = data.structured_shape
    if isinstance(config, FlareConfig | TransolverConfig):
        return _single_stream(config, data, arguments)
    if isinstance(config, GeoTransolverConfig):
        return _geotransolver(config, data, arguments)
    raise ValueError(f"model.name: no model {config.name!r}")


def _single_stream(
    config: FlareConfig | TransolverConfig, data: Description, arguments: dict
) -> Model:
    if len(data.streams) > 1:
        raise ValueError(
            f"model.name: expected geotransolver or geotransolver_fa for the {len(data.streams)} "
            f"streams of the data; got {config.name}"
        )
    (stream,) = data.streams
    width = stream.fx + math.prod(data.global_embedding or (0,))
    kind = FLARE if isinstance(config, FlareConfig) else Transolver
    return kind(
        functional_dim=width or stream.embedding,
        out_dim=len(stream.fields),
        embedding_dim=None if config.unified_pos else stream.embedding,
        **arguments,
    )


def _geotransolver(config: GeoTransolverConfig, data: Description, arguments: dict) -> Model:
    geometry = data.geometry
    if config.include_local_features:
        if geometry is None:
            raise ValueError(
                "model.include_local_features: expected False for data without a geometry; got True"
            )
        for stream in data.streams:
            if not stream.positions and stream.embedding != min(geometry, COORDINATES):
                raise ValueError(
                    f"data.streams.{stream.name}.local_positions: expected coordinates, since "
                    f"model.include_local_features=true and the embedding has {stream.embedding} "
                    "columns; got null"
                )
        geometry = min(geometry, COORDINATES)
    return GeoTransolver(
        functional_dim=[stream.embedding + stream.fx for stream in data.streams],
        out_dim=[len(stream.fields) for stream in data.streams],
        geometry_dim=geometry,
        global_dim=None if data.global_embedding is None else data.global_embedding[1],
        **arguments,
    )


def cache_neighbors(config: ExperimentConfig, dataset: Dataset) -> None:
    """Has the neighbours that a model looks at found once, where whole clouds of a store are read.

    The splits hand them out from then on.
    """
    model, data = config.model, config.data
    if not (isinstance(data, StoreConfig) and data.cache_neighbors):
        return
    if not (isinstance(model, GeoTransolverConfig) and model.include_local_features):
        return
    from experiments.meshes.neighbor_cache import NeighborCache

    splits: Iterable[Any] = dataset.splits.values()
    for split in splits:
        if not split.is_drawn:
            radius, count = max(model.radii), max(model.neighbors_in_radius)
            split.neighbors = NeighborCache(split, radius, count)


def describe_mesh(mesh: jax.sharding.Mesh) -> str:
    """The device mesh in words, as in `data=1 x points=4 x heads=1 (4 cpu devices)`."""
    sizes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
    devices = math.prod(mesh.shape.values())
    kind = mesh.devices.flat[0].device_kind
    processes = len({device.process_index for device in mesh.devices.flat})
    of = f" of {processes} processes" if processes > 1 else ""
    return f"{sizes} ({devices} {kind} device{'s' if devices > 1 else ''}{of})"


def count_parameters(params: PyTree) -> int:
    """Number of weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
