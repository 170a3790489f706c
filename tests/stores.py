"""Small stores of simulations, whose values tell the row and the sample that they belong to."""

from pathlib import Path

import numpy as np

from experiments.configuration.schema import StoreConfig, StreamConfig
from experiments.meshes.dataset import StoreSplit
from experiments.meshes.store import Store, create_store, write_sample

SURFACE_FIELDS = ["p", "tau_x", "tau_y", "tau_z"]
VOLUME_FIELDS = ["U_x", "U_y", "U_z", "p", "nut"]
SURFACE = StreamConfig(
    embedding=["surface_mesh_centers"], fx=["surface_normals"], targets=["surface_fields"]
)
VOLUME = StreamConfig(
    embedding=["volume_mesh_centers"],
    fx=["volume_signed_distance"],
    local_positions="volume_mesh_centers",
    targets=["volume_fields.U", "volume_fields.p"],
)


def cloud(kind: str, rows: int, sample: int, fields: int) -> dict[str, np.ndarray]:
    """Arrays of a cloud in which the first coordinate of a point is the number of its row."""
    draw = np.random.default_rng((sample, rows))
    row = np.arange(rows, dtype=np.float32)
    centers = np.stack([row, draw.random(rows) + sample, draw.random(rows)], 1, dtype=np.float32)
    columns = row[:, None] + np.arange(fields, dtype=np.float32) / 8
    return {f"{kind}_mesh_centers": centers, f"{kind}_fields": columns}


def contents(sample: int, surface: int = 30, volume: int = 70, triangles: int = 20) -> dict:
    """Arrays of one sample."""
    draw = np.random.default_rng(sample)
    normals = draw.standard_normal((surface, 3)).astype(np.float32)
    return {
        **cloud("surface", surface, sample, len(SURFACE_FIELDS)),
        **cloud("volume", volume, sample, len(VOLUME_FIELDS)),
        "surface_normals": normals,
        "surface_areas": draw.random(surface).astype(np.float32) + 0.5,
        "volume_signed_distance": np.arange(volume, dtype=np.float32),
        "stl_centers": draw.random((triangles, 3)).astype(np.float32) * 30,
        "stl_areas": draw.random(triangles).astype(np.float32) + 0.5,
    }


def numbers(sample: int) -> dict:
    """Attributes of one sample."""
    return {
        "surface_field_names": SURFACE_FIELDS,
        "volume_field_names": VOLUME_FIELDS,
        "air_density": 1.25,
        "stream_velocity": 20.0 + sample,
        "chord": 2.0 + sample,
    }


def name_of(sample: int) -> str:
    """Name of a sample."""
    return f"run_{sample:02d}"


def make_store(path: Path, samples: int = 6, *, shuffled: bool = False, vary: int = 3) -> Path:
    """A store of samples on clouds of different length; `shuffled` only says that they are."""
    create_store(path)
    for i in range(samples):
        arrays = contents(i, 30 + vary * i, 70 + vary * i, 20 + vary * i)
        kinds = ["surface", "volume", "stl"] if shuffled else []
        write_sample(path, name_of(i), arrays, numbers(i) | {"shuffled": kinds})
    return path


def config_of(path: Path, **changes) -> StoreConfig:
    """A configuration that reads the surface of a store."""
    return StoreConfig(**dict(path=str(path), streams={"surface": SURFACE}) | changes)


def split_of(path, resolution=None, **changes) -> StoreSplit:
    """All samples of a store."""
    config = config_of(path, **changes)
    return StoreSplit(
        list(Store(path)),
        config,
        resolution=resolution,
        geometry_resolution=config.geometry_resolution,
    )
