"""A cloud in parts is predicted as the whole cloud, and further points from its state alone."""

from functools import cache

import jax
import numpy as np
import pytest
from conftest import on_mesh, placed, relative_difference
from flax import nnx

import parallel
from experiments.data.batch import Batch, Cloud, Sample, Scale, Statistics, Stream, StreamStatistics
from experiments.prediction import predict
from experiments.results.whole_cloud import CloudState, WholeCloud, dropout_moments
from flare_jax import FLARE
from geotransolver_jax import GeoTransolver, Transolver

SMALL = dict(n_layers=3, n_hidden=16, n_head=2, slice_num=4, mlp_ratio=1)
POINTS, PART = 1000, 160
FX, EMBEDDING, FIELDS, GEOMETRY, GLOBALS = 2, 3, 2, 3, 2
CONTEXT = dict(geometry_dim=GEOMETRY, global_dim=GLOBALS)
LOCAL = dict(
    include_local_features=True, radii=[0.2, 0.5], neighbors_in_radius=[4, 8], n_hidden_local=4
)
KINDS = {
    "flare": (FLARE, {}),
    "transolver": (Transolver, {}),
    "transolver_plus": (Transolver, dict(plus=True)),
    "gale": (GeoTransolver, CONTEXT),
    "gale_fa": (GeoTransolver, CONTEXT | dict(attention_type="GALE_FA")),
    "gale_alone": (GeoTransolver, {}),
    "concat": (GeoTransolver, CONTEXT | dict(state_mixing_mode="concat_project")),
    "local": (GeoTransolver, CONTEXT | LOCAL),
    "streams": (GeoTransolver, CONTEXT | LOCAL | dict(attention_type="GALE_FA")),
    "dropout": (GeoTransolver, CONTEXT | dict(concrete_dropout=True, dropout=0.3)),
}


def streams_of(kind: str) -> int:
    return 2 if kind == "streams" else 1


@cache
def model_of(kind: str) -> nnx.Module:
    make, options = KINDS[kind]
    if make is GeoTransolver:
        count = streams_of(kind)
        widths = dict(functional_dim=[FX + EMBEDDING] * count, out_dim=[FIELDS] * count)
    else:
        tokens = GLOBALS
        widths = dict(functional_dim=FX + tokens, embedding_dim=EMBEDDING, out_dim=FIELDS)
    model = make(**widths, **SMALL, **options, rngs=nnx.Rngs(0))
    model.eval()
    return model


def scale(width: int, seed: int) -> Scale:
    draw = np.random.default_rng(seed)
    return Scale(
        draw.normal(size=width).astype(np.float32), draw.uniform(0.5, 2, width).astype(np.float32)
    )


def statistics_of(kind: str) -> Statistics:
    streams = [
        StreamStatistics(scale(EMBEDDING, 1 + i), scale(FIELDS, 3 + i), scale(FX, 5 + i))
        for i in range(streams_of(kind))
    ]
    return Statistics(tuple(streams), scale(GEOMETRY, 7), scale(GLOBALS, 8))


def cloud_of(points: int, seed: int) -> Cloud:
    draw = np.random.default_rng(seed)
    return Cloud(
        points,
        draw.uniform(-1, 1, (points, EMBEDDING)).astype(np.float32),
        None,
        draw.normal(size=(points, FX)).astype(np.float32),
    )


def sample_of(kind: str, points: int = POINTS) -> Sample:
    draw = np.random.default_rng(9)
    clouds = tuple(cloud_of(points + 7 * i, 10 + i) for i in range(streams_of(kind)))
    geometry = draw.uniform(-1, 1, (50, GEOMETRY)).astype(np.float32)
    if KINDS[kind][1].get("geometry_dim") is None:
        geometry = None
    needs_tokens = geometry is not None or KINDS[kind][0] is not GeoTransolver
    tokens = draw.normal(size=(1, GLOBALS)).astype(np.float32) if needs_tokens else None
    return Sample(clouds, geometry, 0 if geometry is None else 50, tokens)


@cache
def at_once(kind: str) -> list[np.ndarray]:
    """The prediction on all points together, on one device."""
    sample = sample_of(kind)
    streams = tuple(Stream(c.embedding[None], None, c.fx[None]) for c in sample.clouds)
    rest = (None if x is None else x[None] for x in (sample.geometry, sample.global_embedding))
    geometry, tokens = rest
    statistics = statistics_of(kind)
    if sample.geometry is None:
        statistics = statistics._replace(geometry=None)
    fields = jax.jit(lambda: predict(model_of(kind), statistics, Batch(
        streams, geometry, None, tokens
    )))()  # fmt: skip
    return [np.asarray(of)[0] for of in fields]


def whole_of(kind: str, part: int = PART) -> WholeCloud:
    return WholeCloud(placed(model_of(kind)), statistics_of(kind), part)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_give_what_the_whole_cloud_gives(kind):
    fields, _ = whole_of(kind).predict(sample_of(kind))
    for actual, expected in zip(fields, at_once(kind), strict=True):
        assert actual.shape == expected.shape
        assert relative_difference(actual, expected) < 1e-6


@pytest.mark.parametrize("kind", ["flare", "gale", "gale_fa", "streams"])
def test_parts_may_be_split_over_devices(kind):
    with on_mesh(dict(points=4)):
        fields, _ = whole_of(kind, 150).predict(sample_of(kind))
    for actual, expected in zip(fields, at_once(kind), strict=True):
        assert relative_difference(actual, expected) < 1e-6


@pytest.mark.parametrize("part", [1, 999, 1000, 5000])
def test_any_length_of_a_part_gives_the_same(part):
    sample = sample_of("flare", 40 if part == 1 else POINTS)
    fields, _ = whole_of("flare", part).predict(sample)
    expected, _ = whole_of("flare", PART).predict(sample)
    assert relative_difference(fields[0], expected[0]) < 1e-6


@pytest.mark.parametrize("kind", ["flare", "transolver", "gale", "gale_fa", "streams"])
def test_further_points_need_the_state_alone(kind, tmp_path):
    whole, sample = whole_of(kind), sample_of(kind)
    _, state = whole.predict(sample)
    state.save(tmp_path / "state.npz")
    state = CloudState.load(tmp_path / "state.npz")
    for stream, expected in enumerate(at_once(kind)):
        cloud = sample.clouds[stream]
        some = np.array([3, 500, 999])
        few = Cloud(3, cloud.embedding[some], None, cloud.fx[some])
        fields = whole.predict_from(state, stream, few)
        assert relative_difference(fields, expected[some]) < 1e-6


def test_a_state_that_is_something_else_is_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected the state of a cloud; there is no such"):
        CloudState.load(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("text")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    for name in ("text", "other"):
        with pytest.raises(ValueError, match=r"expected the state of a cloud; got [^\n]*$"):
            CloudState.load(tmp_path / f"{name}.npz")


def test_a_model_of_a_grid_is_refused():
    model = FLARE(
        functional_dim=1, embedding_dim=2, out_dim=1, structured_shape=(4, 4), **SMALL,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    with pytest.raises(ValueError, match="expected one of clouds; got one of a grid"):
        WholeCloud(model, statistics_of("flare"))


def test_draws_of_dropout_spread_around_the_prediction():
    whole, sample = whole_of("dropout"), sample_of("dropout", 300)
    ((mean, deviation),) = dropout_moments(whole, sample, 8, seed=0)
    ((again, _),) = dropout_moments(whole, sample, 8, seed=0)
    np.testing.assert_array_equal(mean, again)
    (fields,), _ = whole.predict(sample)
    assert deviation.min() > 0
    assert np.abs(mean - fields).mean() < 2 * deviation.mean()


def test_a_model_without_dropout_has_no_spread():
    whole, sample = whole_of("gale"), sample_of("gale", 300)
    ((_, deviation),) = dropout_moments(whole, sample, 2, seed=0)
    assert deviation.max() == 0


def test_parts_are_as_long_as_the_devices_allow():
    with on_mesh(dict(points=4)):
        assert whole_of("flare", 10)._at_once == 12
    assert parallel.points.padded_size(10) == 10
