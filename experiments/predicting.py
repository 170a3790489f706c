"""Predicted fields on the points of files, by a trained run."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from experiments.building import describe_mesh, make_device_mesh
from experiments.configuration import configs
from experiments.configuration.schema import ExperimentConfig, StoreConfig
from experiments.data.description import Description
from experiments.files import write_json
from experiments.meshes.outputs import write_prediction
from experiments.meshes.predicted import Input, Prediction, errors_of, read_input
from experiments.processes.coordination import all_or_none, by_first
from experiments.processes.distributed import together
from experiments.results.whole_cloud import CloudState, WholeCloud, dropout_moments
from experiments.training.trained import restore

SUMMARY = "predictions.json"


@dataclass(frozen=True)
class Options:
    """How it is predicted.

    Attributes:
        checkpoint: `last` or `best`.
        points_at_once: points that go through a layer at a time; by default as many as suit.
        mc_dropout_samples: draws of the dropouts, whose mean and deviation are written; 0 for none.
        seed: of these draws.
        save_state: keep what further points can be predicted from, as `NAME.state.npz`.
        state: such a file: the points of the files are predicted from it, not from each other.
    """

    checkpoint: str = "last"
    points_at_once: int | None = None
    mc_dropout_samples: int = 0
    seed: int = 0
    save_state: bool = False
    state: Path | None = None


def predict(
    folder: Path, files: Sequence[Path], out: Path, overrides: list[str], options: Options
) -> list[dict]:
    """Predicts the fields of files.

    Args:
        folder: of the run.
        files: see the module.
        out: folder that is written to.
        overrides: changes of the run's configuration, as in `mesh.points=4`.
        options: see there.

    Returns:
        For each file its points and, in the first process, which writes, what was written, seconds
        and, where its fields are there, their errors.

    Raises:
        FileNotFoundError: there is no run, or no such file.
        ValueError: a file does not have what the run reads, or the run is not of a store.
    """
    config = configs.load(folder, overrides)
    with together(config.distributed):
        store = _store(folder, config)
        _check(files, options)
        return _predict_files(folder, files, out, config, store, options)


def _store(folder: Path, config: ExperimentConfig) -> StoreConfig:
    """How the run reads its store; refuses a run on other data."""
    if not isinstance(config.data, StoreConfig):
        raise ValueError(
            f"{folder}: expected a run on a store (data.name=store); got one on {config.data.name}"
        )
    return config.data


def _check(files: Sequence[Path], options: Options) -> None:
    """Refuses what cannot be predicted whatever is in the files."""
    if options.mc_dropout_samples == 1 or options.mc_dropout_samples < 0:
        raise ValueError(
            f"--mc-dropout-samples: expected 0, or at least 2; got {options.mc_dropout_samples}"
        )
    if options.points_at_once is not None and options.points_at_once < 1:
        raise ValueError(f"--points-at-once: expected at least 1; got {options.points_at_once}")
    if options.state is not None and (options.mc_dropout_samples or options.save_state):
        raise ValueError("--state: expected neither --mc-dropout-samples nor --save-state; got one")
    _require_different(files)


def _predict_files(
    folder: Path,
    files: Sequence[Path],
    out: Path,
    config: ExperimentConfig,
    store: StoreConfig,
    options: Options,
) -> list[dict]:
    data = Description.load(folder)
    mesh = make_device_mesh(config.mesh)
    if mesh.shape["data"] > 1:
        raise ValueError(
            f"mesh.data: expected 1, since one sample is predicted at a time, whose points the "
            f"devices share out (mesh.points=-1); got {mesh.shape['data']}"
        )
    by_first(lambda: out.mkdir(parents=True, exist_ok=True))
    with jax.set_mesh(mesh):
        trained = restore(folder, config, data, options.checkpoint)
        whole = WholeCloud(trained.with_weights(), trained.state.statistics, options.points_at_once)
        if options.mc_dropout_samples and not getattr(trained.model, "noisy", False):
            raise ValueError(
                f"--mc-dropout-samples: expected 0 for a model without dropout; "
                f"got {options.mc_dropout_samples}"
            )
        state = None
        if options.state is not None:
            state = all_or_none(partial(CloudState.load, options.state))
        rows: list[dict] = []
        for path in files:
            rows.append(_predict_file(path, out, store, data, whole, state, options, rows))
    summary = {
        "run": str(folder),
        "step": trained.step,
        "device_mesh": describe_mesh(mesh),
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()},
    }
    by_first(lambda: write_json(out / SUMMARY, summary | {"files": rows}))
    return rows


def _predict_file(
    path: Path,
    out: Path,
    store: StoreConfig,
    data: Description,
    whole: WholeCloud,
    state: CloudState | None,
    options: Options,
    before: Sequence[dict],
) -> dict:
    """Predicts and writes one file; `before` is what this returned of those before it."""
    started = time.perf_counter()
    read = all_or_none(lambda: read_input(path, store, data))
    prediction, kept = _predict(whole, read, options, state)
    row: dict[str, Any] = {
        "file": str(path),
        "points": [len(fields) for fields in prediction.fields],
    }

    def write() -> None:
        done = [Path(each) for row in before for each in row["written"]]
        row["written"] = list(map(str, write_prediction(read, prediction, out, done)))
        if options.save_state and kept is not None:
            kept.save(out / f"{read.name}.state.npz")
        row["seconds"] = round(time.perf_counter() - started, 2)
        row.update(errors_of(read, prediction))
        print(_describe(row), flush=True)

    by_first(write)
    return row


def _predict(
    whole: WholeCloud, read: Input, options: Options, state: CloudState | None
) -> tuple[Prediction, CloudState | None]:
    deviations = None
    if state is not None:
        clouds = enumerate(read.sample.clouds)
        return Prediction([whole.predict_from(state, i, cloud) for i, cloud in clouds]), None
    fields, kept = whole.predict(read.sample)
    if options.mc_dropout_samples:
        moments = dropout_moments(whole, read.sample, options.mc_dropout_samples, options.seed)
        fields, deviations = (list(parts) for parts in zip(*moments, strict=True))
    return Prediction(fields, deviations), kept


def _require_different(files: Sequence[Path]) -> None:
    """Files of one name would be written over each other."""
    seen: dict[str, Path] = {}
    for path in files:
        if path.name in seen:
            raise ValueError(
                f"{path}: expected files of different names; got {seen[path.name]} as well"
            )
        seen[path.name] = path


def _describe(row: dict) -> str:
    parts = [f"{row['file']}: {sum(row['points']):,} points in {row['seconds']:.1f} s"]
    if "relative_l2" in row:
        errors = (f"{name} {value:.4f}" for name, value in row["relative_l2"].items())
        parts.append(f"relative L2 {', '.join(errors)}")
    for name, (predicted, *true) in row.get("forces", {}).items():
        parts.append(f"{name} {predicted:.4f}" + (f" ({true[0]:.4f})" if true else ""))
    return "; ".join(parts)
