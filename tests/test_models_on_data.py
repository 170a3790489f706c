"""Every model trains on every data set by the same command, on a mesh, and is evaluated there."""

import json

import jax
import numpy as np
import pytest
from commands import TINY, call, printed_metrics
from conftest import on_mesh

from experiments import evaluate, train
from experiments.building import build_model
from experiments.configuration.schema import (
    AirfoilConfig,
    FlareConfig,
    GeoTransolverConfig,
    TransolverConfig,
)
from experiments.data.batches import Loader, whole_batches
from experiments.data.placement import Placement
from experiments.datasets import load_dataset
from experiments.prediction import model_inputs
from experiments.results.evaluation import SplitResult, metrics_of, r_squared
from experiments.results.field_errors import FieldErrors

AIRFOILS = dict(
    points=40, max_points=60, surface_points=32, train=6, validation=2, test=5, angles=2
)
SMALL = dict(n_layers=1, n_hidden=16, n_head=2, slice_num=4)
GEO_TINY = ["model.n_layers=1", "model.n_hidden=16", "model.n_head=2", "model.slice_num=4"]
RUN = [*GEO_TINY, "train.steps=2", "train.checkpoint_every=2", "train.batch_size=4"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def airfoils(cache):
    return load_dataset(AirfoilConfig(**AIRFOILS, cache_dir=str(cache)))


def of_airfoils(cache) -> list[str]:
    return [
        "data=airfoil",
        f"data.cache_dir={cache}",
        *(f"data.{k}={v}" for k, v in AIRFOILS.items()),
    ]


def of_darcy(cache) -> list[str]:
    return [f"data.cache_dir={cache}", *(item for item in TINY if item.startswith("data."))]


DATA = {"airfoil": of_airfoils, "darcy": of_darcy}
MODELS = {
    "transolver": [],
    "transolver_grid": ["model.structured=true", "model.plus=true"],
    "geotransolver": ["model.concrete_dropout=true", "model.dropout=0.1"],
    "geotransolver_local": ["model.include_local_features=true", "model.n_hidden_local=4"],
    "geotransolver_fa": ["model.state_mixing_mode=concat_project"],
    "flare": [],
}
PAIRS = [
    ("transolver", "airfoil"),
    ("transolver_grid", "darcy"),
    ("geotransolver", "airfoil"),
    ("geotransolver", "darcy"),
    ("geotransolver_local", "airfoil"),
    ("geotransolver_fa", "darcy"),
    ("flare", "airfoil"),
]


@pytest.mark.parametrize(("model", "data"), PAIRS, ids=lambda value: value)
def test_model_trains_and_is_evaluated(model, data, cache, tmp_path):
    name = model.removesuffix("_local").removesuffix("_grid")
    overrides = [f"model={name}", *MODELS[model], *DATA[data](cache), *RUN]
    result = call(train.main, *overrides, f"hydra.run.dir={tmp_path}", "mesh.points=2")
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 0 < summary["test_relative_l2"] < 5
    assert (tmp_path / "predictions.png").stat().st_size > 10_000
    assert ("test_r2_lift_coefficient" in summary) == (data == "airfoil")
    assert ("dropout_rates" in summary) == ("model.concrete_dropout=true" in overrides)

    result = call(evaluate.main, str(tmp_path), "mesh.points=8")
    assert result.code == 0, result.err
    printed = printed_metrics(result.out)
    assert float(printed["test_relative_l2"]) == pytest.approx(
        summary["test_relative_l2"], rel=1e-4
    )


# Batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [None, dict(data=2, points=4)], ids=["single", "data2_points4"])
def test_batches_of_airfoils_have_one_shape_and_hold_their_samples(axes, airfoils):
    split = airfoils.splits["train"]
    lengths = [split.num_points(i) for i in range(len(split))]
    assert len(set(lengths)) > 1
    with on_mesh(axes):
        shapes, seen = set(), []
        for batch, indices in whole_batches(split, 4, None):
            shapes.add(jax.tree.map(np.shape, batch))
            (stream,) = batch.streams
            for row, index in enumerate(indices):
                mask = np.asarray(stream.mask)[row]
                rows = split.arrays.rows(index)
                assert (mask.sum(),) == lengths[index]
                np.testing.assert_array_equal(
                    np.asarray(stream.target)[row][mask], split.arrays.fields[rows]
                )
                np.testing.assert_array_equal(
                    np.asarray(stream.embedding)[row][mask], split.arrays.positions[rows]
                )
                np.testing.assert_array_equal(
                    np.asarray(batch.geometry)[row][np.asarray(batch.geometry_mask)[row]],
                    split.arrays.geometry[index],
                )
            seen += list(indices)
        assert len(shapes) == 1
        assert seen == list(range(len(split)))
        (batch,) = next(Loader(split, 4, 1, 0, 0, None))
        assert jax.tree.map(np.shape, batch) in shapes


def test_statistics_of_airfoils_are_those_of_all_points(airfoils):
    arrays, statistics = airfoils.splits["train"].arrays, airfoils.statistics()
    (stream,) = statistics.streams
    assert stream.fx is None
    for scale, values in (
        (stream.embedding, arrays.positions),
        (stream.target, arrays.fields),
        (statistics.geometry, arrays.geometry.reshape(-1, 6)),
        (statistics.global_embedding, arrays.global_embedding.reshape(-1, 2)),
    ):
        mean = values.mean(0, dtype=np.float64)
        np.testing.assert_allclose(scale.mean, mean, rtol=1e-5, atol=1e-6)
    # What never changes, the third dimension, is not scaled.
    assert stream.embedding.deviation[2] == statistics.geometry.deviation[5] == 1


def first_batch(airfoils):
    split = airfoils.splits["train"]
    placement = Placement.of(split, 2, None)
    return placement.place({row: placement.read(split, row, row) for row in placement.rows})


def test_models_are_given_what_they_read(airfoils):
    batch, statistics = first_batch(airfoils), airfoils.statistics()

    def inputs(config):
        return model_inputs(build_model(config, airfoils.description, 0), statistics, batch)

    for config in (FlareConfig(**SMALL), TransolverConfig(**SMALL)):
        of_points = inputs(config)
        # The direction of the stream, at every point.
        assert of_points["fx"].shape == (2, 60, 2)
        np.testing.assert_array_equal(of_points["fx"][:, 0], of_points["fx"][:, -1])
    geo = inputs(GeoTransolverConfig(**SMALL))
    assert geo.keys() == {"local_embedding", "geometry", "geometry_mask", "global_embedding"}
    assert np.abs(geo["geometry"][..., 0].std() - 1) < 0.3
    # Neighbours are looked for in chords.
    local = inputs(GeoTransolverConfig(**SMALL, include_local_features=True))
    np.testing.assert_array_equal(local["geometry"], batch.geometry[..., :3])
    np.testing.assert_array_equal(local["local_positions"], batch.streams[0].embedding)


def test_true_fields_have_the_true_lift(airfoils):
    split = airfoils.splits["test"]
    for index in range(len(split)):
        fields = split.arrays.fields[split.arrays.rows(index)]
        predicted, true = split.quantities(index, (fields,))["lift_coefficient"]
        assert predicted == pytest.approx(true, abs=1e-5)
        assert split.quantities(index, (0 * fields,))["lift_coefficient"][0] == 0


def test_metrics_name_fields_and_quantities(airfoils):
    l2 = np.array([[1.0, 2, 3], [4, 5, 6]])
    ones = np.ones_like(l2)
    errors = FieldErrors(ones, l2 / 2, l2**2, ones, ones, ones, ones, ones)
    pairs = {"lift_coefficient": np.array([[1.0, 1.1], [2, 1.9]])}
    metrics = metrics_of(SplitResult(errors, pairs, {}), airfoils)
    assert metrics["test_relative_l2"] == 3.5
    assert metrics["test_relative_l2_max"] == 5
    assert metrics["test_relative_l2_pressure_coefficient"] == 4.5
    assert metrics["test_relative_l1_velocity_x"] == 1.25
    assert metrics["test_r2_lift_coefficient"] == pytest.approx(1 - 0.02 / 0.32)
    alike = {"lift_coefficient": np.array([[1.0, 2], [3, 2]])}
    metrics = metrics_of(SplitResult(errors, alike, {}), airfoils)
    assert "test_r2_lift_coefficient" not in metrics


def test_r_squared():
    true = np.array([1.0, 2, 3, 4])
    assert r_squared(np.stack([true, true], 1)) == 1
    assert r_squared(np.stack([np.full(4, true.mean()), true], 1)) == 0


def test_grid_of_a_cloud_is_refused(airfoils):
    with pytest.raises(ValueError, match=r"model\.structured: expected False for data without"):
        build_model(TransolverConfig(**SMALL, structured=True), airfoils.description, 0)
