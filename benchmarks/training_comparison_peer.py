"""Run by a Python that has PhysicsNeMo: the reference's side of `benchmarks.training_comparison`.

Trains the model of a checkpoint on the batches of a file of arrays, and writes its losses.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from physicsnemo import Module


def train(checkpoint: Path, batches: Path) -> np.ndarray:
    """The loss of each step, before its update."""
    model = Module.from_checkpoint(str(checkpoint)).train()
    with np.load(batches, allow_pickle=False) as archive:
        arrays = dict(archive)
    options = {name: float(arrays.pop(name)) for name in ("learning_rate", "weight_decay")}
    betas = tuple(arrays.pop("betas").tolist())
    decayed = set(arrays.pop("decayed").tolist())
    targets = torch.from_numpy(arrays.pop("target"))
    mean, deviation = (torch.from_numpy(arrays.pop(name)) for name in ("mean", "deviation"))
    inputs = {name: torch.from_numpy(values) for name, values in arrays.items()}

    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in parameters.items() if name in decayed]},
        {"params": [p for name, p in parameters.items() if name not in decayed], "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=options["learning_rate"], betas=betas, weight_decay=options["weight_decay"]
    )
    losses = []
    for step, target in enumerate(targets):
        output = model(**{name: values[step] for name, values in inputs.items()})
        error = torch.linalg.norm(output * deviation + mean - target, dim=1)
        loss = (error / torch.linalg.norm(target, dim=1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a .mdlus file")
    parser.add_argument("batches", type=Path, help="inputs and targets, .npz")
    parser.add_argument("losses", type=Path, help="what is written, .npz")
    arguments = parser.parse_args()
    np.savez(arguments.losses, loss=train(arguments.checkpoint, arguments.batches))


if __name__ == "__main__":
    main()
