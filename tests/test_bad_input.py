"""Bad arguments of a model are named in one line: what was expected, what came."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, on_mesh, placed, small_flare
from flax import nnx

from flare_jax import FLARE
from geotransolver_jax import GeoTransolver

pytestmark = pytest.mark.usefixtures("unchecked_calls")

FX = np.ones((2, 16, 2), np.float32)
EMBEDDING = np.ones((2, 16, 3), np.float32)
TIME = np.ones(2, np.float32)
ONE_EMPTY = np.array([[True] * 16, [False] * 16])


def assert_named(error, *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    assert "expect" in message
    assert "got" in message
    for part in parts:
        assert part in message, message


# Construction ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (dict(n_head=3), ["n_head: expected a divisor of n_hidden=16; got 3"]),
        (dict(n_head=0), ["n_head: expected a divisor of n_hidden=16; got 0"]),
        (dict(n_head=32), ["n_head: expected a divisor of n_hidden=16; got 32"]),
        (dict(embedding_dim=None), ["embedding_dim: expected a width", "got None"]),
        (dict(embedding_dim=0), ["embedding_dim: expected at least 1; got 0"]),
        (dict(functional_dim=0), ["functional_dim: expected at least 1; got 0"]),
        (dict(out_dim=0), ["out_dim: expected at least 1; got 0"]),
        (dict(n_layers=0), ["n_layers: expected at least 1; got 0"]),
        (dict(n_hidden=0), ["n_hidden: expected at least 1; got 0"]),
        (dict(mlp_ratio=0), ["mlp_ratio: expected at least 1; got 0"]),
        (dict(slice_num=0), ["slice_num: expected at least 1; got 0"]),
        (dict(chunk_size=0), ["chunk_size: expected at least 1, or None; got 0"]),
        (dict(dropout=1.0), ["dropout: expected a rate in [0, 1); got 1.0"]),
        (dict(dropout=-0.1), ["dropout: expected a rate in [0, 1); got -0.1"]),
        (dict(act="gelo"), ["act: expected one of", "gelu", "got 'gelo'"]),
        (dict(remat="blocks"), ["remat: expected one of none, attention, block; got 'blocks'"]),
        (dict(attention_backend="triton"), ["attention_backend: expected one of auto, xla, cudnn"]),
        (
            dict(attention_backend="cudnn"),
            ["attention_backend: 'cudnn' expects dtype bfloat16 or float16", "got float32"],
        ),
        (
            dict(attention_backend="cudnn", n_hidden=256, n_head=2, dtype="bfloat16"),
            ["attention_backend: 'cudnn' expects heads of at most 126 channels; got 128"],
        ),
        (dict(unified_pos=True), ["unified_pos: expected a structured_shape of 2", "got None"]),
        (
            dict(unified_pos=True, structured_shape=[4, 2, 2]),
            ["unified_pos: expected a structured_shape of 2 axes; got (4, 2, 2)"],
        ),
        (dict(unified_pos=True, structured_shape=[4, 4], ref=0), ["at least 1; got 0"]),
        (dict(structured_shape=[16]), ["structured_shape: expected 2 or 3", "got [16]"]),
        (dict(structured_shape=[4, 0]), ["structured_shape: expected 2 or 3", "got [4, 0]"]),
        (dict(structured_shape=[4.5, 2]), ["structured_shape: expected 2 or 3", "[4.5, 2]"]),
        (dict(structured_shape=16), ["structured_shape: expected 2 or 3", "got 16"]),
        (dict(structured_shape="44"), ["structured_shape: expected 2 or 3", "got '44'"]),
        (dict(dtype="foo"), ["dtype: expected a floating type; got 'foo'"]),
        (dict(dtype="int32"), ["dtype: expected a floating type; got 'int32'"]),
        (dict(param_dtype="complex64"), ["param_dtype: expected a floating type; got 'complex64'"]),
        (dict(time_input=True, n_hidden=15, n_head=3), ["expected an even n_hidden, got 15"]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_bad_option_is_named(options, parts):
    with pytest.raises(ValueError, match="expect") as error:
        small_flare(**options)
    assert_named(error, *parts)


def test_gale_has_no_fused_kernel():
    with pytest.raises(ValueError, match="attention_backend: expected auto or xla with attention_"):
        GeoTransolver(functional_dim=2, out_dim=1, attention_backend="cudnn", rngs=nnx.Rngs(0))


def test_fused_kernel_is_refused_on_a_cpu():
    model = small_flare(attention_backend="cudnn", dtype="bfloat16")
    with pytest.raises(ValueError, match="'cudnn' expects an NVIDIA GPU to compile for; got 'cpu'"):
        model(fx=FX, embedding=EMBEDDING)


def test_heads_that_do_not_divide_over_the_mesh_are_named():
    with (
        on_mesh(dict(heads=8)),
        pytest.raises(ValueError, match="n_head: expected a multiple") as error,
    ):
        small_flare(n_head=4)
    assert_named(error, "the mesh axis 'heads' of 8; got 4")


def test_model_on_a_mesh_that_does_not_divide_its_heads_is_named(cloud):
    with (
        on_mesh(dict(heads=8)),
        pytest.raises(ValueError, match="n_head: expected a multiple") as error,
    ):
        cloud(FX, EMBEDDING)
    assert_named(error, "the mesh axis 'heads' of 8; got 4")


# Calls -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cloud() -> FLARE:
    return small_flare()


@pytest.fixture(scope="module")
def timed() -> FLARE:
    return small_flare(time_input=True)


@pytest.fixture(scope="module")
def grid() -> FLARE:
    return small_flare(structured_shape=[4, 4])


@pytest.fixture(scope="module")
def unified() -> FLARE:
    return small_flare(structured_shape=[4, 4], unified_pos=True, embedding_dim=None, ref=2)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (dict(fx=FX[0]), ["fx: expected shape (B, N, 2); got (16, 2)"]),
        (dict(fx=FX[None]), ["fx: expected shape (B, N, 2); got (1, 2, 16, 2)"]),
        (dict(fx=EMBEDDING), ["fx: expected shape (B, N, 2); got (2, 16, 3)"]),
        (dict(fx=FX[:, :0]), ["fx: expected shape (B, N, 2); got (2, 0, 2)"]),
        (dict(fx=FX[:0]), ["fx: expected shape (B, N, 2); got (0, 16, 2)"]),
        (dict(fx=FX.tolist()), ["fx: expected an array of shape (B, N, 2); got list"]),
        (dict(fx=FX * 1j), ["fx: expected real numbers of shape (B, N, 2); got type complex"]),
        (dict(fx=FX.astype(object)), ["fx: expected real numbers", "got type object"]),
        (
            dict(point_mask=[[True] * 16] * 2),
            ["point_mask: expected an array of bool (2, 16); got list"],
        ),
        (dict(embedding=None), ["embedding: expected shape (B, N, 3)", "got None"]),
        (dict(embedding=FX), ["embedding: expected shape (B, N, 3); got (2, 16, 2)"]),
        (dict(embedding=EMBEDDING[0]), ["embedding: expected shape (B, N, 3); got (16, 3)"]),
        (dict(embedding=EMBEDDING[:, :15]), ["2 samples of 16 points", "got shape (2, 15, 3)"]),
        (dict(embedding=EMBEDDING[:1]), ["2 samples of 16 points", "got shape (1, 16, 3)"]),
        (dict(time=TIME), ["time: expected none, since time_input=False; got one"]),
        (
            dict(point_mask=np.ones((2, 15), bool)),
            ["point_mask: expected bool (2, 16); got bool (2, 15)"],
        ),
        (dict(point_mask=np.ones((16, 2), bool)), ["point_mask: expected bool (2, 16)"]),
        (dict(point_mask=np.ones(16, bool)), ["point_mask: expected bool (2, 16)"]),
        (
            dict(point_mask=np.ones((2, 16), np.float32)),
            ["point_mask: expected bool (2, 16); got float32 (2, 16)"],
        ),
        (dict(point_mask=np.ones((2, 16), np.int32)), ["point_mask: expected bool", "got int32"]),
        (
            dict(point_mask=ONE_EMPTY),
            ["point_mask: expected at least one real point", "got none in sample 1"],
        ),
        (
            dict(point_mask=~ONE_EMPTY),
            ["point_mask: expected at least one real point", "got none in sample 0"],
        ),
    ],
)
@pytest.mark.parametrize("mesh", [None, MESHES["points8"]], ids=["single", "points8"])
def test_bad_argument_is_named(arguments, parts, mesh, cloud):
    with (
        on_mesh(mesh),
        pytest.raises(ValueError, match=r"^(fx|embedding|time|point_mask):") as error,
    ):
        cloud(**dict(fx=FX, embedding=EMBEDDING) | arguments)
    assert_named(error, *parts)


def test_empty_sample_of_a_sharded_mask_is_named(cloud):
    with (
        on_mesh(MESHES["points8"]),
        pytest.raises(ValueError, match="got none in sample 1"),
    ):
        cloud(FX, EMBEDDING, point_mask=jnp.asarray(ONE_EMPTY))


def test_shapes_are_checked_inside_compiled_programs(cloud):
    with pytest.raises(ValueError, match=r"^embedding: .* 16 points") as error:
        jax.eval_shape(cloud, FX, EMBEDDING[:, 1:])
    assert_named(error)


@pytest.mark.parametrize(
    ("time", "parts"),
    [
        (None, ["time: expected shape (2,), one a sample; got None"]),
        (TIME[:1], ["time: expected shape (2,), one a sample; got (1,)"]),
        (TIME[:, None], ["time: expected shape (2,), one a sample; got (2, 1)"]),
        (np.float32(1), ["time: expected an array of shape (2,), one a sample; got float32"]),
    ],
)
def test_bad_time_is_named(time, parts, timed):
    with pytest.raises(ValueError, match=r"^time:") as error:
        timed(FX, EMBEDDING, time=time)
    assert_named(error, *parts)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((2, 15), ["expected shape (B, N, 2) with N = 16, or (B, 4, 4, 2); got (2, 15, 2)"]),
        ((2, 18), ["with N = 16, or (B, 4, 4, 2); got (2, 18, 2)"]),
        ((2, 12), ["with N = 16, or (B, 4, 4, 2); got (2, 12, 2)"]),
        ((2, 4, 5), ["got (2, 4, 5, 2)"]),
        ((2, 3, 4), ["got (2, 3, 4, 2)"]),
        ((2, 4, 2, 2), ["got (2, 4, 2, 2, 2)"]),
        ((2, 20), ["a point_mask, since 5 rows are more than the 4", "got shape (2, 20, 2)"]),
        ((2, 5, 4), ["a point_mask, since 5 rows are more than the 4", "got shape (2, 5, 4, 2)"]),
    ],
)
def test_points_that_are_not_the_grid_are_named(shape, parts, grid):
    fx, embedding = np.ones((*shape, 2), np.float32), np.ones((*shape, 3), np.float32)
    with pytest.raises(ValueError, match=r"^fx:") as error:
        grid(fx, embedding)
    assert_named(error, *parts)


def test_embedding_beside_unified_positions_is_named(unified):
    with pytest.raises(ValueError, match="embedding: expected none, since unified_pos") as error:
        unified(FX, EMBEDDING)
    assert_named(error)


def test_batch_that_does_not_divide_over_the_mesh_is_named(cloud):
    with (
        on_mesh(MESHES["data2_points4"]),
        pytest.raises(ValueError, match="fx: a batch of 1 samples does not divide") as error,
    ):
        placed(cloud)(FX[:1], EMBEDDING[:1])
    assert "'data' of 2; use a multiple of 2" in str(error.value)
    assert "\n" not in str(error.value)
