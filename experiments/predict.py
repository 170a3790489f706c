"""`python -m experiments.predict RUN FILES... --out DIR`: predicted fields on the points of meshes.

A file is a mesh (VTK, STL), a file of arrays (HDF5, `.npz`), a folder of the files of one sample,
or a sample of a store. It is written again with `*_pred` beside its fields, and `*_error` where
these are there, in the units of the files. Several processes each read the files, share out their
points among the devices of all, and the first writes.
"""

import argparse
from pathlib import Path

from experiments.cli import add_run, one_line_errors
from experiments.extras import require_extra


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.predict", description="Predicted fields on meshes."
    )
    add_run(parser)
    parser.add_argument(
        "files", nargs="+", help="meshes, files of arrays, folders of a sample; or mesh.points=4"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder that is written to")
    parser.add_argument(
        "--points-at-once", type=int, help="points that go through a layer at a time"
    )
    parser.add_argument(
        "--mc-dropout-samples",
        type=int,
        default=0,
        help="draws of the dropouts, whose mean and standard deviation are written",
    )
    parser.add_argument("--seed", type=int, default=0, help="of these draws")
    parser.add_argument(
        "--save-state",
        action="store_true",
        help="keep what further points can be predicted from, as NAME.state.npz",
    )
    parser.add_argument("--state", type=Path, help="predict the points from such a file alone")
    given = vars(parser.parse_intermixed_args())
    run, files, out = given.pop("run"), given.pop("files"), given.pop("out")
    paths = [Path(file) for file in files if "=" not in file or Path(file).exists()]
    overrides = [file for file in files if Path(file) not in paths]
    if not paths:
        raise ValueError("predict: expected at least one file; got none")
    require_extra("meshes", "experiments.predict")
    from experiments.predicting import Options, predict

    predict(run, paths, out, overrides, Options(**given))


if __name__ == "__main__":
    one_line_errors(main)
