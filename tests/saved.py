"""What a run has saved, read without this project's own reader."""

from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp


def saved_steps(folder: Path) -> list[int]:
    """The steps of which there are whole checkpoints; Orbax writes under other names first."""
    return sorted(int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdigit())


def saved_arrays(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, by its path."""
    checkpointer = ocp.PyTreeCheckpointer()
    path = folder.resolve() / "checkpoints" / str(step) / "state"
    as_numpy = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
        checkpointer.metadata(path).item_metadata,
    )
    return checkpointer.restore(path, restore_args=dict(as_numpy))
