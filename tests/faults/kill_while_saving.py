"""`python tests/faults/kill_while_saving.py [TIMES]`: kills a process while it saves a checkpoint.

Each time one of four processes, or all of them as when the power fails, is killed by SIGKILL as
soon as there is the temporary folder of a checkpoint after the first. What is half-written must not
be read: the run, started again, must go on from the newest whole checkpoint, end with the bits and
the log of one that was left alone, and leave nothing half-written. A time takes about a minute.
"""

import signal
import sys
import time
from pathlib import Path

from small_runs import (
    DARCY,
    PROCESSES,
    assert_same_bits,
    line_with,
    saved_steps,
    scratch,
    start_each,
    train,
    wait,
)

RUN = [*DARCY, "mesh.data=2", "mesh.points=4", "train.checkpoint_every=3"]


def half_written(folder: Path) -> list[Path]:
    """What is being saved, or was when the run was killed."""
    return list((folder / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def kill(cache: Path, folder: Path, numbers: list[int]) -> tuple[str, list[int]]:
    """Kills processes while a checkpoint is saved; its folder and the exit codes of all."""
    processes = start_each(cache, *RUN, f"hydra.run.dir={folder}", f"data.cache_dir={cache}")
    try:
        while not (saved_steps(folder) and (found := half_written(folder))):
            ended = [process for process in processes if process.poll() is not None]
            assert not ended, f"ended before it could be killed: {ended[0].communicate()}"
            time.sleep(0.001)
        for number in numbers:
            processes[number].send_signal(signal.SIGKILL)
        return found[0].name, [wait(process, 100).code for process in processes]
    finally:
        for process in processes:
            process.kill()


def main(times: int) -> None:
    """Kills, goes on, and compares."""
    cases = [[0], [1], list(range(PROCESSES)), [2], [3]]
    with scratch() as cache:
        whole = cache / "whole"
        train(cache, whole, *RUN)
        for number in range(times):
            numbers, folder = cases[number % len(cases)], cache / f"killed_{number}"
            saving, codes = kill(cache, folder, numbers)
            half, newest = len(half_written(folder)), saved_steps(folder)[-1]
            result = train(cache, folder, *RUN)
            line_with(result, f"going on from step {newest} of 30")
            assert not half_written(folder)
            assert_same_bits(folder, whole)
            print(
                f"killed {numbers} with {saving} there: {codes}, {half} half-written; went on from "
                f"step {newest} to the same bits",
                flush=True,
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
