"""`python -m experiments.bodies FOLDER`: surfaces of random bodies in an ideal flow, as VTP files.

For each sample `NNN.vtp` holds a closed surface of triangles with the flow on it, `NNN.stl` the
surface alone and `NNN.json` the free stream. A sample that is there already is left alone, so that
an interrupted command goes on. A sample depends on the seed, its number and `--faces` only.
"""

import argparse
from pathlib import Path

from experiments.cli import one_line_errors
from experiments.extras import require_extra


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bodies",
        description="Writes surfaces of random bodies in an ideal flow as VTP, STL and JSON files.",
    )
    parser.add_argument("folder", type=Path, help="of the files, made if missing")
    parser.add_argument("--samples", type=int, default=40, help="default: 40")
    parser.add_argument("--faces", type=int, default=1000, help="triangles; default: 1000")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--workers", type=int, default=1, help="processes; default: 1")
    arguments = parser.parse_args()
    require_extra("meshes", "experiments.bodies")
    from experiments.problems.bodies import make_bodies

    make_bodies(**vars(arguments))


if __name__ == "__main__":
    one_line_errors(main)
