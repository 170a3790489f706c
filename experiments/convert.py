"""`python -m experiments.convert FOLDER STORE`: a folder of simulation files into a Zarr store.

A sample is a subfolder, or the files of one name. What is already in the store and unchanged is
left alone, so that an interrupted conversion goes on. A sample that cannot be converted is named
with what is wrong, and the others go on; the command then ends with exit code 1.
"""

import argparse
import os
from pathlib import Path

from experiments.cli import one_line_errors
from experiments.extras import require_extra

_KINDS = ("surface", "volume")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.convert",
        description="Turns a folder of VTK, STL, HDF5, .npz and .npy files into a Zarr store.",
    )
    parser.add_argument(
        "folder", type=Path, help="the files: a subfolder or a name for each sample"
    )
    parser.add_argument("store", type=Path, help="the store, made if missing")
    for kind in _KINDS:
        parser.add_argument(
            f"--{kind}-fields", nargs="+", metavar="NAME", help=f"fields of a {kind}; default: all"
        )
    parser.add_argument(
        "--keep-order",
        action="store_true",
        help="keep the order of the points; random subsets then cost reading nearly all",
    )
    parser.add_argument(
        "--no-distances",
        action="store_true",
        help="do not compute signed distances of a volume's points from the STL",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    arguments = parser.parse_args()
    require_extra("meshes", "experiments.convert")
    from experiments.meshes.conversion import Options, convert, describe

    surface_fields, volume_fields = (
        None if names is None else tuple(names)
        for names in (arguments.surface_fields, arguments.volume_fields)
    )
    options = Options(
        surface_fields,
        volume_fields,
        shuffle=not arguments.keep_order,
        distances=not arguments.no_distances,
    )
    rows = convert(arguments.folder, arguments.store, options, arguments.workers)
    print(describe(rows))
    if not any("field_names" in row for row in rows):
        raise ValueError(f"{arguments.folder}: expected samples that can be converted; got none")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    one_line_errors(main)
