"""`python tests/faults/share_a_folder.py`: starts two runs of two processes each in one folder.

The one that comes second must be refused in one line and change nothing: the other must end with
the bits and the log of a run that was left alone.
"""

from small_runs import (
    DARCY,
    STEPS,
    assert_same_bits,
    launch,
    line_with,
    scratch,
    train,
    wait,
)

RUN = [*DARCY, "mesh.data=2", "mesh.points=2"]


def main() -> None:
    """Starts both at once, and compares."""
    with scratch() as cache:
        whole, folder = cache / "whole", cache / "shared"
        train(cache, whole, *RUN, processes=2)
        where = (f"hydra.run.dir={folder}", f"data.cache_dir={cache}")
        both = [launch(cache, "train", *RUN, *where, processes=2) for _ in range(2)]
        try:
            results = sorted(wait(run, 500) for run in both)
        finally:
            for run in both:
                run.terminate()
        assert [result.code for result in results] == [0, 2], results
        told = line_with(results[1], "error: ", "expected a folder that no other run is in")
        assert_same_bits(folder, whole)
        print(f"refused: {told}; the other took its {STEPS} steps to the same bits")


if __name__ == "__main__":
    main()
