import csv
import io
import json
import re
from dataclasses import replace
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from experiments.pictures import panels as picture_panels
from experiments.pictures import samples as sample_pictures
from experiments.pictures import surfaces as surface_pictures
from experiments.pictures.samples import render_points
from experiments.results.metrics_tables import metrics_table, write_metrics
from experiments.results.report_pages import ReportContent, write_report

VOID_TAGS = {"meta", "img", "br"}


def pixels(png):
    """Pixels of a picture, after a look at its size."""
    assert png.startswith(b"\x89PNG")
    image = imread(io.BytesIO(png))
    height, width = image.shape[:2]
    assert 500 < width < 2500
    assert width / 8 < height < width
    return image[:, :, :3]


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Fewer pixels take less time."""
    monkeypatch.setattr(picture_panels, "_DOTS", 50)


def panel(image, number):
    """The middle of one of three panels, without titles and colour bars."""
    height, width, _ = image.shape
    left = round(width * (number / 3 + 0.02))
    return image[round(0.25 * height) : round(0.7 * height), left : left + round(0.29 * width)]


def colours(image):
    return np.unique(image.reshape(-1, 3), axis=0)


def sphere(count=2000):
    points = np.random.default_rng(0).standard_normal((count, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def render(positions, truth=None, error=0.1, surface=True):
    truth = positions[:, 0] if truth is None else truth
    wrong = error * np.cos(5 * positions[:, -1])
    return render_points(positions, truth, truth + wrong, field="p", surface=surface, title="one")


@pytest.fixture
def no_vtk(monkeypatch):
    def refuse(points, colourings):
        raise RuntimeError("no VTK here")

    monkeypatch.setattr(surface_pictures, "_rendered", refuse)


CLOUDS = {
    "surface": (sphere(), True),
    "volume": (np.random.default_rng(0).random((6000, 3)) * [3, 2, 1], False),
    "plane": (np.random.default_rng(0).random((2000, 2)), False),
}


@pytest.mark.parametrize(("positions", "surface"), CLOUDS.values(), ids=CLOUDS)
def test_three_panels_are_painted(positions, surface):
    image = pixels(render(positions, surface=surface))
    for number in range(3):
        assert len(colours(panel(image, number))) > 100


def test_vtk_renders_a_closed_surface(capfd):
    pytest.importorskip("pyvista")
    points = sphere(20_000)
    images = surface_pictures._rendered(points, [np.ones((len(points), 4)) * 0.5] * 2)
    np.testing.assert_array_equal(*images)
    height, width, _ = images[0].shape
    rows, columns = np.mgrid[:height, :width]
    # A unit sphere fills the height of its picture but for a margin.
    inside = np.hypot(rows - height / 2, columns - width / 2) < 0.45 * height
    # What is not closed is white.
    assert (images[0][inside] < 200).all()
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("no_vtk")
def test_without_vtk_a_scatter_takes_its_place():
    image = pixels(render(sphere()))
    for number in range(3):
        assert len(colours(panel(image, number))) > 100


@pytest.mark.parametrize(("positions", "surface"), CLOUDS.values(), ids=CLOUDS)
def test_prediction_equal_to_truth_has_an_error_of_one_colour(positions, surface):
    image = pixels(render(positions, error=0, surface=surface))
    # Shaded or antialiased, all of them are the grey of the middle of the colours.
    grey = panel(image, 2)
    assert np.ptp(grey, axis=2).max() < 0.02


DEGENERATE = {
    "one point": np.full((1, 3), 5.0),
    "two points of a plane": np.eye(2),
    "one place": np.ones((30, 3)),
    "line": np.linspace(0, 1, 50)[:, None] * [1.0, 0.0, 0.0],
    "planar": np.random.default_rng(0).random((200, 3)) * [1, 1, 0],
}


@pytest.mark.parametrize("positions", DEGENERATE.values(), ids=DEGENERATE)
@pytest.mark.parametrize("surface", [True, False], ids=["surface", "volume"])
def test_degenerate_clouds_are_drawn(positions, surface):
    truth = np.full(len(positions), 3.0)
    image = pixels(render(positions, truth, surface=surface))
    assert len(colours(image)) > 10


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_a_diverged_prediction_and_a_truth_of_zero_are_drawn(value):
    positions = np.random.default_rng(0).random((100, 2))
    truth = np.zeros(100)
    prediction = np.where(positions[:, 0] > 0.5, value, 1.0)
    pixels(render_points(positions, truth, prediction, field="p", surface=False, title="one"))


def test_a_dollar_in_a_name_is_no_formula():
    positions = np.random.default_rng(0).random((100, 2))
    options = dict(field="a$\\frac$", surface=False, title="$ {x_")
    pixels(render_points(positions, positions[:, 0], positions[:, 1], **options))


def test_of_many_points_the_same_subset_is_drawn(monkeypatch):
    monkeypatch.setattr(sample_pictures, "_MOST_POINTS", 500)
    positions = CLOUDS["plane"][0]
    assert render(positions, surface=False) == render(positions, surface=False)
    subset = sample_pictures._subset(np.arange(2000))
    assert len(set(subset)) == 500


def test_a_slab_is_thin_and_across_the_shortest_extent():
    positions = np.random.default_rng(0).random((400_000, 3)) * [3, 1, 2]
    inside = positions[sample_pictures._in_slab(positions)]
    assert np.ptp(inside[:, 1]) < 0.03
    assert np.ptp(inside[:, 0]) > 2.9
    assert len(inside) >= 5000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(positions=np.zeros((0, 3))), "positions: expected shape"),
        (dict(positions=np.zeros((4, 1))), "positions: expected shape"),
        (dict(positions=np.full((4, 3), np.nan)), "positions: expected finite"),
        (dict(truth=np.zeros((4, 1))), "truth: expected shape"),
        (dict(truth=np.full(4, np.inf)), "truth: expected finite"),
        (dict(prediction=np.zeros(3)), "prediction: expected shape"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, message):
    arrays = dict(positions=np.zeros((4, 3)), truth=np.zeros(4), prediction=np.zeros(4)) | change
    with pytest.raises(ValueError, match=re.escape(message)):
        render_points(**arrays, field="p", surface=True, title="one")


@cache
def content():
    generator, samples = np.random.default_rng(0), 6
    names = [f"run <{i}>" for i in range(samples)]
    true = 0.3 + 0.05 * generator.standard_normal(samples)
    log = [
        {"step": step, "loss": 1 / step, "gradient_norm": 1.0, "learning_rate": 1e-3}
        for step in range(10, 101, 10)
    ]
    log += [{"step": 50, "validation_relative_l2": 0.04}, {"step": 100, "loss": float("nan")}]
    return ReportContent(
        title="Cars & <wings>",
        facts={"Model": "GeoTransolver <b>", "Parameters": "1,234"},
        metrics=[
            {"field": "<p>", "relative_l2": 0.0123456, "max_absolute_error": 4321.9, "r2": 0.98},
            {"field": "wss", "relative_l2": np.float32(0.25), "max_absolute_error": 3, "r2": None},
            {"field": "all", "relative_l2": 0.131, "max_absolute_error": np.nan, "r2": 0.97},
        ],
        quantities={"drag_coefficient": np.stack([true + 0.001, true], axis=1)},
        sample_names=names,
        log=log,
        sample_errors={name: 0.05 + 0.01 * i for i, name in enumerate(names)},
        pictures=[("run <0>: p & q", render(CLOUDS["plane"][0], surface=False))],
    )


class Page(HTMLParser):
    """Tags, sources and texts of a page whose tags are well nested."""

    def __init__(self, text):
        super().__init__()
        self.open, self.sources, self.texts, self.names = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())


HEADINGS = [
    "Run",
    "Metrics",
    "Training",
    "Errors of test samples",
    "Integrated quantities",
    "Samples",
]
EMPTY = dict(facts={}, metrics=[], quantities={}, log=[], sample_errors={}, pictures=[])


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, content())
    return path.read_text(encoding="utf-8")


def test_the_page_needs_nothing_else(page):
    sources = Page(page).sources
    # Loss, errors of samples, one quantity and one picture.
    assert len(sources) == 4
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    text = re.sub(r"base64,[^\"]+", "", page)
    assert not re.search(r"http|//|@import|url\(|<script|<link", text)


def test_what_comes_from_outside_is_escaped(page):
    parsed = Page(page)
    assert not {"p", "b", "wings"} & set(parsed.names)
    for text in ("Cars & <wings>", "GeoTransolver <b>", "<p>", "run <0>: p & q"):
        assert text in parsed.texts


def test_the_page_has_every_number_of_the_table(page):
    cells = re.findall(r'<td class="number">(.*?)</td>', page)
    expected = ["0.01235", "4322", "0.9800", "0.2500", "3", "—", "0.1310", "—", "0.9700"]
    assert [unescape(cell) for cell in cells] == expected
    assert '<tr class="total"><td>all</td>' in page


def test_the_page_tells_the_errors_of_quantities_and_samples(page):
    captions = " ".join(re.findall(r"<figcaption>(.*?)</figcaption>", page))
    assert "mean error 0.001000" in captions
    assert "largest 0.1000 (run &lt;5&gt;)" in captions
    assert "lowest validation error is 0.04000, at step 50" in captions


def test_empty_parts_are_left_out(tmp_path, page):
    assert re.findall("<h2>(.*?)</h2>", page) == HEADINGS
    for part, heading in (("facts", "Run"), ("metrics", "Metrics"), ("pictures", "Samples")):
        kept = EMPTY | {part: getattr(content(), part)}
        write_report(tmp_path / "report.html", replace(content(), **kept))
        text = (tmp_path / "report.html").read_text("utf-8")
        assert re.findall("<h2>(.*?)</h2>", text) == [heading]


def test_many_samples_have_a_histogram_and_the_worst_by_name(tmp_path):
    names = [f"sample {i}" for i in range(100)]
    errors = {name: 0.01 + 0.001 * i for i, name in enumerate(names)} | {"diverged": np.nan}
    write_report(tmp_path / "report.html", replace(content(), **EMPTY | {"sample_errors": errors}))
    text = (tmp_path / "report.html").read_text("utf-8")
    assert re.findall(r"<td>(sample \d+)</td>", text) == [f"sample {i}" for i in range(99, 94, -1)]
    assert "That of 1 more is not finite." in text


def test_a_quantity_that_does_not_vary_is_shown_without_r_squared(tmp_path):
    pairs = np.full((6, 2), 0.25)
    quantities = {"lift": pairs, "unknown": pairs * np.nan}
    write_report(tmp_path / "report.html", replace(content(), **EMPTY | {"quantities": quantities}))
    caption = re.findall(r"<figcaption>(.*?)</figcaption>", (tmp_path / "report.html").read_text())
    assert len(caption) == 1
    assert "R²" not in caption[0]


def test_a_quantity_needs_a_pair_for_each_sample(tmp_path):
    with pytest.raises(ValueError, match=re.escape("lift: expected shape (6, 2); got (5, 2)")):
        replace(content(), quantities={"lift": np.zeros((5, 2))})
    with pytest.raises(ValueError, match="lift: expected shape"):
        write_metrics(tmp_path, [], {"lift": np.zeros((5, 2))}, ["one"], {})
    assert list(tmp_path.iterdir()) == []


def read_csv(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def as_texts(row):
    return {key: "" if value is None else str(value) for key, value in row.items()}


def test_tables_read_back_to_the_same_numbers(tmp_path):
    what = content()
    errors = what.sample_errors | {what.sample_names[1]: np.nan, "without quantities": 0.5}
    write_metrics(tmp_path, what.metrics, what.quantities, what.sample_names, errors)

    expected = [dict(row) for row in what.metrics]
    expected[2]["max_absolute_error"] = None

    def refuse(constant):
        raise AssertionError(f"{constant} is not strict JSON")

    assert json.loads((tmp_path / "metrics.json").read_text(), parse_constant=refuse) == expected
    # Texts of numbers of Python are those that read back to the same ones.
    assert read_csv(tmp_path / "metrics.csv") == [as_texts(row) for row in expected]

    rows = read_csv(tmp_path / "samples.csv")
    assert [row["sample"] for row in rows] == [*what.sample_names, "without quantities"]
    assert [row["relative_l2"] for row in rows[:3]] == ["0.05", "", str(0.05 + 0.01 * 2)]
    both = [
        [float(row[f"drag_coefficient_{kind}"]) for kind in ("predicted", "true")]
        for row in rows[:-1]
    ]
    np.testing.assert_array_equal(both, what.quantities["drag_coefficient"])
    assert rows[-1] == {
        "sample": "without quantities",
        "relative_l2": "0.5",
        "drag_coefficient_predicted": "",
        "drag_coefficient_true": "",
    }


def test_tables_without_quantities_or_metrics(tmp_path):
    write_metrics(tmp_path, [], {}, [], {"one": 0.5})
    assert json.loads((tmp_path / "metrics.json").read_text()) == []
    assert read_csv(tmp_path / "samples.csv") == [{"sample": "one", "relative_l2": "0.5"}]
    assert metrics_table([]) == ""


def test_the_table_on_the_screen_is_aligned():
    lines = metrics_table(content().metrics).splitlines()
    assert lines[0].split("  ")[0] == "field"
    assert {len(line) for line in lines} == {len(lines[1])}
    assert lines[2].split() == ["<p>", "0.01235", "4322", "0.9800"]
    assert lines[3].split() == ["wss", "0.2500", "3", "—"]
    assert set(lines[1]) == set(lines[4]) == {"-"}
    assert lines[5].split() == ["all", "0.1310", "—", "0.9700"]


def test_nothing_is_half_written_when_a_write_fails(tmp_path, monkeypatch):
    what = replace(content(), **EMPTY | {"facts": {"Model": "FLARE"}})
    write_report(tmp_path / "report.html", what)
    write_metrics(tmp_path, content().metrics, {}, [], {"one": 0.5})
    names = ["metrics.csv", "metrics.json", "report.html", "samples.csv"]
    before = {name: (tmp_path / name).read_bytes() for name in names}

    def half(path, text, **options):
        path.write_bytes(text.encode()[: len(text) // 2])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="no space"):
        write_report(tmp_path / "report.html", replace(what, title="another"))
    with pytest.raises(OSError, match="no space"):
        write_metrics(tmp_path, [], {}, [], {})
    assert {name: (tmp_path / name).read_bytes() for name in names} == before
