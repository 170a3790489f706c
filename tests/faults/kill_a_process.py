"""`python tests/faults/kill_a_process.py [TIMES]`: kills one of four processes, again and again.

Each time one process of a training, drawn by chance, is killed by SIGKILL at a step drawn by
chance. The others must end within a minute and name it, and the run, started again, must end with
the bits and the log of one that was left alone. Ten times take about ten minutes on two cores.
"""

import random
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[folder]) for folder in (1, 2)]

import numpy as np  # noqa: E402
from commands import wait  # noqa: E402
from processes import DARCY, PROCESSES, killed, launch  # noqa: E402
from saved import saved_arrays  # noqa: E402


def finish(cache: Path, run: list[str], folder: Path) -> None:
    """Trains a run to its end."""
    result = wait(launch(cache, "train", *run, f"hydra.run.dir={folder}"), 300)
    assert result.code == 0, result.err


def main(times: int) -> None:
    """Kills, goes on, and compares."""
    with tempfile.TemporaryDirectory() as place:
        cache = Path(place)
        run = [*DARCY, "mesh.data=2", "mesh.points=4", f"data.cache_dir={cache}"]
        whole = cache / "whole"
        finish(cache, run, whole)
        expected = saved_arrays(whole, 30)
        for time in range(times):
            folder = cache / f"killed_{time}"
            number, step = random.randrange(PROCESSES), random.randint(1, 27)
            results, seconds = killed(cache, run, folder, number, step)
            codes = [result.code for result in results]
            print(f"process {number} killed at step {step}: {codes} in {seconds:.0f} s", flush=True)
            assert seconds < 60
            assert 0 not in codes
            finish(cache, run, folder)
            actual = saved_arrays(folder, 30)
            assert actual.keys() == expected.keys()
            for path, values in expected.items():
                assert np.array_equal(actual[path], values, equal_nan=True), path
            assert (folder / "log.jsonl").read_text() == (whole / "log.jsonl").read_text()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
