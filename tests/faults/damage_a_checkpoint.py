"""`python tests/faults/damage_a_checkpoint.py`: damages what one of two processes has saved.

In the newest checkpoint of a run with weights split over its processes, the largest file of the
second process is given another byte, cut short, or removed. The run, started again, must tell of
it in one line, set the checkpoint aside, go on from the one before it, and end with the same bits.
"""

import shutil
from pathlib import Path

from small_runs import (
    DARCY,
    STEPS,
    assert_same_bits,
    line_with,
    scratch,
    train,
)

RUN = [*DARCY, "model.n_hidden=64", "mesh.data=2", "mesh.points=2", "mesh.shard_parameters=true"]


def flip(path: Path) -> None:
    """Changes one bit."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    """Takes the end off."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def main() -> None:
    """Damages, goes on, and compares."""
    with scratch() as cache:
        whole = cache / "whole"
        train(cache, whole, *RUN, processes=2)
        for harm in (flip, truncate, Path.unlink):
            folder = cache / harm.__name__
            shutil.copytree(whole, folder)
            of_second = (folder / "checkpoints" / str(STEPS)).glob("state/ocdbt.process_1/d/*")
            file = max(of_second, key=lambda path: path.stat().st_size)
            size = file.stat().st_size
            harm(file)
            result = train(cache, folder, *RUN, processes=2)
            told = line_with(result, f"checkpoints/{STEPS}: the checkpoint is damaged: ")
            line_with(result, f"going on from step {STEPS - 10} of {STEPS}")
            assert (folder / "checkpoints" / f"damaged-{STEPS}").is_dir()
            assert_same_bits(folder, whole)
            print(
                f"{harm.__name__} of {size:,} bytes: {told.rpartition('damaged: ')[2]}", flush=True
            )


if __name__ == "__main__":
    main()
