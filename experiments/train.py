"""`python -m experiments.train`: trains the experiment that a configuration describes.

Started again in the folder of a run, it goes on where the run stopped.
"""

import contextlib
import dataclasses
import importlib.metadata
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import hydra
import jax
import numpy as np
from flax import nnx
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from experiments import config as configs
from experiments.batch import Statistics
from experiments.batches import Loader
from experiments.checkpoints import Checkpoints
from experiments.cli import StopSignals, one_line_errors
from experiments.config_errors import explain, known_keys
from experiments.data import Dataset, load_dataset, statistics_like
from experiments.distributed import Agreement, first_then_others, together
from experiments.evaluation import evaluate_split, metrics_of
from experiments.faults import bad_step, only_run_in
from experiments.figures import draw_predictions
from experiments.files import write_json
from experiments.finetuning import Tuning
from experiments.logs import RunLog
from experiments.optimizer import make_optimizer, make_schedule
from experiments.run import (
    build_model,
    cache_neighbors,
    count_parameters,
    describe_mesh,
    make_device_mesh,
)
from experiments.schema import ExperimentConfig
from experiments.starting_weights import take_weights
from experiments.training import abstract_state, initial_state, make_evaluation, make_step
from geotransolver_jax.concrete_dropout import dropout_rates

SUMMARY_FILE = "summary.json"
PICTURE_FILE = "predictions.png"
_PICTURED = 3


def train(config: ExperimentConfig, folder: Path) -> dict | None:
    """Trains a run, or what is left of it, and writes its results into its folder.

    Args:
        config: the experiment.
        folder: the run's folder; made if it is not there.

    Returns:
        The summary that is also in `summary.json`; `None` if a signal stopped the run before its
        end.

    Raises:
        ValueError: the folder holds another experiment, or the configuration does not fit the
            data or the devices.
        ConnectionError: another process has ended.
    """
    with together(config.distributed):
        return _train(config, folder)


def _train(config: ExperimentConfig, folder: Path) -> dict | None:
    mesh = make_device_mesh(config.mesh)
    dataset = load_dataset(config.data)
    with contextlib.ExitStack() as held, jax.set_mesh(mesh), StopSignals() as signals:

        def enter() -> None:
            held.enter_context(only_run_in(folder))
            _claim(folder, config, dataset)

        first_then_others(enter)
        run = _Run(config, folder, dataset, mesh)
        try:
            if not run.advance(signals):
                return None
            summary = run.finish()
            run.require_saved()
            return summary
        finally:
            run.checkpoints.close()


def _claim(folder: Path, config: ExperimentConfig, dataset: Dataset) -> None:
    """Writes configuration and description into the folder, or checks the one that is there."""
    if (folder / configs.CONFIG_FILE).is_file():
        changed = configs.difference(configs.load(folder), config)
        if changed:
            raise ValueError(
                f"{folder}: holds a run with another configuration: {', '.join(changed)}; choose "
                "another folder (hydra.run.dir=FOLDER) or delete this one"
            )
        return
    if jax.process_index():
        raise ValueError(
            f"{folder}: expected the folder of the first process, shared by all; got another one"
        )
    folder.mkdir(parents=True, exist_ok=True)
    dataset.description.save(folder)
    configs.save(config, folder)


class _Run:
    """A run in its folder: what is built once and used by every phase."""

    def __init__(
        self, config: ExperimentConfig, folder: Path, dataset: Dataset, mesh: jax.sharding.Mesh
    ):
        self.config, self.folder, self.dataset, self.mesh = config, folder, dataset, mesh
        self.model = build_model(config.model, dataset.description, config.train.seed)
        cache_neighbors(config, dataset)
        self.optimizer = make_optimizer(config.optimizer, config.train.steps)
        self.tuning = Tuning(config.finetune, self.model)
        self.checkpoints = Checkpoints(folder, config.train.keep)
        self.seconds = 0.0
        self.loader = Loader(
            dataset.splits["train"],
            config.train.batch_size,
            config.optimizer.accumulate,
            config.train.seed,
            config.train.loader_threads,
            self.model.structured_shape,
            skip_bad=config.train.on_bad_sample == "skip",
        )
        self.evaluate = make_evaluation(self.model)
        arguments = (self.model, self.optimizer)
        options = dict(
            average=config.optimizer.ema_decay is not None,
            shard=config.mesh.shard_parameters,
            tuning=self.tuning,
        )
        if self.checkpoints.latest() is None:
            statistics = self.start() or dataset.statistics()
            self.state = initial_state(*arguments, statistics, config.train.seed, **options)
        else:
            like = abstract_state(
                *arguments, statistics_like(dataset.description), config.train.seed, **options
            )
            _, self.state, extra, problems = self.checkpoints.restore_newest(like)
            for problem in problems:
                _say(f"{problem}; it is set aside, and the one before it used")
            self.loader.position = extra["loader"]
            self.seconds, self.loader.waited = extra["seconds"], extra["waited"]
        self.parameters = count_parameters(nnx.state(self.model, nnx.Param))
        # Steps that were skipped and samples that were bad, of which has been told.
        self.skipped, self.bad = int(self.state.skipped), set()

    def start(self) -> Statistics | None:
        """Takes the weights of another run, if it is to start from those; its statistics."""
        config = self.config.finetune
        if config.start_from is None:
            return None
        return take_weights(config, self.model, self.dataset.description)

    @property
    def samples_a_step(self) -> int:
        return self.config.train.batch_size * self.config.optimizer.accumulate

    def split(self, name: str, pictured: Sequence[int] = (), *, quantities: bool = False):
        return evaluate_split(
            self.evaluate,
            self.state.evaluated_params,
            self.state.statistics,
            self.dataset.splits[name],
            self.model.structured_shape,
            self.config.train.batch_size,
            pictured=pictured,
            quantities=quantities,
        )

    def save(self, step: int, validation_error: float | None) -> None:
        extra = {
            "loader": self.loader.position_after(step),
            "seconds": self.seconds,
            "waited": self.loader.waited,
            "config": dataclasses.asdict(self.config),
        }
        for problem in self.checkpoints.save(step, self.state, extra, validation_error):
            _say(f"\n{problem}; the run goes on")

    def require_saved(self) -> None:
        """Ends a run with an error whose last checkpoint could not be saved."""
        problem = self.checkpoints.settle()
        if problem:
            raise ValueError(
                f"{problem}; the results are written, and the last checkpoint is that of step "
                f"{self.checkpoints.latest()}"
            )

    def tell_faults(self, step: int) -> None:
        """Tells of steps that were skipped and samples that were bad, since it was last called.

        Raises:
            ValueError: a step was not finite, and none may be skipped, or not so many; the state
                before it is saved then.
        """
        for index in sorted(self.loader.bad.keys() - self.bad):
            _say(f"\n{self.loader.bad[index]}; the sample is skipped")
        self.bad |= self.loader.bad.keys()
        skipped = int(self.state.skipped)
        if skipped == self.skipped:
            return
        kept = np.asarray(self.state.skipped_steps)
        new = range(max(self.skipped, skipped - len(kept)), skipped)
        steps = [int(kept[i % len(kept)]) for i in new]
        self.skipped = skipped
        split = self.dataset.splits["train"]
        told = {bad: bad_step(self.folder, split, self.loader, bad) for bad in steps}
        train = self.config.train
        if train.on_nonfinite == "skip" and skipped <= train.max_skipped:
            for bad, what in told.items():
                _say(f"\n{self.folder}: step {bad} was skipped, since its loss or gradient is not "
                     f"finite: {what}")  # fmt: skip
            return
        bad, what = next(iter(told.items()))
        good = int(self.state.step)
        if train.on_nonfinite == "stop":
            # Started again with another setting, it goes on from here.
            self.state = self.state._replace(skipped=self.state.skipped * 0)
            if good not in (0, self.checkpoints.latest()):
                self.save(good, None)
        raise ValueError(
            f"{self.folder}: expected a finite loss and gradient; got others at step {bad} "
            f"({skipped} so far): {what}; the state of step {good} is kept; try a lower "
            "optimizer.learning_rate in another folder, or train.on_nonfinite=skip"
        )

    def require_finite(self, name: str, value, step: int) -> None:
        """Ends a run that has diverged before it is saved."""
        if not np.isfinite(value):
            raise ValueError(
                f"{self.folder}: expected a finite {name}; got {float(value)} at step {step}: try "
                "a lower optimizer.learning_rate, in another folder"
            )

    def advance(self, signals: StopSignals) -> bool:
        """Takes the steps that are left; False if a signal ended it before the last."""
        train, first = self.config.train, int(self.state.step)
        trained = self.tuning.rates.count(self.state.params)
        _say(
            f"{self.folder}: {self.config.model.name} with {self.parameters:,} parameters"
            f"{f', of which {trained:,} train,' if trained != self.parameters else ''} on "
            f"{describe_mesh(self.mesh)}"
        )
        if first >= train.steps:
            _say(f"{self.folder}: already trained for {first} steps")
            return True
        if first:
            _say(f"{self.folder}: going on from step {first} of {train.steps}")
        step_function = make_step(
            self.model,
            self.optimizer,
            self.config.optimizer.ema_decay,
            self.state,
            regularization=getattr(self.config.model, "concrete_dropout_weight", 0.0),
            skip=train.on_nonfinite == "skip",
            tuning=self.tuning,
        )
        # Compiled: operation by operation it would take as long as a small step.
        schedule = jax.jit(
            make_schedule(self.config.optimizer, self.config.optimizer.learning_rate, train.steps)
        )
        log = RunLog(self.folder, first, train.steps, self.samples_a_step)
        started, before = time.perf_counter(), self.seconds
        agreement = Agreement(signals, first)
        try:
            for step in range(first + 1, train.steps + 1):
                self.state, metrics = step_function(self.state, next(self.loader))
                log.advance()
                last = step == train.steps
                due = last or step % train.checkpoint_every == 0
                logged = last or step % train.log_every == 0
                # Read once: a signal that comes later is met at the next step.
                stop = agreement.received(step, waits=logged or due)
                if logged or due or stop is not None:
                    self.tell_faults(step)
                if logged:
                    row = {
                        "loss": float(metrics.loss),
                        "gradient_norm": float(metrics.gradient_norm),
                        "learning_rate": float(schedule(step - 1)),
                    }
                    # What was skipped is no number, which JSON cannot hold.
                    log.write(step, {k: v for k, v in row.items() if math.isfinite(v)})
                if due or stop is not None:
                    jax.block_until_ready(self.state)
                    self.seconds = before + time.perf_counter() - started
                    error = None
                    # Also when told to stop: a run that goes on would not come back to it.
                    if due:
                        error = float(self.split("validation").errors.relative_l2.mean())
                        self.require_finite("validation error", error, step)
                        log.write(step, {"validation_relative_l2": error})
                    self.save(step, error)
                if stop is not None and not last:
                    name = signal.Signals(stop).name
                    _say(f"\n{self.folder}: stopped by {name} at step {step}; start again to go on")
                    return False
        finally:
            log.close()
        return True

    def dropout_rates(self) -> dict[str, float]:
        """The learned rates of concrete dropouts, if the model has any."""
        graph, _, rest = nnx.split(self.model, nnx.Param, ...)
        return dropout_rates(nnx.merge(graph, self.state.evaluated_params, rest))

    def finish(self) -> dict:
        """Evaluates the test split, draws the picture and writes the summary."""
        test = self.dataset.splits["test"]
        spread = np.linspace(0, len(test) - 1, min(_PICTURED, len(test)), dtype=int).tolist()
        result = self.split("test", spread, quantities=True)
        metrics = metrics_of(result, self.dataset)
        summary = metrics | {
            "training_seconds": round(self.seconds, 1),
            "waiting_seconds": round(self.loader.waited, 1),
            "steps": int(self.state.step),
            "best_checkpoint": self.checkpoints.best(),
            "parameters": self.parameters,
            "trained_parameters": self.tuning.rates.count(self.state.params),
            "device_mesh": describe_mesh(self.mesh),
            "versions": _versions(),
        }
        rates = self.dropout_rates()
        if rates:
            summary["dropout_rates"] = rates
        if jax.process_index() == 0:
            draw_predictions(self.folder / PICTURE_FILE, self.dataset, result.predictions)
            write_json(self.folder / SUMMARY_FILE, summary)
        error = f"{summary['test_relative_l2']:.4f}{_quantities(metrics)}"
        _say(
            f"{self.folder}: test relative L2 {error} on {len(test)} samples after "
            f"{summary['steps']} steps, {summary['training_seconds']:.0f} s of training; see "
            f"{SUMMARY_FILE} and {PICTURE_FILE}"
        )
        return summary


def _quantities(metrics: dict) -> str:
    """The coefficients of determination, for the closing line."""
    names = [name for name in metrics if name.startswith("test_r2_")]
    return "".join(
        f", R² of the {name.removeprefix('test_r2_').replace('_', ' ')} {metrics[name]:.4f}"
        for name in names
    )


def _versions() -> dict[str, str]:
    packages = ("flare-jax", "jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    versions = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


def main() -> int:
    """The command: composes the configuration, trains, and gives the exit code."""
    configs.register_schemas()
    code, failure = 0, None

    @hydra.main(version_base="1.3", config_path=str(configs.CONFIG_DIR), config_name="config")
    def job(config: DictConfig) -> None:
        nonlocal code, failure
        folder = _relative(Path(HydraConfig.get().runtime.output_dir))
        try:
            if train(configs.typed(config), folder) is None:
                code = 128 + signal.SIGTERM
        except (ValueError, OSError) as error:
            # Hydra would print a line of its own before it hands an error on.
            failure = failure or error

    try:
        job()
    except (HydraException, OmegaConfBaseException) as error:
        overrides = [argument for argument in sys.argv[1:] if "=" in argument]
        with hydra.initialize_config_dir(str(configs.CONFIG_DIR), version_base="1.3"):
            known = known_keys(overrides)
        raise ValueError(explain(error, known)) from error
    except OSError as error:
        # Hydra makes the folder before it hands over; some of its own errors are of this kind too.
        raise ValueError(
            f"hydra.run.dir: expected a folder that can be made; got {error.filename} "
            f"({error.strerror})"
        ) from error
    if failure is not None:
        raise failure
    return code


def _relative(folder: Path) -> Path:
    """A folder as a user would name it: relative to where the program was started, if below."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


if __name__ == "__main__":
    one_line_errors(main)
