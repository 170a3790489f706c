"""Errors of a model over a split of the data."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, PyTree

import parallel
from experiments.data.batch import Statistics
from experiments.data.batches import evaluation_batch_size, whole_batches
from experiments.data.dataset import Dataset, Split
from experiments.results.field_errors import FieldErrors, on_host
from parallel.placement import to_host

# Of coefficients: what spreads less is rounding, as the drag of a body in an ideal flow is.
LEAST_SPREAD = 1e-6


class SplitResult(NamedTuple):
    """Result of a model on a split of n samples.

    Attributes:
        errors: of each sample and field.
        quantities: predicted and true integrated quantities of each sample, by name.
        predictions: of each stream, of the samples asked for, in the units of the targets.
    """

    errors: FieldErrors
    quantities: dict[str, Float[np.ndarray, "n 2"]]
    predictions: dict[int, tuple[Float[np.ndarray, "N C_out"], ...]]


def evaluate_split(
    evaluate: Callable,
    params: PyTree,
    statistics: Statistics,
    split: Split,
    structured_shape: tuple[int, ...] | None,
    batch_size: int,
    *,
    samples: Sequence[int] | None = None,
    pictured: Sequence[int] = (),
    quantities: bool = False,
) -> SplitResult:
    """Evaluates the samples of a split, in order.

    Args:
        evaluate: a function made by `training.make_evaluation`.
        params: weights of the model.
        statistics: statistics by which it normalizes.
        split: the samples.
        structured_shape: shape of the model's grid, if it has one.
        batch_size: training batch; evaluation takes a multiple of it.
        samples: those that are evaluated, by default all.
        pictured: those of them whose prediction is wanted.
        quantities: whether to integrate quantities too, for which every prediction is fetched.
    """
    errors: list = []
    predictions: dict[int, Any] = {}
    integrated: dict[str, Any] = {}
    size = evaluation_batch_size(batch_size, max(split.lengths))
    for batch, indices in whole_batches(split, size, structured_shape, samples):
        prediction, of_fields = evaluate(params, statistics, batch)
        # Not fetched yet: the host prepares the next batch while the devices work.
        errors.append((of_fields, len(indices)))
        integrate = quantities and split.has_quantities
        if not integrate and not set(indices) & set(pictured):
            continue
        # Fetched whole: on several hosts all of them take part.
        fetched = [_on_host(stream, structured_shape) for stream in prediction]
        for row, index in enumerate(indices.tolist()):
            fields = tuple(
                stream[row, :count]
                for stream, count in zip(fetched, split.num_points(index), strict=True)
            )
            if index in pictured:
                predictions[index] = fields
            if integrate:
                for name, pair in split.quantities(index, fields).items():
                    integrated.setdefault(name, []).append(pair)
    pairs = {name: np.array(values) for name, values in integrated.items()}
    return SplitResult(on_host(errors), pairs, predictions)


def _on_host(prediction: Any, structured_shape: tuple[int, ...] | None) -> Any:
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
    their mean and largest error, and their coefficient of determination where true values differ.
    """
    relative_l1, relative_l2 = result.errors.relative_l1, result.errors.relative_l2
    of_samples = relative_l2.mean(1)
    metrics = {
        "test_relative_l2": float(of_samples.mean()),
        "test_relative_l2_median": float(np.median(of_samples)),
        "test_relative_l2_max": float(of_samples.max()),
        "test_relative_l1": float(relative_l1.mean()),
        "test_samples": len(of_samples),
    }
    if len(dataset.fields) > 1:
        for i, field in enumerate(dataset.fields):
            metrics[f"test_relative_l1_{field}"] = float(relative_l1[:, i].mean())
            metrics[f"test_relative_l2_{field}"] = float(relative_l2[:, i].mean())
    for name, pairs in result.quantities.items():
        error = np.abs(pairs[:, 0] - pairs[:, 1])
        metrics[f"test_mean_error_{name}"] = float(error.mean())
        metrics[f"test_max_error_{name}"] = float(error.max())
        if pairs[:, 1].std() > LEAST_SPREAD:
            metrics[f"test_r2_{name}"] = r_squared(pairs)
    return metrics


def field_table(errors: FieldErrors, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Errors field by field, and in total in the last row.

    Relative errors are means over the samples, and in total over the fields too; absolute ones are
    over all points, in the unit of the field, so that in total there are none.
    """
    relative_l1, relative_l2 = errors.relative_l1.mean(0), errors.relative_l2.mean(0)
    columns = (relative_l1, relative_l2, errors.mean_absolute, errors.largest.max(0))
    names = ("relative_l1", "relative_l2", "mean_absolute_error", "max_absolute_error", "r2")
    rows = [
        {"field": field, **dict(zip(names, map(float, values), strict=True))}
        for field, *values in zip(fields, *columns, errors.r_squared, strict=True)
    ]
    one = len(fields) == 1
    total = {
        "relative_l1": float(relative_l1.mean()),
        "relative_l2": float(relative_l2.mean()),
        "mean_absolute_error": rows[0]["mean_absolute_error"] if one else None,
        "max_absolute_error": rows[0]["max_absolute_error"] if one else None,
        "r2": float(np.mean(errors.r_squared)),
    }
    return [*rows, {"field": "total", **total}]
