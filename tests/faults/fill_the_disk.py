"""`python tests/faults/fill_the_disk.py`: the disk of a run becomes full while it saves and logs.

The run is on a small disk of its own (a tmpfs, which root may mount on Linux), of one process and
of two. Once its first checkpoint is there the disk is filled. The run must tell of what it cannot
write and end with exit code 2; the checkpoint must stay; and with room again the run, started
again, must go on from it and end with the bits and the log of one that was left alone.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from small_runs import (
    DARCY,
    assert_same_bits,
    launch,
    line_with,
    saved_steps,
    scratch,
    train,
    wait,
)

STEPS = 200
RUN = [*DARCY, "mesh.data=1", "mesh.points=2", f"train.steps={STEPS}", "train.checkpoint_every=20"]


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A disk of 8 MB; without one the program ends."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        reason = done.stderr.strip()
    except FileNotFoundError:
        reason = "there is no mount"
    if reason:
        sys.exit(
            f"fill_the_disk: expected a system where a small disk can be mounted; got {reason}"
        )
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(file: Path) -> None:
    """Writes until nothing more can be written."""
    with file.open("wb", buffering=0) as content, contextlib.suppress(OSError):
        while True:
            content.write(bytes(4096))


def fill_once_saved(cache: Path, folder: Path, processes: int):
    """Trains a run whose disk becomes full when it has a checkpoint; how it ended, and that."""
    where = (f"hydra.run.dir={folder}", f"data.cache_dir={cache}")
    run = launch(cache, "train", *RUN, *where, processes=processes, devices=2 // processes)
    try:
        while not saved_steps(folder):
            assert run.poll() is None, run.communicate()
            time.sleep(0.001)
        fill(folder.parent / "ballast")
        return wait(run, 500), saved_steps(folder)
    finally:
        run.terminate()


def main() -> None:
    """Fills the disk, makes room, and compares."""
    with scratch() as cache:
        for processes in (1, 2):
            one = {"processes": processes, "devices": 2 // processes}
            whole = cache / f"whole_{processes}"
            train(cache, whole, *RUN, **one)
            with small_disk(cache / f"disk_{processes}") as disk:
                folder = disk / "run"
                result, saved = fill_once_saved(cache, folder, processes)
                assert result.code == 2, f"{result.code}\n{result.out}\n{result.err}"
                told = line_with(result, "error: ")
                lost = result.out.count("could not be saved")
                log = line_with(result, "log.jsonl: could not be written: ")
                (disk / "ballast").unlink()
                again = train(cache, folder, *RUN, **one)
                line_with(again, f"going on from step {saved[-1]} of {STEPS}")
                assert_same_bits(folder, whole, STEPS)
            print(
                f"{processes} processes: {lost} checkpoints not saved, {saved} kept; {log}; "
                f"{told}; with room again went on to the same bits",
                flush=True,
            )


if __name__ == "__main__":
    main()
