"""Checkpoints of a run: asynchronous, whole or not there, readable on any mesh."""

import json
import logging
import math
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from experiments.fingerprints import fingerprints
from experiments.processes.coordination import problems_of_all, wait_for_all
from experiments.processes.patient_loops import patient_loops

METRIC = "validation_relative_l2"
_FINGERPRINTS = "fingerprints"
# Bytes of a checkpoint that are not of its arrays, roughly.
_BESIDE = 2**20
# Orbax tells of every file that it opens; what a user must know is raised as an error here.
logging.getLogger("absl").setLevel(logging.CRITICAL)


class DamagedError(ValueError):
    """A checkpoint does not hold what was saved."""


class Checkpoints:
    """The checkpoints in a run's folder: the latest few and the best by validation error.

    Orbax writes a checkpoint under a temporary name and renames it when it is whole, so that a
    killed process leaves none half-written.
    """

    def __init__(self, folder: Path, keep: int = 1, *, read_only: bool = False):
        """Opens the folder.

        Args:
            folder: the run's folder.
            keep: latest checkpoints to keep.
            read_only: whether nothing will be saved or deleted.

        Raises:
            FileNotFoundError: the folder is to be read and there is nothing.
            ValueError: the metrics of a checkpoint are damaged; if it is not to be read only, of
                all.
        """
        self.folder, self._read_only = folder / "checkpoints", read_only
        policy = preservation_policy.AnyPreservationPolicy(
            [
                preservation_policy.LatestN(keep),
                preservation_policy.BestN(
                    get_metric_fn=_validation_error,
                    reverse=True,
                    n=1,
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            best_fn=_validation_error,
            best_mode="min",
            create=not read_only,
            read_only=read_only,
            cleanup_tmp_directories=not read_only,
        )
        if read_only and not self.folder.is_dir():
            raise FileNotFoundError(f"{folder}: has no checkpoint yet")
        self._pending: int | None = None
        self._unsaved: str | None = None
        damaged = self._without_metrics()
        if damaged and read_only:
            raise ValueError(f"{damaged[max(damaged)]}; a training, started again, sets it aside")
        self.problems = self._set_aside_without(damaged)
        self._manager = ocp.CheckpointManager(
            self.folder.resolve(),
            options=options,
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(),
                "extra": ocp.JsonCheckpointHandler(),
            },
        )

    def save(self, step: int, state: Any, extra: dict, validation_error: float | None) -> list[str]:
        """Saves a checkpoint in the background.

        Args:
            step: optimizer steps taken.
            state: a tree of arrays.
            extra: what else goes with it, as JSON.
            validation_error: the error by which the best one is chosen, if it is known.

        Returns:
            A line on each checkpoint that could not be saved, this one or that before it; older
            ones stay.
        """
        problems = [self._settled()]
        # A NaN can be compared to nothing: Orbax would take any checkpoint for the best.
        known = validation_error is not None and math.isfinite(validation_error)
        metrics = {METRIC: validation_error} if known else None
        arrays = _by_path(state)
        self._pending, self._unsaved = step, self._without_room(step, arrays)
        if self._unsaved is not None:
            return [problem for problem in (*problems, self._unsaved) if problem]
        extra = extra | {_FINGERPRINTS: fingerprints(arrays)}
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(arrays), extra=ocp.args.JsonSave(extra)
                ),
                metrics=metrics,
                force=True,
            )
        except Exception as error:  # a full disk comes as errors of many kinds
            if isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
                # Another process is lost, of which is told where all end.
                raise
            self._unsaved = self._not_saved(error)
            if jax.process_count() > 1:
                # Others wait for this process in the midst of saving, and cannot go on with it.
                raise ValueError(self._unsaved) from error
            problems.append(self._unsaved)
        return [problem for problem in problems if problem]

    def _without_room(self, step: int, arrays: dict[str, Any]) -> str | None:
        """A line where several processes have no room, which all must know beforehand."""
        if jax.process_count() == 1:
            return None
        needed = _BESIDE + sum(leaf.size * leaf.dtype.itemsize for leaf in arrays.values())
        free = shutil.disk_usage(self.folder).free
        told = problems_of_all(f"needs {needed:,} bytes, of {free:,}" if free < needed else None)
        if not told:
            return None
        return f"{self.folder / str(step)}: could not be saved: no room: {told[min(told)]}"

    def settle(self) -> str | None:
        """Waits for what is being saved; a line if the last checkpoint could not be."""
        self._settled()
        return self._unsaved

    def _settled(self) -> str | None:
        """Waits for what is being saved, in all processes; a line if one could not do it."""
        told = problems_of_all(self._waited())
        if told and self._unsaved is None:
            self._unsaved = told[min(told)]
            self._manager.reload()
        return told[min(told)] if told else None

    def _waited(self) -> str | None:
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._unsaved = self._not_saved(error)
            return self._unsaved
        return None

    def _not_saved(self, error: Exception) -> str:
        # What was written of it takes room, and the manager has lost count of the others.
        for half in self.folder.glob(f"*{ocp.path.step.TMP_DIR_SUFFIX}*"):
            shutil.rmtree(half, ignore_errors=True)
        self._manager.reload()
        return f"{self.folder / str(self._pending)}: could not be saved: {_reason(error)}"

    def latest(self) -> int | None:
        """Step of the latest checkpoint, `None` if there is none."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """Step of the checkpoint with the smallest validation error, `None` if there is none."""
        return self._manager.best_step()

    def restore(self, step: int, like: Any) -> tuple[Any, dict]:
        """Reads a checkpoint onto the devices.

        Args:
            step: which one.
            like: a tree of arrays, or of their shapes with shardings, of the structure that was
                saved; leaves that the checkpoint has beyond it are left out.

        Returns:
            The tree, laid out as `like`, and what was saved with it.

        Raises:
            ValueError: the checkpoint is of another model, or damaged.
        """
        wanted = _by_path(like)
        error = None
        try:
            with patient_loops():
                state, extra = self._read(step, wanted)
        except ValueError as bad:
            error = bad
        # Each process reads what its devices hold: all go on, or none.
        told = problems_of_all(None if error is None else str(error))
        if error is not None:
            raise error
        if told:
            raise DamagedError(told[min(told)])
        # Without a mesh, shapes alone carry no sharding, and Orbax reads onto the host.
        arrays = {path: jnp.asarray(state[path]) for path in wanted}
        saved = extra.pop(_FINGERPRINTS, {})
        for path, number in fingerprints(arrays).items():
            if saved.get(path, number) != number:
                error = ValueError(f"{path} does not hold what was saved")
                raise self._damaged(step, error) from error
        return jax.tree.unflatten(jax.tree.structure(like), list(arrays.values())), extra

    def _read(self, step: int, wanted: dict[str, Any]) -> tuple[dict[str, Any], dict]:
        """Reads the arrays of a checkpoint and what is beside them."""
        problem = _difference(self._shapes(step), wanted)
        if problem:
            raise ValueError(f"{self.folder / str(step)}: a checkpoint of another model: {problem}")
        abstract = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for path, leaf in wanted.items()
        }
        arguments = ocp.args.PyTreeRestore(
            abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=True,
        )
        folder = self.folder.resolve() / str(step)
        # Not by the manager, in which processes wait for one that could not read its part.
        try:
            state = ocp.PyTreeCheckpointHandler().restore(folder / "state", args=arguments)
            return state, ocp.JsonCheckpointHandler().restore(folder / "extra")
        except Exception as error:
            raise self._damaged(step, error) from error

    def restore_newest(self, like: Any) -> tuple[int, Any, dict, list[str]]:
        """Reads the newest checkpoint that is not damaged; arguments as `restore`.

        Damaged ones are set aside, if this is not to read only: the run will come back to their
        step.

        Returns:
            Its step, what `restore` returns, and a line on each damaged one.

        Raises:
            FileNotFoundError: there is none.
            ValueError: all are damaged, or the newest sound one is of another model.
        """
        problems = list(self.problems)
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                state, extra = self.restore(step, like)
            except DamagedError as error:
                problems.append(str(error))
                continue
            self._set_aside([other for other in self._manager.all_steps() if other > step])
            return step, state, extra, problems
        if problems:
            raise ValueError(problems[0])
        raise FileNotFoundError(f"{self.folder.parent}: has no checkpoint yet")

    def _set_aside(self, steps: Sequence[int]) -> None:
        if self._read_only or not steps:
            return
        self._rename(steps)
        self._manager.reload()

    def _rename(self, steps: Iterable[int]) -> None:
        if jax.process_index() == 0:
            for step in steps:
                place = self.folder / f"damaged-{step}"
                shutil.rmtree(place, ignore_errors=True)
                (self.folder / str(step)).rename(place)
        wait_for_all("checkpoints were set aside")

    def _without_metrics(self) -> dict[int, str]:
        """A line on each checkpoint whose metrics cannot be read, by its step."""
        found = {}
        for path in sorted(self.folder.glob("[0-9]*/metrics/metrics")):
            step = path.parents[1]
            try:
                json.loads(path.read_text())
            except (ValueError, OSError, RecursionError) as error:
                reason = f"its metrics cannot be read: {_reason(error)}"
                found[int(step.name)] = f"{step}: the checkpoint is damaged: {reason}"
        return found

    def _set_aside_without(self, problems: dict[int, str]) -> list[str]:
        """Sets checkpoints aside that would keep Orbax from opening the others.

        Raises:
            ValueError: there is no other.
        """
        if not problems:
            return []
        if len(problems) == len(list(self.folder.glob("[0-9]*"))):
            raise ValueError(problems[max(problems)])
        wait_for_all("metrics of checkpoints were read")
        self._rename(problems)
        return list(problems.values())

    def _shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        try:
            tree = self._manager.item_metadata(step).state
            if tree is None:
                raise FileNotFoundError("the state has no metadata")
            return {path: tuple(leaf.shape) for path, leaf in tree.items()}
        except Exception as error:
            raise self._damaged(step, error) from error

    def _damaged(self, step: int, error: Exception) -> DamagedError:
        return DamagedError(
            f"{self.folder / str(step)}: the checkpoint is damaged: {_reason(error)}"
        )

    def close(self) -> None:
        """Waits for what is being saved, and closes."""
        self._waited()
        try:
            self._manager.close()
        except Exception:
            # Of a checkpoint that could not be saved it was told before.
            if self._unsaved is None:
                raise


def _validation_error(metrics: dict) -> float:
    return metrics[METRIC]


def _by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths: names that do not depend on the types of its nodes."""
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _difference(saved: dict[str, tuple[int, ...]], wanted: dict[str, Any]) -> str | None:
    for path, leaf in wanted.items():
        if path not in saved:
            return f"it lacks {path}"
        if saved[path] != tuple(leaf.shape):
            return f"{path} has shape {saved[path]} there, {tuple(leaf.shape)} here"
    return None


def _reason(error: BaseException) -> str:
    """The first line of an error's cause, without the settings that TensorStore adds to it."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line.partition(" [tensorstore_spec=")[0]
