"""What a run came to, as one web page that needs nothing else."""

import base64
import io
from dataclasses import dataclass
from html import escape
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.files import write_text
from experiments.results.evaluation import LEAST_SPREAD, r_squared
from experiments.results.metrics_tables import (
    Pairs,
    check_quantities,
    columns_of,
    heading,
    is_numeric,
    plain,
    shown,
)

# Up to so many samples each has its bar and name; of more, a histogram and the worst few.
_NAMED_SAMPLES = 40
_WORST_SAMPLES = 5

_TRAINING, _VALIDATION, _ACCENT = "#4c78a8", "#e45756", "#54606e"

_STYLE = """
:root { color-scheme: light dark; --text: #1d2126; --soft: #5b6470; --line: #d9dde2;
  --page: #ffffff; --band: #f4f6f8; }
@media (prefers-color-scheme: dark) { :root { --text: #e3e6ea; --soft: #9aa3ae; --line: #3a414a;
  --page: #16191d; --band: #1f242a; } }
@media print { :root { color-scheme: light; --text: #000; --soft: #444; --line: #bbb;
  --page: #fff; --band: #fff; } body { max-width: none !important; padding: 0 !important; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 76rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; break-after: avoid; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem; border-bottom: 1px solid var(--line); text-align: left;
  overflow-wrap: anywhere; }
th { font-weight: 600; color: var(--soft); }
td.number, th.number { text-align: right; white-space: nowrap; }
tr.total td { font-weight: 600; border-top: 2px solid var(--soft); background: var(--band); }
tr { break-inside: avoid; }
figure { margin: 0 0 1.2rem; break-inside: avoid; }
figure img { max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line);
  border-radius: 4px; }
figcaption { color: var(--soft); font-size: .9rem; overflow-wrap: anywhere; }
.charts { display: flex; flex-wrap: wrap; gap: 1.2rem; }
.charts figure { flex: 0 1 30rem; }
"""


@dataclass(frozen=True)
class ReportContent:
    """What a report tells; a part that is empty is left out.

    Attributes:
        title: of the page.
        facts: of the run, such as its model, parameters, mesh, steps and training time.
        metrics: rows of a table with the same keys, `field` first; the last is the total. A value
            may be `None`.
        quantities: predicted and true value of integrated quantities, such as the drag coefficient,
            of each test sample, in the quantity's unit.
        sample_names: of the test samples, in the order of the quantities' rows.
        log: rows of the run's `log.jsonl`.
        sample_errors: relative L2 error of each test sample, by name.
        pictures: caption and PNG file of each.

    Raises:
        ValueError: a quantity has not one predicted and one true value for each sample.
    """

    title: str
    facts: dict[str, str]
    metrics: list[dict[str, Any]]
    quantities: dict[str, Pairs]
    sample_names: list[str]
    log: list[dict]
    sample_errors: dict[str, float]
    pictures: list[tuple[str, bytes]]

    def __post_init__(self) -> None:
        check_quantities(self.quantities, self.sample_names)


def write_report(path: Path, content: ReportContent) -> None:
    """Writes the page, whole or not at all: one HTML file with its style and pictures in it."""
    sections = [
        ("Run", _facts(content.facts)),
        ("Metrics", _table(content.metrics, total=True)),
        ("Training", _loss_curve(content.log)),
        ("Errors of test samples", _sample_errors(content.sample_errors)),
        ("Integrated quantities", _quantities(content.quantities, content.sample_names)),
        ("Samples", "".join(_picture(*picture) for picture in content.pictures)),
    ]
    body = "".join(
        f"<section><h2>{name}</h2>\n{html}</section>\n" for name, html in sections if html
    )
    title = escape(content.title)
    page = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{title}</h1>\n{body}</body>\n</html>\n"
    )
    write_text(path, page)


def _facts(facts: dict[str, str]) -> str:
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>\n"
        for name, value in facts.items()
    )
    return f"<table>\n{rows}</table>\n" if rows else ""


def _table(rows: list[dict[str, Any]], *, total: bool) -> str:
    if not rows:
        return ""
    columns = {key: ' class="number"' if is_numeric(rows, key) else "" for key in columns_of(rows)}
    head = "".join(f"<th{kind}>{escape(heading(key))}</th>" for key, kind in columns.items())
    lines = [
        "".join(f"<td{kind}>{escape(shown(row.get(key)))}</td>" for key, kind in columns.items())
        for row in rows
    ]
    kinds = [""] * len(rows)
    if total:
        kinds[-1] = ' class="total"'
    body = "\n".join(f"<tr{kind}>{line}</tr>" for kind, line in zip(kinds, lines, strict=True))
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>\n"
    )


def _picture(caption: str, png: bytes) -> str:
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    caption = escape(caption)
    return (
        f'<figure><img alt="{caption}" src="{source}"><figcaption>{caption}</figcaption></figure>\n'
    )


def _chart(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.grid(color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()


def _curve(log: list[dict], key: str) -> Float[np.ndarray, "rows 2"]:
    """Steps and values, of those that a logarithmic axis can show."""
    rows = [(row["step"], row[key]) for row in log if isinstance(row.get(key), Real)]
    curve = np.array(rows, np.float64).reshape(-1, 2)
    return curve[np.isfinite(curve[:, 1]) & (curve[:, 1] > 0)]


def _loss_curve(log: list[dict]) -> str:
    loss, validation = _curve(log, "loss"), _curve(log, "validation_relative_l2")
    if not len(loss) and not len(validation):
        return ""
    figure, axes = _chart(9, 3.8)
    mark = "." if len(loss) < 50 else ""
    if len(loss):
        axes.plot(*loss.T, mark + "-", color=_TRAINING, linewidth=1, label="training loss")
    if len(validation):
        axes.plot(*validation.T, "o-", color=_VALIDATION, markersize=3.5, label="validation error")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("relative L2")
    axes.legend(frameon=False)
    caption = "Training loss and relative L2 error on the validation split, by step."
    if len(validation):
        step, error = validation[validation[:, 1].argmin()]
        caption += f" The lowest validation error is {shown(error)}, at step {int(step):,}."
    return _picture(caption, _png(figure))


def _sample_errors(errors: dict[str, float]) -> str:
    finite = {name: float(error) for name, error in errors.items() if plain(error) is not None}
    if not finite:
        return ""
    ranked = sorted(finite.items(), key=lambda pair: -pair[1])
    values = np.array([value for _, value in ranked])
    if len(ranked) <= _NAMED_SAMPLES:
        figure, axes = _chart(9, 1 + 0.22 * len(ranked))
        axes.barh(range(len(ranked)), values, color=_TRAINING)
        labels = [name if len(name) <= 40 else f"…{name[-39:]}" for name, _ in ranked]
        # Names come from files: a dollar in one would be read as a formula.
        axes.set_yticks(range(len(ranked)), labels, fontsize=8, parse_math=False)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        worst = ""
    else:
        figure, axes = _chart(9, 3.4)
        axes.hist(values, bins=min(60, 10 + len(values) // 10), color=_TRAINING)
        axes.set_ylabel("samples")
        rows = [{"worst samples": name, "relative_l2": value} for name, value in ranked]
        worst = _table(rows[:_WORST_SAMPLES], total=False)
    median = float(np.median(values))
    axes.axvline(median, color=_VALIDATION, linewidth=1.2, label=f"median {shown(median)}")
    axes.set_xlabel("relative L2")
    axes.legend(frameon=False)
    caption = (
        f"Relative L2 error of each of {len(values):,} test samples: median {shown(median)}, "
        f"largest {shown(ranked[0][1])} ({ranked[0][0]})."
    )
    if len(finite) < len(errors):
        caption += f" That of {len(errors) - len(finite):,} more is not finite."
    return _picture(caption, _png(figure)) + worst


def _quantity(name: str, pairs: Pairs, sample_names: list[str]) -> str:
    finite = np.isfinite(pairs).all(1)
    if not finite.any():
        return ""
    predicted, true = pairs[finite].T
    errors = np.abs(predicted - true)
    figure, axes = _chart(5, 4.6)
    ends = min(predicted.min(), true.min()), max(predicted.max(), true.max())
    axes.plot(ends, ends, color=_ACCENT, linewidth=1, label="exact")
    axes.scatter(true, predicted, s=22, color=_TRAINING, alpha=0.75, linewidths=0)
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xlabel(f"{name}, true", parse_math=False)
    axes.set_ylabel(f"{name}, predicted", parse_math=False)
    facts = [f"mean error {shown(errors.mean())}", f"largest error {shown(errors.max())}"]
    if true.std() > LEAST_SPREAD:
        facts.insert(0, f"R² = {shown(r_squared(pairs[finite]))}")
    axes.text(0.03, 0.97, "\n".join(facts), transform=axes.transAxes, va="top", fontsize=10)
    worst = np.array(sample_names)[finite][errors.argmax()]
    caption = f"{name}: {', '.join(facts)} ({worst}), of {len(errors):,} test samples."
    return _picture(caption, _png(figure))


def _quantities(quantities: dict[str, Pairs], sample_names: list[str]) -> str:
    figures = "".join(
        _quantity(name, np.asarray(pairs, np.float64), sample_names)
        for name, pairs in quantities.items()
    )
    return f'<div class="charts">\n{figures}</div>\n' if figures else ""
