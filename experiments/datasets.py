"""The data set that a configuration names."""

from pathlib import Path
from typing import Any

from experiments.configuration.schema import (
    AirfoilConfig,
    BenchmarkConfig,
    DarcyConfig,
    DataConfig,
    StoreConfig,
)
from experiments.data.dataset import Dataset
from experiments.data.description import Description, StreamDescription
from experiments.data.in_memory import AirfoilSplit, GridSplit
from experiments.extras import require_extra
from experiments.problems.airfoil_cache import load_airfoil
from experiments.problems.benchmark_files import load_benchmark
from experiments.problems.darcy_cache import load_darcy
from experiments.problems.darcy_files import load_darcy_mat
from experiments.processes.coordination import first_then_others


def load_dataset(config: DataConfig) -> Dataset:
    """Loads the data set that a configuration names.

    Raises:
        ValueError: a file is damaged or does not hold what is asked for.
        FileNotFoundError: a file is not there.
    """
    if isinstance(config, DarcyConfig):
        return first_then_others(lambda: _load_darcy(config))
    if isinstance(config, AirfoilConfig):
        return first_then_others(lambda: _load_airfoil(config))
    if isinstance(config, BenchmarkConfig):
        return _load_benchmark(config)
    if isinstance(config, StoreConfig):
        return _load_store(config)
    raise ValueError(f"data.name: no loader for {config.name!r}")


def _sizes(config: DataConfig) -> dict[str, Any]:
    """Numbers of samples; a `null`, which is for stores alone, is refused where they are split."""
    return {"train": config.train, "validation": config.validation, "test": config.test}


def _load_darcy(config: DarcyConfig) -> Dataset:
    sizes = _sizes(config)
    if (config.mat_train is None) != (config.mat_test is None):
        raise ValueError("data: expected both or none of mat_train and mat_test; got one")
    if config.mat_train is not None and config.mat_test is not None:
        arrays = load_darcy_mat(
            Path(config.mat_train), Path(config.mat_test), config.resolution, sizes
        )
    else:
        arrays = load_darcy(config.resolution, sizes, config.seed, Path(config.cache_dir))
    points = config.resolution**2
    splits = {
        name: GridSplit(
            fx=split.permeability.reshape(-1, points, 1),
            embedding=split.coordinates,
            target=split.pressure.reshape(-1, points, 1),
        )
        for name, split in arrays.items()
    }
    stream = StreamDescription("points", 2, 1, ("pressure",))
    grid = (config.resolution, config.resolution)
    return Dataset(splits, Description((stream,), structured_shape=grid))


def _load_airfoil(config: AirfoilConfig) -> Dataset:
    arrays = load_airfoil(config, _sizes(config), Path(config.cache_dir))
    splits = {name: AirfoilSplit(split) for name, split in arrays.items()}
    fields = ("velocity_x", "velocity_y", "pressure_coefficient")
    first = splits["train"].arrays
    return Dataset(
        splits,
        Description(
            (StreamDescription("points", first.positions.shape[-1], 0, fields),),
            first.geometry.shape[-1],
            first.global_embedding.shape[1:],
        ),
    )


def _load_benchmark(config: BenchmarkConfig) -> Dataset:
    arrays = load_benchmark(config.problem, Path(config.folder), _sizes(config))
    first = arrays["train"]
    stream = StreamDescription(
        "points",
        first.embedding.shape[-1],
        0 if first.fx is None else first.fx.shape[-1],
        first.fields,
    )
    tokens = None if first.global_embedding is None else first.global_embedding.shape[1:]
    splits = {
        name: GridSplit(part.fx, part.embedding, part.target, part.global_embedding)
        for name, part in arrays.items()
    }
    return Dataset(
        splits, Description((stream,), None, tokens, structured_shape=first.structured_shape)
    )


def _load_store(config: StoreConfig) -> Dataset:
    require_extra("meshes", "data.name=store")
    from experiments.meshes.dataset import load_store

    splits = load_store(config)
    return Dataset(splits, splits["train"].description)
