"""The typed configuration of an experiment: what there is to choose."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class ModelConfig:
    """What every model has.

    Attributes:
        name: which model.
        dtype: type to compute in, `float32` or `bfloat16`.
        param_dtype: type of the weights.
        remat: what is computed again for the gradient: `none`, `attention` or `block`.
    """

    name: str = MISSING
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: str = "none"


@dataclass
class FlareConfig(ModelConfig):
    """Arguments of `flare_jax.FLARE`; widths of inputs and outputs follow from the data.

    Attributes:
        structured: tell the model the shape of the grid, where the data has one.
    """

    name: str = "flare"
    n_layers: int = 4
    n_hidden: int = 256
    dropout: float = 0.0
    n_head: int = 8
    act: str = "gelu"
    mlp_ratio: int = 4
    slice_num: int = 32
    unified_pos: bool = False
    ref: int = 8
    scale: float = 1.0
    chunk_size: int | None = None
    attention_backend: str = "auto"
    structured: bool = False


@dataclass
class TransolverConfig(ModelConfig):
    """Arguments of `geotransolver_jax.Transolver`; widths follow from the data.

    Attributes:
        structured: tell the model the shape of the grid, where the data has one.
    """

    name: str = "transolver"
    n_layers: int = 4
    n_hidden: int = 256
    dropout: float = 0.0
    n_head: int = 8
    act: str = "gelu"
    mlp_ratio: int = 4
    slice_num: int = 32
    unified_pos: bool = False
    ref: int = 8
    plus: bool = False
    structured: bool = False


@dataclass
class GeoTransolverConfig(ModelConfig):
    """Arguments of `geotransolver_jax.GeoTransolver`; widths follow from the data.

    Attributes:
        concrete_dropout_weight: weight of the regularization loss of learned dropout rates.
        structured: tell the model the shape of the grid, where the data has one.
    """

    name: str = "geotransolver"
    n_layers: int = 4
    n_hidden: int = 256
    dropout: float = 0.0
    n_head: int = 8
    act: str = "gelu"
    mlp_ratio: int = 4
    slice_num: int = 32
    plus: bool = False
    include_local_features: bool = False
    radii: list[float] = field(default_factory=lambda: [0.05, 0.25])
    neighbors_in_radius: list[int] = field(default_factory=lambda: [8, 32])
    n_hidden_local: int = 32
    attention_type: str = "GALE"
    concrete_dropout: bool = False
    state_mixing_mode: str = "weighted"
    attention_backend: str = "auto"
    concrete_dropout_weight: float = 1e-4
    structured: bool = False


@dataclass
class DataConfig:
    """What every data set has.

    Attributes:
        name: which data set.
        train: number of training samples.
        validation: number of validation samples.
        test: number of test samples.
    """

    name: str = MISSING
    # Of a store alone it may be null; a class that follows cannot widen a type.
    train: int | None = 1000
    validation: int = 100
    test: int = 200


@dataclass
class DarcyConfig(DataConfig):
    """Darcy flow through a two-valued permeability on the unit square.

    Attributes:
        resolution: grid points along each axis.
        seed: seed of the samples.
        cache_dir: where made samples are kept.
        mat_train: public training file (`..._smooth1.mat`) to read instead of making samples.
        mat_test: public test file (`..._smooth2.mat`).
    """

    name: str = "darcy"
    resolution: int = 32
    seed: int = 0
    cache_dir: str = ".cache/flare_jax"
    mat_train: str | None = None
    mat_test: str | None = None


@dataclass
class AirfoilConfig(DataConfig):
    """Inviscid flow around airfoils; the shapes of a split are in no other.

    Attributes:
        shapes: `naca`, random members of the four-digit family, or `uiuc`, coordinate files.
        uiuc_dir: folder of coordinate files to read instead of those of the extra `airfoils`.
        points: points of a sample, those on the surface included.
        max_points: `null`, or each sample has a random number from `points` to this.
        surface_points: points on the surface, one a panel of the solver; even.
        angles: angles of attack of one shape, each a sample.
        min_angle: least angle of attack in degrees.
        max_angle: greatest angle of attack in degrees.
        seed: seed of the samples.
        cache_dir: where made samples are kept.
    """

    name: str = "airfoil"
    shapes: str = "naca"
    uiuc_dir: str | None = None
    points: int = 2000
    max_points: int | None = None
    surface_points: int = 256
    angles: int = 5
    min_angle: float = -5.0
    max_angle: float = 15.0
    seed: int = 0
    cache_dir: str = ".cache/flare_jax"


@dataclass
class BenchmarkConfig(DataConfig):
    """The published files of a benchmark of the field, see `experiments.problems.benchmark_files`.

    Attributes:
        problem: `elasticity`, `airfoil`, `pipe` or `plasticity`.
        folder: where the files are.
    """

    name: str = "benchmark"
    problem: str = "elasticity"
    folder: str = "data"


@dataclass
class StreamConfig:
    """One cloud that fields are predicted on; entries as `experiments.meshes.wiring` reads them.

    Attributes:
        embedding: positions of the points, and what else places them.
        fx: input values at the points.
        local_positions: coordinates for the search of neighbours; `null` where the embedding is
            these.
        targets: fields to predict.
    """

    embedding: list[str] = MISSING
    fx: list[str] = field(default_factory=list)
    local_positions: str | None = None
    targets: list[str] = MISSING


@dataclass
class FrameConfig:
    """Where a sample's coordinates begin and what they are measured in.

    Attributes:
        centroid: begin at the centroid of the surface.
        length: reference length, a number or the name of one of the sample.
    """

    centroid: bool = False
    length: str = "1.0"


@dataclass
class FreeStreamConfig:
    """The undisturbed flow: numbers, or the names of numbers of the sample; SI units.

    Attributes:
        density: of the fluid.
        velocity: speed of the flow.
        pressure: absolute or gauge, as the fields of the data are.
    """

    density: str = "1.0"
    velocity: str = "1.0"
    pressure: str = "0.0"


@dataclass
class ForcesConfig:
    """Force and moment coefficients of a surface, integrated from predicted fields.

    Attributes:
        stream: name of the stream of the surface.
        pressure: its column of pressure; `null` for no forces.
        shear: its vector of wall shear stress, if it is predicted.
        inward: normals point into the body, and shear acts on the fluid, as OpenFOAM has them.
        area: reference area, a number or the name of one of the sample.
        length: reference length of moments, likewise.
        directions: of the forces by their names; entries are numbers or names of numbers.
        moments: axes of the moments by their names.
        centre: point about which moments are taken.
    """

    stream: str = "surface"
    pressure: str | None = None
    shear: str | None = None
    inward: bool = False
    area: str = "1.0"
    length: str = "1.0"
    directions: dict[str, list[Any]] = field(default_factory=dict)
    moments: dict[str, list[Any]] = field(default_factory=dict)
    centre: list[Any] = field(default_factory=lambda: [0, 0, 0])


@dataclass
class StoreConfig(DataConfig):
    """Simulations in a Zarr store, see `experiments.convert`.

    Attributes:
        path: the store; its samples are shuffled, some set aside for `test` and `validation`, and
            the rest trained on.
        validation_path: a store of the validation split instead.
        test_path: likewise of the test split.
        train: samples of the training split; `null` for all that the others leave.
        validation: samples of the validation split.
        test: samples of the test split.
        streams: the clouds that fields are predicted on, by name.
        geometry: entries of the geometry.
        global_embedding: numbers of the sample, by name.
        resolution: points of a sample that a step of training sees, drawn anew each time; `null`
            for all.
        geometry_resolution: likewise of the geometry.
        frame: frame of the coordinates.
        free_stream: the undisturbed flow.
        coefficients: what columns are over the free stream (`pressure`, `stress`, `velocity`), by
            their names.
        forces: force and moment coefficients.
        cache_neighbors: find neighbours once, and keep them beside the store; where a model looks
            at them and whole clouds are read.
        seed: seed of the splits.
    """

    name: str = "store"
    path: str = "store"
    validation_path: str | None = None
    test_path: str | None = None
    train: int | None = None
    validation: int = 1
    test: int = 1
    streams: dict[str, StreamConfig] = field(default_factory=dict)
    geometry: list[str] = field(default_factory=list)
    global_embedding: list[str] = field(default_factory=list)
    resolution: int | None = None
    geometry_resolution: int | None = None
    frame: FrameConfig = field(default_factory=FrameConfig)
    free_stream: FreeStreamConfig = field(default_factory=FreeStreamConfig)
    coefficients: dict[str, str] = field(default_factory=dict)
    forces: ForcesConfig = field(default_factory=ForcesConfig)
    cache_neighbors: bool = True
    seed: int = 0


@dataclass
class MeshConfig:
    """Sizes of the device mesh's axes, see `parallel.make_mesh`; one may be -1.

    Attributes:
        cpu_devices: on a CPU, how many virtual devices to split it into.
        shard_parameters: split weights, gradients and the optimizer's state over `data` as well.
    """

    data: int = 1
    points: int = -1
    heads: int = 1
    cpu_devices: int | None = None
    shard_parameters: bool = False


@dataclass
class DistributedConfig:
    """The processes that run a command together, see `experiments.processes.distributed`.

    Where `coordinator`, `processes` and `process` are `null` the environment of a cluster tells.

    Attributes:
        coordinator: `HOST:PORT` at which the first process listens.
        processes: how many there are.
        process: number of this one; the first is 0.
        detect: whether to look for the environment of a cluster.
        timeout: seconds to wait for the other processes at the start.
        heartbeat_timeout: seconds without a sign of life after which a process counts as lost.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    detect: bool = True
    timeout: int = 300
    heartbeat_timeout: int = 40


@dataclass
class OptimizerConfig:
    """Optimizer and schedule.

    Attributes:
        name: `adamw`, or `muon` (Muon for the matrices, AdamW for the rest).
        learning_rate: peak learning rate.
        adam_learning_rate: peak learning rate of the rest under `muon`.
        weight_decay: decoupled weight decay of kernels.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        clip_norm: largest global norm of a gradient; `null` for no clipping.
        schedule: `one_cycle`, `cosine` (with warm-up) or `constant`.
        warmup: part of the steps in which the rate rises.
        final_fraction: last learning rate, in units of the peak.
        accumulate: batches whose gradients are averaged for one step.
        ema_decay: decay of the moving average of the weights that is evaluated; `null` for none.
    """

    name: str = "adamw"
    learning_rate: float = 1e-3
    adam_learning_rate: float = 1e-3
    weight_decay: float = 1e-5
    beta1: float = 0.9
    beta2: float = 0.999
    clip_norm: float | None = 1.0
    schedule: str = "one_cycle"
    warmup: float = 0.2
    final_fraction: float = 1e-3
    accumulate: int = 1
    ema_decay: float | None = None


@dataclass
class TrainConfig:
    """The training loop.

    Attributes:
        steps: optimizer steps.
        batch_size: samples of a batch, over all devices.
        seed: seed of weights, shuffling and dropout.
        checkpoint_every: steps between checkpoints, each with a pass over the validation split.
        keep: latest checkpoints kept, beside the best one.
        log_every: steps between rows of the logs.
        loader_threads: threads that prepare batches.
        on_nonfinite: where a loss or gradient is not finite, `stop`, or `skip` the step.
        max_skipped: steps of a run that may be skipped.
        on_bad_sample: where a sample cannot be read, `stop`, or `skip` it and take another; hosts
            then wait for each other at each batch.
    """

    steps: int = 1000
    batch_size: int = 4
    seed: int = 0
    checkpoint_every: int = 250
    keep: int = 2
    log_every: int = 20
    loader_threads: int = 1
    on_nonfinite: str = "stop"
    max_skipped: int = 10
    on_bad_sample: str = "stop"


@dataclass
class FinetuneConfig:
    """What weights a training starts from, and which of them train.

    Patterns are of names such as `blocks.3.attention.project_in.kernel` or `project_out.bias`, with
    `*`, `?` and `[0-3]` as in file names of a shell.

    Attributes:
        start_from: folder of the run whose weights it starts from; `null` for weights drawn anew.
        checkpoint: of that run, `last` or `best`.
        normalization: by the statistics of that `run`, or of the `data`.
        reset: patterns of weights that are drawn anew all the same; that run need not have them.
        freeze: patterns of weights that do not train; `null` for none, or with adapters for all.
        unfreeze: patterns of weights that train although `freeze` matches them.
        learning_rates: factors on the learning rate, as `PATTERN=FACTOR`; of several that match
            a weight the last counts.
        lora_rank: rank of low-rank adapters (LoRA); 0 for none. Adapters train whatever `freeze`
            says, by AdamW and without decay, and the kernel beside does not.
        lora_alpha: adapters are scaled by this over their rank; `null` for the rank.
        lora_layers: patterns of the linear layers that have adapters.
    """

    start_from: str | None = None
    checkpoint: str = "last"
    normalization: str = "run"
    reset: list[str] = field(default_factory=list)
    freeze: list[str] | None = None
    unfreeze: list[str] = field(default_factory=list)
    learning_rates: list[str] = field(default_factory=list)
    lora_rank: int = 0
    lora_alpha: float | None = None
    lora_layers: list[str] = field(default_factory=lambda: ["blocks.*"])


@dataclass
class ExperimentConfig:
    """A whole experiment."""

    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


MODELS: dict[str, type[ModelConfig]] = {
    "flare": FlareConfig,
    "transolver": TransolverConfig,
    "geotransolver": GeoTransolverConfig,
    "geotransolver_fa": GeoTransolverConfig,
}
DATA: dict[str, type[DataConfig]] = {
    "darcy": DarcyConfig,
    "airfoil": AirfoilConfig,
    "benchmark": BenchmarkConfig,
    "store": StoreConfig,
}


OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("one_cycle", "cosine", "constant")
AIRFOIL_SHAPES = ("naca", "uiuc")
BENCHMARKS = ("elasticity", "airfoil", "pipe", "plasticity")
COEFFICIENTS = ("pressure", "stress", "velocity")
