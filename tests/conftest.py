"""What the tests share. JAX is told of its virtual devices here, before anything imports it."""

import os

from compilation import FAST

os.environ["XLA_FLAGS"] = " ".join(
    [*FAST, os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
)
os.environ["JAX_PLATFORMS"] = "cpu"

import contextlib
import gc
import inspect
import json
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from checked_calls import check_calls
from flax import nnx

import parallel
from flare_jax import FLARE
from geotransolver_jax import Transolver
from parallel.parameters import place_parameters

check_calls()

_FLAGS = os.environ["XLA_FLAGS"]

GOLDEN = Path(__file__).parent / "golden"

MESHES = {
    "points8": dict(points=8),
    "data2_points4": dict(data=2, points=4),
    "points4_heads2": dict(points=4, heads=2),
    "data2_points2_heads2": dict(data=2, points=2, heads=2),
}

on_meshes = pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
on_any_mesh = pytest.mark.parametrize("mesh", [None, *MESHES.values()], ids=["single", *MESHES])


def on_mesh(axes: dict[str, int] | None):
    """Context of a device mesh, or of none."""
    if axes is None:
        return contextlib.nullcontext()
    return jax.set_mesh(parallel.make_mesh(**axes))


def small_model(kind, **options):
    """A model of width 16, with weights far from zero; it is given the sizes that it takes.

    At the initial weights attention is all but uniform, and a fault in it would hardly show.
    """
    sizes = dict(functional_dim=2, out_dim=2, embedding_dim=3)
    sizes |= dict(n_layers=2, n_hidden=16, n_head=4, slice_num=8)
    taken = inspect.signature(kind.__init__).parameters
    sizes = {name: size for name, size in sizes.items() if name in taken}
    model = kind(**sizes | options, rngs=nnx.Rngs(0, dropout=1))
    generator = np.random.default_rng(0)

    def perturb(value):
        return value + (0.2 * generator.standard_normal(value.shape)).astype(value.dtype)

    nnx.update(model, jax.tree.map(perturb, nnx.state(model, nnx.Param)))
    return model


small_flare = partial(small_model, FLARE)
small_transolver = partial(small_model, Transolver)


def placed(model):
    """A copy of a model on the mesh of the context; to draw its weights again takes seconds."""
    copy = nnx.clone(model)
    place_parameters(copy)
    return copy


def cloud_inputs(points: int, batch: int = 2, dtype=np.float32) -> dict[str, np.ndarray]:
    """Inputs of `small_flare`; those of fewer points or samples are the first of more."""
    draw = np.random.default_rng(0).standard_normal((1000, 8, 5)).astype(dtype)
    values = draw[:points, :batch].swapaxes(0, 1)
    return dict(fx=values[..., :2], embedding=values[..., 2:])


def padded_inputs(real: list[int], points: int, garbage: float, dtype=np.float32):
    """Inputs of `small_flare` with some real points in each sample, then garbage; and the mask."""
    mask = np.arange(points) < np.array(real)[:, None]
    inputs = {
        name: np.where(mask[..., None], value, dtype(garbage))
        for name, value in cloud_inputs(points, dtype=dtype).items()
    }
    return inputs, mask


@contextlib.contextmanager
def unchecked():
    """Arguments are not held against their annotations."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def unchecked_calls():
    """Lets wrong arguments through to the packages' own checks: users have these alone."""
    with unchecked():
        yield


@pytest.fixture
def float64():
    """float64 within one test."""
    with jax.enable_x64(True):
        yield np.float64


def relative_difference(actual, expected) -> float:
    """Largest difference relative to the largest value, as the laws of the design state it."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))


def assert_trees_close(actual, expected, tolerance: float) -> None:
    """Every leaf of two trees agrees to `tolerance` of its largest value."""
    difference = jax.tree.map(relative_difference, actual, expected)
    wrong = {
        jax.tree_util.keystr(path): value
        for path, value in jax.tree_util.tree_leaves_with_path(difference)
        if not value <= tolerance
    }
    assert not wrong, f"differ by more than {tolerance}: {wrong}"


def without_vanishing(gradients: dict, tolerance: float) -> dict:
    """Gradients of a GeoTransolver without those of the context's key bias, which must be nothing.

    It moves the scores of a query for all keys alike, and a softmax does not see that: what comes
    out is rounding, which no two programs share.
    """
    rest = jax.tree.map(lambda leaf: leaf, gradients)
    cross = rest["stack"]["blocks"]["attention"].get("cross")
    if cross:
        bias, kernel = np.abs(cross["key"].pop("bias")), np.abs(cross["key"]["kernel"])
        assert bias.max() <= tolerance * kernel.max()
    return rest


@partial(jax.jit, static_argnums=0)
def _step(graph, state, inputs, mask):
    def loss(model, inputs):
        output = model(**inputs, point_mask=mask)
        # The gradient at padding rows is not zero: it is the model that must not let it through.
        return jnp.sum((output + 1) ** 2) / 2, output

    differentiate = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, output), (d_model, d_inputs) = differentiate(nnx.merge(graph, state), inputs)
    return output, nnx.to_pure_dict(d_model), d_inputs


@partial(jax.jit, static_argnums=0)
def _forward(graph, state, inputs, mask):
    return nnx.merge(graph, state)(**inputs, point_mask=mask)


def forward(model, inputs: dict, mask=None):
    """The output for inputs as they are; compiled faster than by calling the model."""
    return _forward(*nnx.split(model), inputs, mask)


def step(model, inputs: dict, mask=None):
    """The output for inputs as they are, and the gradients (parameters, inputs) of a loss on it.

    Compiled once for each kind of model, shape and mesh.
    """
    output, d_params, d_inputs = _step(*nnx.split(model), inputs, mask)
    return output, (d_params, d_inputs)


def assert_padding_is_not_seen(model, inputs: dict, mask, axes=None, tolerance=1e-12) -> None:
    """Output and gradients of a padded batch are those of its samples, each alone and unpadded.

    In float32 a gradient that sums to nearly nothing would differ by its rounding.

    Args:
        model: a model, or a layer whose padding comes out zero as a model's does.
        inputs: arrays `(B, N, ...)`.
        mask: True where a point is real; the real ones come first.
        axes: mesh of the batch; samples are alone on one device.
        tolerance: relative to the largest value, in float64.
    """
    with on_mesh(axes):
        output, (d_weights, d_inputs) = step(placed(model), inputs, mask)
    expected = jax.tree.map(np.zeros_like, (output, d_inputs))
    total = jax.tree.map(np.zeros_like, d_weights)
    for sample, length in enumerate(mask.sum(1)):
        here = np.s_[sample : sample + 1, :length]
        of_one, (d_own, d_real) = step(model, {name: x[here] for name, x in inputs.items()})
        for whole, part in zip(*map(jax.tree.leaves, (expected, (of_one, d_real))), strict=True):
            whole[here] = part
        total = jax.tree.map(np.add, total, d_own)
    assert_trees_close((output, d_inputs, d_weights), (*expected, total), tolerance)


def value_and_gradients(model, inputs: dict):
    """Like `step`, for inputs on the host: they are sharded, and what comes out is brought back.

    Clouds may be lists of samples of different length; what comes out is then lists as well.
    """
    shape, fx = model.structured_shape, inputs["fx"]
    placed, mask = dict(inputs), None
    for name in inputs.keys() - {"time"}:
        placed[name], mask = parallel.shard_points(inputs[name], shape)
    output, (d_params, d_inputs) = step(model, placed, None if np.asarray(mask).all() else mask)

    points = [len(sample) for sample in fx] if isinstance(fx, list) else fx.shape[1]
    bring_back = partial(
        parallel.unshard_points,
        num_points=points if shape is None else None,
        structured_shape=shape,
    )
    for name in inputs.keys() - {"time"}:
        d_inputs[name] = bring_back(d_inputs[name])
    return bring_back(output), (d_params, d_inputs)


# Files of twenty seconds and more, the longest first: a worker that began one of them last would
# work alone at the end. pytest-xdist would hand files out by their number of tests. Of two workers
# the first gets the first and third: files that start many processes shall not run side by side.
LONGEST = [
    f"test_{name}"
    for name in (
        *("processes", "golden_geotransolver", "predict", "geotransolver", "checkpoints"),
        *("models_on_data", "documentation", "transolver", "finetuning", "golden", "faults"),
        *("geotransolver_options", "fused", "whole_cloud", "flare", "export", "neighbors"),
        *("training", "import_physicsnemo", "commands", "resume", "benchmarks"),
    )
]


def pytest_configure(config):
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish():
    """The garbage collector leaves what is there by now alone, and looks at the rest less often.

    Traces make objects by the thousand that all are used: looking at them took an eighth of the
    time.
    """
    # Read by JAX at the first computation: a module that changed them would do so for all tests.
    assert os.environ["XLA_FLAGS"] == _FLAGS
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)


# A process may have 65,530 of them on Linux by default; each compiled program takes a few, a long
# test some thousands.
_MEMORY_MAPS = 40_000
# Counting them takes up to 0.04 s; in 1 s of this process no more than some hundreds are made.
_SECONDS_BETWEEN_COUNTS = 1.0
_last_count = {"at": 0.0}


@pytest.fixture(autouse=True)
def forget_programs():
    """Lets go of compiled programs before the process runs out of memory maps.

    XLA would end it by a segmentation fault.
    """
    yield
    if time.process_time() - _last_count["at"] < _SECONDS_BETWEEN_COUNTS:
        return
    _last_count["at"] = time.process_time()
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MEMORY_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def model():
    return small_flare()


@pytest.fixture(scope="module")
def single_device(model):
    """Output and gradients for 97 points, on one device and without padding."""
    return value_and_gradients(model, cloud_inputs(97))


def load_golden(name: str) -> dict:
    """One reference case as a tree: `meta`, and the arrays under `param`, `in`, `out`, `grad`..."""
    case = {}
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as archive:
        for key in archive.files:
            group, _, leaf = key.partition("/")
            if leaf:
                case.setdefault(group, {})[leaf] = archive[key]
            else:
                case[group] = archive[key]
    case["meta"] = json.loads(str(case["meta"]))
    return case
