"""`python tests/faults/spoil_a_store.py`: a file of a store goes bad while it is trained on.

One bit of one chunk of one sample changes at step 12, which of two processes one may read and the
other not. The run must stop with the sample's name in one line, and, where bad samples may be
skipped, take all of its steps with others in its place; on one process and on two.
"""

import shutil
from pathlib import Path

from small_runs import (
    ON_STORE,
    STEPS,
    line_with,
    losses,
    make_store,
    scratch,
    train_and,
)


def spoil(sample: Path) -> None:
    """Changes one bit of the second of three chunks, as a disk may."""
    files = [path for path in (sample / "surface_fields" / "c").rglob("*") if path.is_file()]
    file = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[int(0.55 * len(content))] ^= 1
    file.write_bytes(content)


def main() -> None:
    """Spoils a copy of the store in each of four runs."""
    with scratch() as cache:
        whole = cache / "store"
        names = make_store(whole)
        for processes in (1, 2):
            for what, code in (("stop", 2), ("skip", 0)):
                store, folder = cache / f"store_{processes}_{what}", cache / f"{processes}_{what}"
                shutil.copytree(whole, store)
                bad = store / names[0]
                overrides = [*ON_STORE, f"data.path={store}", f"mesh.points={processes}"]
                overrides += ["mesh.data=1", f"train.on_bad_sample={what}"]
                result = train_and(
                    lambda bad=bad: spoil(bad), cache, folder, *overrides, processes=processes
                )
                assert result.code == code, f"{result.code}\n{result.out}\n{result.err}"
                told = line_with(result, f"{bad}: ", "surface_fields")
                if what == "skip":
                    assert len(losses(folder)) == STEPS
                print(f"{processes} processes, {what}: {code}, {told}", flush=True)


if __name__ == "__main__":
    main()
