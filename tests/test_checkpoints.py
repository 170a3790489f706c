"""Checkpoints: which are kept, what comes back on another mesh, and what is said of damage."""

import gc
import shutil
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import assert_one_line
from conftest import on_mesh, placed, small_flare

from experiments.configuration.schema import OptimizerConfig
from experiments.data.batch import Scale, Statistics, StreamStatistics
from experiments.training.checkpoints import Checkpoints
from experiments.training.optimizer import make_optimizer
from experiments.training.steps import TrainState, abstract_state, initial_state

NAN = float("nan")
FX, EMBEDDING, TARGET = (
    Scale(np.full(size, size, np.float32), np.full(size, 1, np.float32)) for size in (2, 3, 2)
)
STATISTICS = Statistics((StreamStatistics(EMBEDDING, TARGET, FX),))
OPTIMIZER = make_optimizer(OptimizerConfig(), steps=10)


def tree(value: float) -> dict:
    return {"a": jnp.full((4, 3), value), "b": {"c": jnp.arange(8.0) + value}}


def kept(folder: Path) -> set[int]:
    """The steps whose folders are on disk; whatever else lies there is counted as well."""
    return {int(path.name) for path in (folder / "checkpoints").iterdir()}


def save(folder: Path, errors, keep=2) -> None:
    """Saves steps 1, 2, ... with these validation errors, the folder opened anew for each."""
    for step, error in enumerate(errors, start=1):
        checkpoints = Checkpoints(folder, keep)
        checkpoints.save(step, tree(step), {"seconds": step}, error)
        checkpoints.close()


@pytest.mark.parametrize(
    ("errors", "keep", "expected", "best"),
    [
        ([0.5, 0.1, 0.4, 0.3, 0.6, 0.2], 2, {2, 5, 6}, 2),
        ([0.5, 0.4, 0.3], 2, {2, 3}, 3),
        ([0.1, 0.4, 0.3], 1, {1, 3}, 1),
        # As a signal leaves them: without a validation error.
        ([0.5, None, 0.6, None, 0.7, 0.8], 1, {1, 6}, 1),
        ([0.5, 0.6, 0.7, None], 1, {1, 4}, 1),
        ([None, None, None], 2, {2, 3}, None),
        ([None, 0.5, None], 1, {2, 3}, 2),
        # A training that diverges does not lose its best weights.
        ([0.5, NAN, 0.6, 0.7], 2, {1, 3, 4}, 1),
        ([0.5, 0.4, NAN, NAN, float("inf")], 1, {2, 5}, 2),
    ],
)
def test_latest_few_and_the_best_are_kept(tmp_path, errors, keep, expected, best):
    save(tmp_path, errors, keep)
    assert kept(tmp_path) == expected
    checkpoints = Checkpoints(tmp_path, read_only=True)
    assert checkpoints.latest() == len(errors)
    assert checkpoints.best() == best
    for step in expected:
        restored, extra = checkpoints.restore(step, tree(0))
        jax.tree.map(np.testing.assert_array_equal, restored, tree(step))
        assert extra == {"seconds": step}
    checkpoints.close()


def test_one_process_keeps_the_same_checkpoints_as_many(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, error in enumerate([0.5, 0.1, None, 0.3, None], start=1):
        checkpoints.save(step, tree(step), {}, error)
    checkpoints.close()
    assert kept(tmp_path) == {2, 4, 5}


def test_saving_sees_the_state_as_it_was(tmp_path):
    """The next step may overwrite a state while it is written in the background."""
    advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    checkpoints = Checkpoints(tmp_path, keep=9)
    state = jax.tree.map(jnp.copy, {"a": jnp.zeros((300, 300)), "b": jnp.zeros(())})
    for step in range(4):
        checkpoints.save(step, state, {}, None)
        for _ in range(10):
            state = advance(state)
    checkpoints.close()
    reader = Checkpoints(tmp_path, read_only=True)
    for step in range(4):
        restored, _ = reader.restore(step, state)
        assert (np.asarray(restored["a"]) == 10 * step).all()
        assert restored["b"] == 10 * step
    reader.close()


@cache
def small_model():
    return small_flare()


def model_state(axes) -> TrainState:
    """A training state on a mesh in which no two numbers are the same by chance."""
    with on_mesh(axes):
        model = placed(small_model())
        state = initial_state(model, OPTIMIZER, STATISTICS, seed=3, average=True)
    generator = np.random.default_rng(0)

    def draw(leaf):
        values = (1000 * generator.standard_normal(leaf.shape)).astype(leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    return jax.tree.map(draw, state)


@pytest.fixture(scope="module", params=["data2_points4", "data2_points2_heads2"])
def from_mesh(request, tmp_path_factory):
    """A folder with the checkpoint of a state on a mesh, and the state."""
    axes = {
        "data2_points4": dict(data=2, points=4),
        "data2_points2_heads2": dict(data=2, points=2, heads=2),
    }
    folder = tmp_path_factory.mktemp(request.param)
    state = model_state(axes[request.param])
    checkpoints = Checkpoints(folder)
    checkpoints.save(7, state, {"loader": {"position": 7}}, 0.5)
    checkpoints.close()
    return folder, state


def assert_same_bits(actual, expected) -> None:
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "axes", [None, dict(points=2), dict(points=2, heads=4)], ids=["single", "points2", "heads4"]
)
def test_checkpoint_comes_back_bitwise_on_another_mesh(from_mesh, axes):
    folder, saved = from_mesh
    like = model_state(axes)
    checkpoints = Checkpoints(folder, read_only=True)
    restored, extra = checkpoints.restore(7, like)
    assert_same_bits(restored, saved)
    assert extra == {"loader": {"position": 7}}
    assert jax.tree.structure(restored) == jax.tree.structure(like)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
        assert ours.sharding == theirs.sharding
    checkpoints.close()


@pytest.mark.parametrize("axes", [None, dict(points=4, heads=2)], ids=["single", "points4_heads2"])
def test_weights_come_back_without_the_optimizer_from_shapes_alone(from_mesh, axes):
    folder, saved = from_mesh
    with on_mesh(axes):
        model = placed(small_model())
        like = abstract_state(model, OPTIMIZER, STATISTICS, seed=0, average=True)
    checkpoints = Checkpoints(folder, read_only=True)
    restored, _ = checkpoints.restore(7, like._replace(optimizer=None))
    checkpoints.close()
    assert restored.optimizer is None
    assert_same_bits(restored, saved._replace(optimizer=None))
    devices = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(restored)}
    assert devices == {1 if axes is None else 8}


def test_checkpoint_of_another_model_names_the_parameter(from_mesh):
    folder, saved = from_mesh
    checkpoints = Checkpoints(folder, read_only=True)
    kernel = saved.params["project_out"]["kernel"]
    wider = jax.ShapeDtypeStruct((17, 2), kernel.dtype, sharding=kernel.sharding)
    for layer, message in (
        ({"kernel": wider}, "['kernel'] has shape (16, 2) there, (17, 2) here"),
        ({"gate": wider}, "it lacks .params['project_out']['gate']"),
    ):
        like = saved._replace(params=saved.params | {"project_out": layer})
        with pytest.raises(ValueError, match="a checkpoint of another model") as error:
            checkpoints.restore(7, like)
        assert_one_line(str(error.value), f"{folder}/checkpoints/7: ", message)
    checkpoints.close()


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder with one checkpoint of two arrays, to be damaged in a copy."""
    folder = tmp_path_factory.mktemp("sound")
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, tree(1), {"seconds": 1}, 0.5)
    checkpoints.close()
    return folder


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {
    "data_truncated": ("state/d/*", truncate),
    "data_deleted": ("state/d/*", Path.unlink),
    "index_truncated": ("state/manifest.ocdbt", truncate),
    "index_deleted": ("state/manifest.ocdbt", Path.unlink),
    "metadata_truncated": ("state/_METADATA", truncate),
    "metadata_deleted": ("state/_METADATA", Path.unlink),
    "state_deleted": ("state", shutil.rmtree),
    "extra_truncated": ("extra/metadata", truncate),
    "extra_deleted": ("extra", shutil.rmtree),
    "metrics_truncated": ("metrics/metrics", truncate),
}


# Orbax leaves the reads of the other arrays unfinished, and Python tells when it collects them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_one_line_that_names_the_folder(sound, tmp_path, damage):
    pattern, harm = DAMAGES[damage]
    shutil.copytree(sound / "checkpoints", tmp_path / "checkpoints")
    found = list((tmp_path / "checkpoints" / "1").glob(pattern))
    assert found
    for path in found:
        harm(path)
    with pytest.raises(ValueError, match="damaged") as error:
        Checkpoints(tmp_path, read_only=True).restore(1, tree(0))
    message = str(error.value)
    assert_one_line(message, str(tmp_path / "checkpoints"))
    assert len(message.replace(str(tmp_path), "")) < 500
    del error
    gc.collect()


def test_half_written_checkpoint_is_never_read(sound, tmp_path):
    shutil.copytree(sound / "checkpoints", tmp_path / "checkpoints")
    half = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    shutil.copytree(sound / "checkpoints" / "1", half)
    truncate(half / "state" / "_METADATA")

    reader = Checkpoints(tmp_path, read_only=True)
    assert reader.latest() == reader.best() == 1
    reader.close()
    assert half.is_dir(), "who only reads does not delete what another process may be writing"

    writer = Checkpoints(tmp_path, keep=2)
    assert writer.latest() == 1
    writer.save(2, tree(2), {}, None)
    writer.close()
    assert kept(tmp_path) == {1, 2}


def test_reading_where_nothing_was_saved_is_named_and_makes_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no checkpoint yet"):
        Checkpoints(tmp_path, read_only=True)
    assert not list(tmp_path.iterdir())
