"""A run in its folder: from its first step, or where it stopped, to its last."""

import dataclasses
import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from experiments.building import build_model, cache_neighbors, count_parameters, describe_mesh
from experiments.configuration.schema import ExperimentConfig
from experiments.data.batch import Statistics
from experiments.data.batches import Loader
from experiments.data.dataset import Dataset, statistics_like
from experiments.finetuning.tuning import Tuning
from experiments.processes.agreement import Agreement
from experiments.processes.signals import StopSignals
from experiments.results.evaluation import SplitResult, evaluate_split
from experiments.training.checkpoints import Checkpoints
from experiments.training.faults import bad_step
from experiments.training.logs import RunLog, say
from experiments.training.optimizer import make_optimizer, make_schedule
from experiments.training.starting_weights import take_weights
from experiments.training.steps import abstract_state, initial_state, make_evaluation, make_step


class TrainingRun:
    """A run in its folder: what is built once and used by every phase.

    Attributes:
        state: the state of the training.
        checkpoints: those of the folder; to be closed.
    """

    def __init__(
        self, config: ExperimentConfig, folder: Path, dataset: Dataset, mesh: jax.sharding.Mesh
    ) -> None:
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
        options: dict[str, Any] = dict(
            average=config.optimizer.ema_decay is not None,
            shard=config.mesh.shard_parameters,
            tuning=self.tuning,
        )
        if self.checkpoints.latest() is None:
            statistics = self._start() or dataset.statistics()
            self.state = initial_state(*arguments, statistics, config.train.seed, **options)
        else:
            like = abstract_state(
                *arguments, statistics_like(dataset.description), config.train.seed, **options
            )
            _, self.state, extra, problems = self.checkpoints.restore_newest(like)
            for problem in problems:
                say(f"{problem}; it is set aside, and the one before it used")
            self.loader.position = extra["loader"]
            self.seconds, self.loader.waited = extra["seconds"], extra["waited"]
        self.parameters = count_parameters(nnx.state(self.model, nnx.Param))
        # Steps that were skipped and samples that were bad, of which has been told.
        self.skipped = int(self.state.skipped)
        self.bad: set[int] = set()

    def _start(self) -> Statistics | None:
        """Takes the weights of another run, if it is to start from those; its statistics."""
        finetune = self.config.finetune
        if finetune.start_from is None:
            if finetune.lora_rank:
                raise ValueError(
                    "finetune.lora_rank: expected weights beside it, of finetune.start_from or of "
                    "an imported run; got none"
                )
            return None
        return take_weights(self.config, self.model, self.dataset.description)

    @property
    def _samples_a_step(self) -> int:
        """Samples that a step trains on."""
        return self.config.train.batch_size * self.config.optimizer.accumulate

    def split(
        self, name: str, pictured: Sequence[int] = (), *, quantities: bool = False
    ) -> SplitResult:
        """Evaluates a split with the weights as they are."""
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

    def _save(self, step: int, validation_error: float | None) -> None:
        """Saves a checkpoint, in the background; a run goes on where that fails."""
        extra = {
            "loader": self.loader.position_after(step),
            "seconds": self.seconds,
            "waited": self.loader.waited,
            "config": dataclasses.asdict(self.config),
        }
        for problem in self.checkpoints.save(step, self.state, extra, validation_error):
            say(f"\n{problem}; the run goes on")

    def require_saved(self) -> None:
        """Ends a run with an error whose last checkpoint could not be saved."""
        problem = self.checkpoints.settle()
        if problem:
            raise ValueError(
                f"{problem}; the results are written, and the last checkpoint is that of step "
                f"{self.checkpoints.latest()}"
            )

    def _tell_faults(self, step: int) -> None:
        """Tells of steps that were skipped and samples that were bad, since it was last called.

        Raises:
            ValueError: a step was not finite, and none may be skipped, or not so many; the state
                before it is saved then.
        """
        for index in sorted(self.loader.bad.keys() - self.bad):
            say(f"\n{self.loader.bad[index]}; the sample is skipped")
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
                say(f"\n{self.folder}: step {bad} was skipped, since its loss or gradient is not "
                     f"finite: {what}")  # fmt: skip
            return
        bad, what = next(iter(told.items()))
        good = int(self.state.step)
        if train.on_nonfinite == "stop":
            # Started again with another setting, it goes on from here.
            self.state = self.state._replace(skipped=self.state.skipped * 0)
            if good not in (0, self.checkpoints.latest()):
                self._save(good, None)
        raise ValueError(
            f"{self.folder}: expected a finite loss and gradient; got others at step {bad} "
            f"({skipped} so far): {what}; the state of step {good} is kept; try a lower "
            "optimizer.learning_rate in another folder, or train.on_nonfinite=skip"
        )

    def _require_finite(self, name: str, value: Any, step: int) -> None:
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
        say(
            f"{self.folder}: {self.config.model.name} with {self.parameters:,} parameters"
            f"{f', of which {trained:,} train,' if trained != self.parameters else ''} on "
            f"{describe_mesh(self.mesh)}"
        )
        if first >= train.steps:
            say(f"{self.folder}: already trained for {first} steps")
            return True
        if first:
            say(f"{self.folder}: going on from step {first} of {train.steps}")
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
        log = RunLog(self.folder, first, train.steps, self._samples_a_step)
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
                    self._tell_faults(step)
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
                        self._require_finite("validation error", error, step)
                        log.write(step, {"validation_relative_l2": error})
                    self._save(step, error)
                if stop is not None and not last:
                    name = signal.Signals(stop).name
                    say(f"\n{self.folder}: stopped by {name} at step {step}; start again to go on")
                    return False
        finally:
            log.close()
        return True
