"""Metrics as tables: aligned text for a screen, JSON and CSV to read by machine.

Numbers are cut to what a reader takes in on the screen and on the page of a report, and whole in
the files.
"""

import csv
import io
import math
from collections.abc import Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from experiments.files import write_json, write_text

Pairs = Float[np.ndarray, "n 2"]


def write_metrics(
    folder: Path,
    metrics: list[dict[str, Any]],
    quantities: dict[str, Pairs],
    sample_names: list[str],
    sample_errors: dict[str, float],
) -> None:
    """Writes `metrics.json`, `metrics.csv` and `samples.csv`, each whole or not at all.

    The first two are the table of metrics, the third has a row for each test sample: name, relative
    L2 error, and each quantity as predicted and as it is. Numbers have all their digits; what is
    `None` or not finite is `null` in JSON and empty in CSV.

    Args:
        folder: where the files go.
        metrics: as in `report_pages.ReportContent`, as is the rest.
        quantities: likewise.
        sample_names: likewise.
        sample_errors: likewise.

    Raises:
        ValueError: a quantity has not one predicted and one true value for each sample.
    """
    check_quantities(quantities, sample_names)
    columns = columns_of(metrics)
    rows = [{key: plain(row.get(key)) for key in columns} for row in metrics]
    write_json(folder / "metrics.json", rows)
    _write_csv(folder / "metrics.csv", columns, (row.values() for row in rows))

    header = ["sample", "relative_l2"]
    for name in quantities:
        header += [f"{name}_predicted", f"{name}_true"]
    # All quantities of a sample in one row; without any, rows of no columns.
    values = np.concatenate([np.empty((len(sample_names), 0)), *quantities.values()], axis=1)
    samples = [
        [name, sample_errors.get(name), *row]
        for name, row in zip(sample_names, values.tolist(), strict=True)
    ]
    known = set(sample_names)
    samples += [
        [name, error] + [None] * values.shape[1]
        for name, error in sample_errors.items()
        if name not in known
    ]
    _write_csv(folder / "samples.csv", header, samples)


def metrics_table(metrics: list[dict[str, Any]]) -> str:
    """The table of metrics as aligned text, without a newline at its end.

    Args:
        metrics: as in `report_pages.ReportContent`.
    """
    if not metrics:
        return ""
    columns = columns_of(metrics)
    lines = [[heading(key) for key in columns]]
    lines += [[shown(row.get(key)) for key in columns] for row in metrics]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            cell.rjust(width) if is_numeric(metrics, key) else cell.ljust(width)
            for cell, width, key in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    ]
    rule = "-" * len("  ".join("-" * width for width in widths))
    text.insert(1, rule)
    if len(metrics) > 1:
        text.insert(-1, rule)
    return "\n".join(text)


def check_quantities(quantities: dict[str, Pairs], names: list[str]) -> None:
    """Refuses quantities that do not fit the samples.

    Raises:
        ValueError: one has not a predicted and a true value for each sample.
    """
    for name, pairs in quantities.items():
        if np.shape(pairs) != (len(names), 2):
            raise ValueError(f"{name}: expected shape ({len(names)}, 2); got {np.shape(pairs)}")


def _write_csv(path: Path, header: list[str], rows: Iterable[Iterable[Any]]) -> None:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([plain(value) for value in row] for row in rows)
    write_text(path, file.getvalue())


def plain(value: Any) -> Any:
    """A value as JSON and CSV may hold it: neither a number that is none nor a type of NumPy."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return value


def shown(value: Any) -> str:
    """A value of a table: numbers to four significant digits, a dash where there is none."""
    value = plain(value)
    if value is None:
        return "—"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:#.4g}".rstrip(".") if isinstance(value, float) else str(value)


def heading(key: str) -> str:
    """Heading of a column, from its key."""
    special = {"r2": "R²", "relative_l1": "relative L1", "relative_l2": "relative L2"}
    return special.get(key, key.replace("_", " "))


def columns_of(metrics: list[dict[str, Any]]) -> list[str]:
    """Keys of all rows, in the order in which they come up."""
    return list(dict.fromkeys(key for row in metrics for key in row))


def is_numeric(rows: list[dict[str, Any]], key: str) -> bool:
    """Whether a column holds numbers, or nothing, in every row."""
    return not any(isinstance(row.get(key), str) for row in rows)
