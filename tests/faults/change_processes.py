"""`python tests/faults/change_processes.py`: a run that goes on with fewer and fewer processes.

Four processes on a mesh of (data, points) = (2, 4) are stopped by SIGTERM to one of them, two on
(1, 4) likewise, and one process of a single device ends the run. All losses must be within 1e-5 of
those of one process that was left alone.
"""

import random
import signal
from pathlib import Path

import numpy as np
from small_runs import (
    DARCY,
    STEPS,
    losses,
    saved_steps,
    scratch,
    start_each,
    train,
    wait,
    wait_for_step,
)

STOPPED = 128 + signal.SIGTERM


def stop(cache: Path, folder: Path, step: int, *mesh: str, processes: int) -> int:
    """Trains until a signal reaches one process at a step; the step at which all saved."""
    where = (f"hydra.run.dir={folder}", f"data.cache_dir={cache}")
    running = start_each(cache, *DARCY, *mesh, *where, processes=processes)
    try:
        wait_for_step(running, folder, step)
        random.choice(running).send_signal(signal.SIGTERM)
        codes = [wait(process, 200).code for process in running]
    finally:
        for process in running:
            process.kill()
    assert codes == [STOPPED] * processes, codes
    return saved_steps(folder)[-1]


def main() -> None:
    """Stops, goes on with fewer processes, and compares."""
    with scratch() as cache:
        whole, folder = cache / "whole", cache / "changed"
        train(cache, whole, *DARCY, "mesh.data=1", processes=1, devices=1)
        first = stop(cache, folder, 5, "mesh.data=2", "mesh.points=4", processes=4)
        second = stop(cache, folder, first + 5, "mesh.data=1", "mesh.points=4", processes=2)
        train(cache, folder, *DARCY, "mesh.data=1", processes=1, devices=1)
        found, expected = losses(folder), losses(whole)
        assert len(found) == len(expected) == STEPS
        difference = np.abs(found / expected - 1).max()
        print(
            f"four processes to step {first}, two to step {second}, one to step {STEPS}: losses "
            f"within {difference:.1e} of those of one process"
        )
        assert difference < 1e-5


if __name__ == "__main__":
    main()
