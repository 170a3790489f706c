"""`python tests/faults/overflow_a_loss.py`: a loss that is not finite, on two processes.

At step 12 a sample of a store gets fields whose squares float32 cannot hold. The run must stop with
the step, the sample and the file of its batch in one line, and, started again where such steps may
be skipped, go on from the state before it and take the other steps.
"""

import numpy as np
from small_runs import (
    ON_STORE,
    POINTS,
    STEPS,
    line_with,
    losses,
    make_store,
    scratch,
    train,
    train_and,
    write_store_sample,
)


def main() -> None:
    """Has a loss overflow, then skips such steps."""
    with scratch() as cache:
        store, folder = cache / "store", cache / "run"
        bad = make_store(store)[0]
        run = [*ON_STORE, f"data.path={store}", "mesh.data=1", "mesh.points=2"]

        def spoil() -> None:
            write_store_sample(store, bad, np.full((POINTS, 1), 1e30, np.float32))

        result = train_and(spoil, cache, folder, *run, processes=2)
        assert result.code == 2, f"{result.code}\n{result.out}\n{result.err}"
        told = line_with(result, "error: ", "a finite loss and gradient", bad, "_process_*.npz")
        print(f"stopped: {told}")
        kept = int(told.partition("the state of step ")[2].split()[0])
        for number in range(2):
            batch = np.load(folder / f"nonfinite_step_{kept + 1}_process_{number}.npz")
            assert max(batch[name].max() for name in batch.files) > 1e29
        skip = ["train.on_nonfinite=skip", "train.max_skipped=30"]
        result = train(cache, folder, *run, *skip, processes=2, devices=1)
        line_with(result, f"going on from step {kept} of {STEPS}")
        skipped = result.out.count(" was skipped, since its loss or gradient is not finite")
        # Rows of steps that were skipped have no loss.
        assert len(losses(folder)) == STEPS - skipped
        print(
            f"went on from step {kept}: {skipped} of {STEPS - kept} steps skipped, the rest taken"
        )


if __name__ == "__main__":
    main()
