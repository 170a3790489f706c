"""Errors of a model over a split of the data."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

import parallel
from experiments.batches import evaluation_batch_size, whole_batches
from experiments.data import Dataset, Split, Statistics
from parallel.points import to_host


class SplitResult(NamedTuple):
    """Result of a model on a split of n samples.

    Attributes:
        relative_l1: error of each sample and field.
        relative_l2: likewise.
        quantities: predicted and true integrated quantities of each sample, by name.
        predictions: those asked for, in physical units, by sample.
    """

    relative_l1: Float[np.ndarray, "n C_out"]
    relative_l2: Float[np.ndarray, "n C_out"]
    quantities: dict[str, Float[np.ndarray, "n 2"]]
    predictions: dict[int, Float[np.ndarray, "N C_out"]]


def evaluate_split(
    evaluate: Callable,
    params,
    statistics: Statistics,
    split: Split,
    structured_shape: tuple[int, ...] | None,
    batch_size: int,
    *,
    pictured: Sequence[int] = (),
    quantities: bool = False,
) -> SplitResult:
    """Evaluates every sample of a split, in order.

    Args:
        evaluate: a function made by `training.make_evaluation`.
        params: weights of the model.
        statistics: statistics by which it normalizes.
        split: the samples.
        structured_shape: shape of the model's grid, if it has one.
        batch_size: training batch; evaluation takes a multiple of it.
        pictured: samples whose prediction is wanted.
        quantities: whether to integrate quantities too, for which every prediction is fetched.
    """
    errors, predictions, integrated = [], {}, {}
    for batch, indices in whole_batches(split, evaluation_batch_size(batch_size), structured_shape):
        prediction, *both = evaluate(params, statistics, batch)
        # Not fetched yet: the host prepares the next batch while the devices work.
        errors.append((both, len(indices)))
        integrate = quantities and split.has_quantities
        if not integrate and not set(indices) & set(pictured):
            continue
        # Fetched whole: on several hosts all of them take part.
        for index, fields in zip(indices, _on_host(prediction, structured_shape), strict=False):
            fields = fields[: split.num_points(index)]
            if index in pictured:
                predictions[int(index)] = fields
            if integrate:
                for name, pair in split.quantities(index, fields).items():
                    integrated.setdefault(name, []).append(pair)
    relative_l1, relative_l2 = (
        np.concatenate([to_host(both[order])[:count] for both, count in errors])
        for order in range(2)
    )
    pairs = {name: np.array(values) for name, values in integrated.items()}
    return SplitResult(relative_l1, relative_l2, pairs, predictions)


def _on_host(prediction, structured_shape):
    if structured_shape is not None:
        return parallel.unshard_points(prediction, structured_shape=structured_shape)
    return to_host(prediction)


def r_squared(pairs: Float[np.ndarray, "n 2"]) -> float:
    """Coefficient of determination of predicted against true values, which must differ."""
    predicted, true = pairs.T
    return float(1 - ((predicted - true) ** 2).sum() / ((true - true.mean()) ** 2).sum())


def metrics_of(result: SplitResult, dataset: Dataset) -> dict:
    """The metrics of a test split, by name.

    Means over the samples; `test_relative_l2` is the mean over the fields too, and of it median
    and largest are given. Fields are told apart where there are several; integrated quantities have
    their coefficient of determination, where their true values differ.
    """
    of_samples = result.relative_l2.mean(1)
    metrics = {
        "test_relative_l2": float(of_samples.mean()),
        "test_relative_l2_median": float(np.median(of_samples)),
        "test_relative_l2_max": float(of_samples.max()),
        "test_relative_l1": float(result.relative_l1.mean()),
        "test_samples": len(of_samples),
    }
    if len(dataset.fields) > 1:
        for i, field in enumerate(dataset.fields):
            metrics[f"test_relative_l1_{field}"] = float(result.relative_l1[:, i].mean())
            metrics[f"test_relative_l2_{field}"] = float(result.relative_l2[:, i].mean())
    for name, pairs in result.quantities.items():
        if pairs[:, 1].std() > 0:
            metrics[f"test_r2_{name}"] = r_squared(pairs)
    return metrics
