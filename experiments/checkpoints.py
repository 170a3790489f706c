"""Checkpoints of a run: asynchronous, whole or not there, readable on any mesh."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

METRIC = "validation_relative_l2"
# Orbax tells of every file that it opens; what a user must know is raised as an error here.
logging.getLogger("absl").setLevel(logging.ERROR)


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
            ValueError: the list of checkpoints is damaged.
        """
        self.folder = folder / "checkpoints"
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
        try:
            self._manager = ocp.CheckpointManager(
                self.folder.resolve(),
                options=options,
                item_handlers={
                    "state": ocp.PyTreeCheckpointHandler(),
                    "extra": ocp.JsonCheckpointHandler(),
                },
            )
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{self.folder}: the metrics of a checkpoint are damaged: {_reason(error)}"
            ) from error

    def save(self, step: int, state: Any, extra: dict, validation_error: float | None) -> None:
        """Saves a checkpoint in the background.

        Args:
            step: optimizer steps taken.
            state: a tree of arrays.
            extra: what else goes with it, as JSON.
            validation_error: the error by which the best one is chosen, if it is known.
        """
        # A NaN can be compared to nothing: Orbax would take any checkpoint for the best.
        known = validation_error is not None and math.isfinite(validation_error)
        metrics = {METRIC: validation_error} if known else None
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(_by_path(state)), extra=ocp.args.JsonSave(extra)
            ),
            metrics=metrics,
            force=True,
        )

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
        problem = _difference(self._shapes(step), wanted)
        if problem:
            raise ValueError(f"{self.folder / str(step)}: a checkpoint of another model: {problem}")
        abstract = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for path, leaf in wanted.items()
        }
        try:
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeRestore(
                        abstract,
                        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
                        partial_restore=True,
                    ),
                    extra=ocp.args.JsonRestore(),
                ),
            )
        except Exception as error:
            raise self._damaged(step, error) from error
        # Without a mesh, shapes alone carry no sharding, and Orbax reads onto the host.
        leaves = [jnp.asarray(restored.state[path]) for path in wanted]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), restored.extra

    def _shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        try:
            tree = self._manager.item_metadata(step).state
            if tree is None:
                raise FileNotFoundError("the state has no metadata")
            return {path: tuple(leaf.shape) for path, leaf in tree.items()}
        except Exception as error:
            raise self._damaged(step, error) from error

    def _damaged(self, step: int, error: Exception) -> ValueError:
        others = [other for other in self._manager.all_steps() if other < step]
        remedy = f"go on from step {max(others)}" if others else "start anew"
        return ValueError(
            f"{self.folder / str(step)}: the checkpoint is damaged: {_reason(error)}; delete this "
            f"folder to {remedy}"
        )

    def close(self) -> None:
        """Waits for what is being saved, and closes."""
        self._manager.wait_until_finished()
        self._manager.close()


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


def _reason(error: Exception) -> str:
    """The first line of an error's cause, without the settings that TensorStore adds to it."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line.partition(" [tensorstore_spec=")[0]
