"""Run by a Python that has PhysicsNeMo: its side of `test_import_physicsnemo.py`.

For each NAME.mdlus of a folder, made by us, its model is loaded and called with the inputs of
NAME.npz (`flags` are keywords of the call): NAME.out.npz. Then its weights are changed, and it is
saved and called again: NAME.theirs.mdlus, NAME.theirs.npz.
"""

import io
import json
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import torch

warnings.simplefilter("ignore")
from physicsnemo import Module  # noqa: E402


def call(model, inputs) -> dict[str, np.ndarray]:
    """Outputs, on grids flat: of a shape from JSON, a list, the reference takes nothing else."""
    axes = len(model.structured_shape or ())
    streams = {}
    for key in sorted(inputs):
        name, _, stream = key.partition(".")
        values = torch.from_numpy(inputs[key])
        if axes and values.ndim == axes + 2:
            values = values.flatten(1, axes)
        streams[name] = (*streams.get(name, ()), values) if stream else values
    with torch.no_grad():
        output = model(**streams)
    outputs = output if isinstance(output, tuple) else (output,)
    return {str(i): values.numpy() for i, values in enumerate(outputs)}


def main(folder: Path) -> None:
    torch.manual_seed(0)
    for path in sorted(folder.glob("*.mdlus")):
        with zipfile.ZipFile(path) as archive:
            content = archive.read("model.pt")
            assert set(json.loads(archive.read("metadata.json"))) == {
                "physicsnemo_version",
                "mdlus_file_version",
            }
        assert torch.load(io.BytesIO(content), weights_only=True)
        model = Module.from_checkpoint(str(path)).eval()
        with np.load(path.with_suffix(".npz")) as archive:
            inputs = dict(archive)
        if inputs:
            np.savez(path.with_suffix(".out.npz"), **call(model, inputs))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        model.save(str(path.with_suffix(".theirs.mdlus")))
        if inputs:
            np.savez(path.with_suffix(".theirs.npz"), **call(model, inputs))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
