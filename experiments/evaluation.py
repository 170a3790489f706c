"""Errors of a model over a split of the data."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

import parallel
from experiments.data import Split, Statistics, evaluation_batch_size, whole_batches
from parallel.points import to_host


class SplitResult(NamedTuple):
    """Result of a model on a split.

    Attributes:
        relative_l2: error of each sample, `(n,)`.
        predictions: the first few predictions in physical units, `(k, N, C_out)`.
    """

    relative_l2: Float[np.ndarray, " n"]
    predictions: Float[np.ndarray, "k N C_out"]


def evaluate_split(
    evaluate: Callable,
    params,
    statistics: Statistics,
    split: Split,
    structured_shape: tuple[int, ...] | None,
    batch_size: int,
    *,
    pictured: int = 0,
) -> SplitResult:
    """Evaluates every sample of a split, in order.

    Args:
        evaluate: a function made by `training.make_evaluation`.
        params: weights of the model.
        statistics: statistics by which it normalizes.
        split: the samples.
        structured_shape: shape of the model's grid, if it has one.
        batch_size: training batch; evaluation takes a multiple of it.
        pictured: number of samples whose prediction is wanted, at most a batch.
    """
    errors, first = [], None
    for batch, count in whole_batches(split, evaluation_batch_size(batch_size), structured_shape):
        prediction, error = evaluate(params, statistics, batch)
        first = prediction if first is None else first
        # Not fetched yet: the host prepares the next batch while the devices work.
        errors.append((error, count))
    predictions = parallel.unshard_points(first, split.fx.shape[1], structured_shape)[:pictured]
    return SplitResult(np.concatenate([to_host(e)[:count] for e, count in errors]), predictions)
