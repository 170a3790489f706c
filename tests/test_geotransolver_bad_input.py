"""Bad arguments of a GeoTransolver are named in one line: what was expected, what came."""

import jax
import numpy as np
import pytest
from flax import nnx
from test_bad_input import assert_named

from geotransolver_jax import GeoTransolver, Neighborhoods
from parallel.neighbors import Neighbors

pytestmark = pytest.mark.usefixtures("unchecked_calls")

SIZES = dict(functional_dim=2, out_dim=2, n_layers=1, n_hidden=16, n_head=4, slice_num=4)
LOCAL = dict(geometry_dim=3, include_local_features=True, radii=[0.5], neighbors_in_radius=[3])
X = np.ones((2, 16, 2), np.float32)
GEOMETRY = np.ones((2, 9, 3), np.float32)
TOKENS = np.ones((2, 1, 5), np.float32)
POSITIONS = np.ones((2, 16, 3), np.float32)
NAN = POSITIONS.copy()
NAN[1, 7, 2] = np.nan


def make(**options) -> GeoTransolver:
    return GeoTransolver(**SIZES | options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (dict(functional_dim=0), ["functional_dim: expected a positive integer", "got 0"]),
        (dict(functional_dim=[2, 0]), ["functional_dim: expected a positive", "got [2, 0]"]),
        (dict(functional_dim="2"), ["functional_dim: expected a positive integer", "got '2'"]),
        (dict(functional_dim=[]), ["functional_dim: expected a positive integer", "got []"]),
        (dict(out_dim=[2, 1]), ["out_dim: expected 1 widths, as in functional_dim; got 2"]),
        (dict(geometry_dim="3"), ["geometry_dim: expected an integer of at least 1; got '3'"]),
        (dict(slice_num=2.5), ["slice_num: expected an integer of at least 1; got 2.5"]),
        (dict(mlp_ratio=1.5), ["mlp_ratio: expected an integer of at least 1; got 1.5"]),
        (LOCAL | dict(n_hidden_local=3.5), ["n_hidden_local: expected an integer", "got 3.5"]),
        (LOCAL | dict(radii=0.3), ["radii: expected a list of numbers; got 0.3"]),
        (LOCAL | dict(radii=["a"]), ["radii: expected a list of numbers; got ['a']"]),
        (LOCAL | dict(neighbors_in_radius=[8.5]), ["expected positive integers; got [8.5]"]),
        (dict(geometry_dim=0), ["geometry_dim: expected at least 1; got 0"]),
        (dict(global_dim=0), ["global_dim: expected at least 1; got 0"]),
        (dict(n_head=3), ["n_head: expected a divisor of n_hidden=16; got 3"]),
        (dict(n_layers=0), ["n_layers: expected at least 1; got 0"]),
        (dict(slice_num=0), ["slice_num: expected at least 1; got 0"]),
        (dict(dropout=1.0), ["dropout: expected a rate in [0, 1); got 1.0"]),
        (dict(act="gelo"), ["act: expected one of", "got 'gelo'"]),
        (dict(dtype="int8"), ["dtype: expected a floating type; got 'int8'"]),
        (dict(attention_type="FLARE"), ["attention_type: expected one of GALE, GALE_FA"]),
        (
            dict(geometry_dim=3, state_mixing_mode="sum"),
            ["state_mixing_mode: expected one of weighted, concat_project; got 'sum'"],
        ),
        (dict(structured_shape=[16]), ["structured_shape: expected 2 or 3", "got [16]"]),
        (dict(structured_shape=[4, 0]), ["structured_shape: expected 2 or 3", "got [4, 0]"]),
        (
            LOCAL | dict(structured_shape=[4, 4]),
            ["include_local_features: expected False with a structured_shape", "got True"],
        ),
        (LOCAL | dict(geometry_dim=None), ["geometry_dim: expected 3", "got None"]),
        (LOCAL | dict(geometry_dim=6), ["geometry_dim: expected 3", "got 6"]),
        (LOCAL | dict(radii=[]), ["neighbors_in_radius: expected one count for each of the 0"]),
        (LOCAL | dict(radii=[0.1, 0.2]), ["expected one count for each of the 2 radii", "got 1"]),
        (LOCAL | dict(radii=[-0.1]), ["radii: expected positive numbers; got [-0.1]"]),
        (LOCAL | dict(radii=[np.nan]), ["radii: expected positive numbers; got [nan]"]),
        (
            LOCAL | dict(neighbors_in_radius=[0]),
            ["neighbors_in_radius: expected positive integers; got [0]"],
        ),
        (LOCAL | dict(n_hidden_local=1), ["n_hidden_local: expected at least 2; got 1"]),
    ],
    ids=str,
)
def test_bad_option_is_named(options, parts):
    with pytest.raises(ValueError, match="expected") as error:
        make(**options)
    assert_named(error, *parts)


@pytest.fixture(scope="module")
def model() -> GeoTransolver:
    return make(geometry_dim=3, global_dim=5)


@pytest.fixture(scope="module")
def plain() -> GeoTransolver:
    return make()


@pytest.fixture(scope="module")
def local() -> GeoTransolver:
    return make(**LOCAL)


@pytest.fixture(scope="module")
def streams() -> GeoTransolver:
    return make(functional_dim=(2, 3), out_dim=(1, 1))


@pytest.fixture(scope="module")
def grid() -> GeoTransolver:
    return make(geometry_dim=3, structured_shape=[4, 4])


CALLS = [
    ("model", dict(local_embedding=POSITIONS), ["local_embedding: expected shape (B, N, 2)"]),
    ("model", dict(local_embedding=X.tolist()), ["local_embedding[0]: expected an array", "list"]),
    ("model", dict(local_embedding="x"), ["local_embedding: expected an array, or", "got str"]),
    ("model", dict(geometry=None), ["geometry: expected an array", "got None"]),
    ("model", dict(global_embedding=None), ["global_embedding: expected an array", "got None"]),
    ("model", dict(geometry=X), ["geometry: expected shape (B, N, 3); got (2, 16, 2)"]),
    ("model", dict(geometry=GEOMETRY[:, :0]), ["geometry: expected shape", "got (2, 0, 3)"]),
    ("model", dict(geometry=GEOMETRY[:1]), ["geometry: expected 2 samples", "got shape (1, 9"]),
    ("model", dict(global_embedding=TOKENS[:, 0]), ["global_embedding: expected", "got (2, 5)"]),
    ("model", dict(global_embedding=TOKENS[:1]), ["global_embedding: expected 2 samples"]),
    (
        "model",
        dict(geometry_mask=np.zeros((2, 9), bool)),
        ["geometry_mask: expected at least one real point in every sample; got none in sample 0"],
    ),
    ("model", dict(geometry_mask=np.ones((2, 8), bool)), ["geometry_mask: expected bool (2, 9)"]),
    ("model", dict(point_mask=np.ones((2, 8), bool)), ["point_mask: expected bool (2, 16)"]),
    ("plain", dict(geometry=GEOMETRY), ["geometry: expected None, since geometry_dim=None"]),
    ("plain", dict(global_embedding=TOKENS), ["global_embedding: expected None, since global_dim"]),
    ("plain", dict(geometry_mask=np.ones((2, 9), bool)), ["geometry_mask: expected None without"]),
    ("streams", dict(local_embedding=X), ["local_embedding: expected 2 streams", "got 1"]),
    ("streams", dict(local_embedding=(X, X)), ["local_embedding[1]: expected shape (B, N, 3)"]),
    (
        "streams",
        dict(local_embedding=(X, POSITIONS[:1])),
        ["local_embedding[1]: expected 2 samples, as in stream 0; got shape (1, 16, 3)"],
    ),
    (
        "streams",
        dict(local_embedding=(X, POSITIONS), point_mask=np.ones((2, 16), bool)),
        ["point_mask: expected 2 streams", "got 1"],
    ),
    ("local", dict(local_positions=None), ["local_positions: expected coordinates", "got None"]),
    ("local", dict(local_positions=X), ["local_positions: expected shape (2, 16, 3)", "16, 2)"]),
    ("local", dict(local_positions=NAN), ["local_positions: expected finite", "point 7 of sample"]),
    ("local", dict(geometry=None), ["geometry: expected its points", "got None"]),
    ("local", dict(geometry=NAN), ["geometry: expected finite coordinates; got", "nan"]),
    ("grid", dict(local_embedding=X[:, :15]), ["local_embedding: expected shape (B, N, 2)", "15"]),
    ("grid", dict(geometry=GEOMETRY), ["geometry: expected shape (B, N, 3) with N = 16", "9, 3)"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "parts"), CALLS, ids=lambda value: "")
def test_bad_call_is_named(kind, changes, parts, request):
    model = request.getfixturevalue(kind)
    arguments = {"local_embedding": X}
    if model.geometry_dim is not None:
        arguments["geometry"] = POSITIONS if kind == "grid" else GEOMETRY
    if model.global_dim is not None:
        arguments["global_embedding"] = TOKENS
    if model.include_local_features:
        arguments["local_positions"] = POSITIONS
    with pytest.raises(ValueError, match="expected") as error:
        model(**arguments | changes)
    assert_named(error, *parts)


def test_time_is_refused_as_in_the_reference(plain):
    with pytest.raises(NotImplementedError, match="time: expected None"):
        plain(X, time=np.ones(2, np.float32))


def test_padding_may_hold_coordinates_that_are_not_finite(local):
    mask = np.isfinite(NAN).all(-1)
    output = local(X, NAN, geometry=GEOMETRY, point_mask=mask)
    assert np.isfinite(output).all()
    np.testing.assert_array_equal(output[1, 7], 0)


def test_bad_neighbourhoods_are_named(local, plain):
    def neighbors(points, count=3, batch=2):
        shape = (batch, points, count)
        return Neighbors(np.full(shape, -1, np.int32), np.full(shape, np.inf, np.float32))

    good = Neighborhoods(neighbors(16), neighbors(9))
    arguments = dict(local_embedding=X, local_positions=POSITIONS, geometry=GEOMETRY)
    assert np.isfinite(local(**arguments, neighborhoods=good)).all()
    for bad, message in (
        (
            good._replace(of_points=neighbors(15)),
            r"of_points\.indices: expected shape \(2, 16, K\)",
        ),
        (good._replace(of_geometry=neighbors(9, 2)), r"of_geometry\.indices: .* K of at least 3"),
        ((good, good), "expected 1 streams, as in functional_dim; got 2"),
    ):
        with pytest.raises(ValueError, match=rf"neighborhoods.*{message}") as error:
            local(**arguments, neighborhoods=bad)
        assert_named(error)
    with pytest.raises(ValueError, match="neighborhoods: expected None") as error:
        plain(X, neighborhoods=good)
    assert_named(error)


def test_lists_are_taken_for_tuples():
    model = make(functional_dim=[2, 3], out_dim=[1, 1])
    first, second = model([X, POSITIONS])
    assert first.shape == second.shape == (2, 16, 1)
    assert make(structured_shape=[4, 4])(X.reshape(2, 4, 4, 2)).shape == (2, 4, 4, 2)


def test_shapes_are_checked_inside_compiled_programs(local):
    with pytest.raises(ValueError, match="local_positions: expected shape"):
        jax.eval_shape(lambda x: local(x, x, geometry=GEOMETRY), X)
    # Constants of a program are not looked at, and not refused.
    shape = jax.eval_shape(lambda x: local(x, POSITIONS, geometry=GEOMETRY), X)
    assert shape.shape == (2, 16, 2)


def test_time_network_is_made_for_the_weights_alone():
    assert make(time_input=True)(X).shape == (2, 16, 2)
