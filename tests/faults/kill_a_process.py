"""`python tests/faults/kill_a_process.py [TIMES]`: kills one of four processes, again and again.

Each time one process of a training, drawn by chance, is killed by SIGKILL at a step drawn by
chance. The others must end within a minute and name it, and the run, started again, must end with
the bits and the log of one that was left alone. Ten times take about ten minutes on two cores.
"""

import random
import sys

from small_runs import (
    DARCY,
    PROCESSES,
    assert_same_bits,
    killed,
    scratch,
    train,
)

RUN = [*DARCY, "mesh.data=2", "mesh.points=4"]


def main(times: int) -> None:
    """Kills, goes on, and compares."""
    with scratch() as cache:
        whole = cache / "whole"
        train(cache, whole, *RUN)
        for time in range(times):
            folder = cache / f"killed_{time}"
            number, step = random.randrange(PROCESSES), random.randint(1, 27)
            results, seconds = killed(
                cache, [*RUN, f"data.cache_dir={cache}"], folder, number, step
            )
            codes = [result.code for result in results]
            print(f"process {number} killed at step {step}: {codes} in {seconds:.0f} s", flush=True)
            assert seconds < 60
            assert 0 not in codes
            train(cache, folder, *RUN)
            assert_same_bits(folder, whole)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
