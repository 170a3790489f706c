"""Fine-tuning: what is frozen stays, rates are kept, and adapters do what LoRA says they do."""

import dataclasses
import json
import shutil
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import TINY, assert_one_line, call, compose, printed_metrics
from conftest import assert_trees_close, on_mesh, placed
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from saved import saved_arrays
from test_training import MESHES, STATISTICS, clouds, place, small_model, to_host

from experiments import evaluate, train
from experiments.building import build_model
from experiments.configuration import configs
from experiments.configuration.schema import FinetuneConfig, OptimizerConfig
from experiments.data.description import Description
from experiments.finetuning.adapters import merged, with_adapters
from experiments.finetuning.tuning import Tuning
from experiments.finetuning.weight_groups import Rates, names_of
from experiments.training import run as training_run
from experiments.training.optimizer import make_optimizer
from experiments.training.starting_weights import take_weights
from experiments.training.steps import initial_state, make_step
from experiments.training.trained import restore_run

ADAMW = OptimizerConfig(name="adamw", weight_decay=0.1, clip_norm=None, schedule="constant")
MUON = OptimizerConfig(name="muon", weight_decay=0.1, schedule="constant")
LORA = dict(lora_rank=2, lora_alpha=6.0, lora_layers=["blocks.*", "preprocess.linear_out"])
TUNED_STEP = LORA | dict(
    unfreeze=["project_out.*", "blocks.1.norm*"], learning_rates=["*.adapter_up=3"]
)


def steps(count: int, optimizer=MUON, *, average=True, shard=False, **options):
    """A small model's tuning, its first state and that after some steps, on the host."""
    model = placed(small_model())
    tuning = Tuning(FinetuneConfig(**options), model)
    arguments = (model, make_optimizer(optimizer, 10))
    state = initial_state(*arguments, STATISTICS, 0, average=average, shard=shard, tuning=tuning)
    step = make_step(*arguments, 0.5 if average else None, state, tuning=tuning)
    first = to_host(state)
    for seed in range(count):
        state, _ = step(state, (place(clouds(seed=seed)),))
    assert step._cache_size() == 1
    return tuning, first, to_host(state)


def changed(first, last) -> set[str]:
    """Names of the weights that are not the same bits any more."""
    found, before = set(), flatten_dict(first.params)
    for path, leaf in flatten_dict(last.params).items():
        names = names_of(path, leaf.shape)
        old, new = before[path], leaf
        if len(names) == 1:
            old, new = old[None], new[None]
        found |= {name for name, a, b in zip(names, old, new, strict=True) if (a != b).any()}
    return found


def all_names(params) -> set[str]:
    return {
        name for path, leaf in flatten_dict(params).items() for name in names_of(path, leaf.shape)
    }


# Groups ------------------------------------------------------------------------------------------


def test_blocks_of_a_stack_are_named_by_their_number():
    shape = (3, 4, 5)
    assert names_of(("stack", "blocks", "mlp", "kernel"), shape) == [
        f"blocks.{i}.mlp.kernel" for i in range(3)
    ]
    assert names_of(("streams", 0, "kernel"), shape) == ["streams.0.kernel"]


def test_what_is_frozen_keeps_its_bits():
    freeze = ["blocks.0.*", "preprocess.*", "norm_out.scale"]
    tuning, first, last = steps(3, MUON, freeze=freeze, unfreeze=["*.linear_in.bias"])
    everything = all_names(first.params)
    frozen = {
        name
        for name in everything
        if name.startswith(("blocks.0.", "preprocess.")) or name == "norm_out.scale"
    } - {"blocks.0.mlp.linear_in.bias", "preprocess.linear_in.bias"}
    assert changed(first, last) == everything - frozen
    # Nothing is kept for what is frozen as a whole.
    assert not any("norm_out" in str(path) and "scale" in str(path) for path, _ in
                   jax.tree_util.tree_leaves_with_path(last.optimizer))  # fmt: skip
    assert ("norm_out", "scale") not in flatten_dict(last.average)
    sizes = {path: leaf.size for path, leaf in flatten_dict(first.params).items()}
    held = sum(
        leaf[0].size * (f"blocks.0.{'.'.join(path[2:])}" in frozen)
        if path[0] == "stack"
        else leaf.size * (".".join(path) in frozen)
        for path, leaf in flatten_dict(first.params).items()
    )
    assert tuning.rates.count(first.params) == sum(sizes.values()) - held


def test_rates_are_factors_on_the_first_update():
    """The first step of a whole tree has one gradient, so its updates compare."""
    factors = ["*=0.5", "blocks.1.*=0.25", "*.mlp.linear_out.kernel=2.0"]
    _, first, plain = steps(1, MUON)
    _, _, scaled = steps(1, MUON, learning_rates=factors)
    for path, start in flatten_dict(first.params).items():
        full = flatten_dict(plain.params)[path] - start
        own = flatten_dict(scaled.params)[path] - start
        expected = np.full(start.shape, 0.5)
        if path[0] == "stack":
            expected[1] = 0.25
            if path[-3:] == ("mlp", "linear_out", "kernel"):
                expected[:] = 2.0
        # Weights are rounded after the update.
        np.testing.assert_allclose(own, expected * full, rtol=1e-4, atol=3e-7)


def test_norm_and_clipping_are_of_what_trains():
    """The gradient of frozen weights, of some blocks too, clips nothing."""
    params, gradient = {}, {}
    for path in (("stack", "blocks", "kernel"), ("preprocess", "kernel"), ("project_out", "bias")):
        params[path] = np.ones((2, 3, 3) if path[0] == "stack" else (3, 3), np.float32)
        gradient[path] = np.full_like(params[path], 1e6)
    gradient["stack", "blocks", "kernel"][1] = 0.1
    gradient["project_out", "bias"][:] = 0.1
    names = {"blocks.0.kernel": 0.0, "preprocess.kernel": 0.0}
    rates = Rates.by_name(unflatten_dict(params), names)
    kept = rates.gradient(rates.trained(unflatten_dict(gradient)))
    assert float(jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(kept)))) == (
        pytest.approx(0.1 * 18**0.5)
    )


# Adapters ----------------------------------------------------------------------------------------


def test_adapters_begin_as_nothing_and_train_alone():
    tuning, first, last = steps(3, **LORA)
    moved = changed(first, last)
    assert {name.rpartition(".")[2] for name in moved} == {"adapter_down", "adapter_up"}
    layers = {name.rpartition(".")[0] for name in moved}
    expected = {
        f"blocks.{i}.{layer}"
        for i in range(2)
        for layer in (
            *("attention.project_in", "attention.project_key", "attention.project_value"),
            *("attention.project_out", "mlp.linear_in", "mlp.linear_out"),
        )
    }
    assert layers == expected | {"preprocess.linear_out"}
    plain = nnx.to_pure_dict(nnx.state(small_model(), nnx.Param))
    assert_trees_close(merged(first.params), to_host(plain), 0)
    down = first.params["stack"]["blocks"]["mlp"]["linear_in"]["adapter_down"]
    assert down.shape == (2, 16, 2)
    # Of one width in, a uniform draw of this bound; blocks are drawn apart.
    assert 0.2 < np.abs(down).max() <= 0.25
    assert (down[0] != down[1]).all()
    trained = tuning.rates.count(first.params)
    assert trained == sum(
        leaf.size for path, leaf in flatten_dict(first.params).items()
        if path[-1] in ("adapter_down", "adapter_up")
    )  # fmt: skip
    assert sum(leaf.size for leaf in jax.tree.leaves(last.average)) == trained


def test_gradients_of_adapters_are_those_of_the_two_narrow_layers(float64):
    """`x W + (alpha / r) (x D) U`, written out, has the same value and gradients."""
    draw = np.random.default_rng(0).standard_normal
    kernel, x, weight = draw((2, 5, 7)), draw((2, 11, 5)), draw((2, 11, 7))
    params = {"stack": {"blocks": {"layer": {"kernel": kernel}}}}
    params = with_adapters(params, [("stack", "blocks", "layer")], 3, 6.0, jax.random.key(0))
    layer = params["stack"]["blocks"]["layer"]
    layer["adapter_up"] = jnp.asarray(draw(layer["adapter_up"].shape))
    down, up = layer["adapter_down"], layer["adapter_up"]

    def by_merging(down, up):
        layer = params["stack"]["blocks"]["layer"] | dict(adapter_down=down, adapter_up=up)
        (kernel,) = jax.tree.leaves(merged({"stack": {"blocks": {"layer": layer}}}))
        return ((x @ kernel) * weight).sum()

    def written_out(down, up):
        return ((x @ kernel + 2.0 * ((x @ down) @ up)) * weight).sum()

    actual = jax.value_and_grad(by_merging, (0, 1))(down, up)
    expected = jax.value_and_grad(written_out, (0, 1))(down, up)
    assert_trees_close(actual, expected, 1e-12)


def test_a_layer_narrower_than_the_rank_has_an_adapter_of_its_width():
    params = {"a": {"kernel": np.ones((3, 9), np.float32)}}
    layer = with_adapters(params, [("a",)], 8, 16.0, jax.random.key(0))["a"]
    assert (layer["adapter_down"].shape, layer["adapter_up"].shape) == ((3, 3), (3, 9))
    assert float(layer["adapter_scale"]) == 2.0


def test_adapters_of_some_blocks_leave_the_others_alone():
    _, first, last = steps(2, lora_rank=2, lora_layers=["blocks.1.mlp.*"], freeze=[])
    moved = changed(first, last)
    adapted = {f"blocks.1.mlp.linear_{way}" for way in ("in", "out")}
    assert {name for name in moved if "adapter" in name} == {
        f"{layer}.{part}" for layer in adapted for part in ("adapter_down", "adapter_up")
    }
    # All else trains here, but for the kernels that have an adapter.
    plain = all_names(nnx.to_pure_dict(nnx.state(small_model(), nnx.Param)))
    assert moved - {name for name in moved if "adapter" in name} == plain - {
        f"{layer}.kernel" for layer in adapted
    }


@cache
def tuned_on_one_device():
    return steps(2, ADAMW, **TUNED_STEP)[2]


@pytest.mark.parametrize(
    ("mesh", "shard"),
    [("points8", False), ("data2_points4", True), ("data2_points2_heads2", False)],
)
def test_tuning_is_the_same_on_every_mesh(mesh, shard):
    expected = tuned_on_one_device()
    with on_mesh(MESHES[mesh]):
        _, _, actual = steps(2, ADAMW, shard=shard, **TUNED_STEP)
    assert_trees_close(merged(actual.params), merged(expected.params), 2e-5)
    assert_trees_close(actual.evaluated_params, expected.evaluated_params, 2e-5)


# Runs --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return f"data.cache_dir={tmp_path_factory.mktemp('cache')}"


def run(folder, data, *overrides):
    return call(train.main, *TINY, data, f"hydra.run.dir={folder}", "mesh.points=2", *overrides)


@pytest.fixture(scope="module")
def base(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    result = run(folder, data, "train.steps=6", "optimizer.ema_decay=0.5", "model.n_layers=2")
    assert result.code == 0, result.err
    return folder


TUNED = [
    "model.n_layers=2",
    "train.steps=6",
    "train.checkpoint_every=3",
    "optimizer.ema_decay=0.5",
    "finetune.lora_rank=2",
    "finetune.unfreeze=[project_out.*]",
    'finetune.learning_rates=["blocks.[0-0].*=0.5"]',
]


@pytest.fixture(scope="module")
def tuned(base, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    result = run(folder, data, *TUNED, f"finetune.start_from={base}")
    assert result.code == 0, result.err
    return folder, result


def weights_of(folder, which="last"):
    trained, _ = restore_run(folder, which)
    return to_host(nnx.to_pure_dict(nnx.state(trained.with_weights(), nnx.Param)))


def test_a_run_starts_from_the_weights_and_statistics_of_another(base, tuned, data, tmp_path):
    folder, result = tuned
    (told,) = [line for line in result.out.splitlines() if "parameters" in line]
    summary = json.loads((folder / "summary.json").read_text())
    trained = summary["trained_parameters"]
    assert f"{summary['parameters']:,} parameters, of which {trained:,} train" in told
    assert 0 < trained < summary["parameters"] / 2
    own, given = weights_of(folder), weights_of(base)
    assert jax.tree.structure(own) == jax.tree.structure(given)
    for path, leaf in flatten_dict(given).items():
        tunes = path[-1] == "kernel" and path[:2] == ("stack", "blocks")
        same = (flatten_dict(own)[path] == leaf).all()
        assert same == (not tunes and path[0] != "project_out"), path

    # At a rate of nothing the run evaluates as the one that it starts from.
    still = tmp_path / "still"
    result = run(still, data, *TUNED[:4], f"finetune.start_from={base}", "train.steps=1",
                 "optimizer.learning_rate=1e-30", "optimizer.weight_decay=0")  # fmt: skip
    assert result.code == 0, result.err
    before, after = (
        json.loads((f / "summary.json").read_text())["test_relative_l2"] for f in (base, still)
    )
    assert after == pytest.approx(before, rel=1e-6)


def test_tuned_run_is_evaluated_with_its_adapters_merged(tuned):
    folder, _ = tuned
    result = call(evaluate.main, folder, "--checkpoint", "last")
    assert result.code == 0, result.err
    summary = json.loads((folder / "summary.json").read_text())
    printed = printed_metrics(result.out)
    assert float(printed["test_relative_l2"]) == pytest.approx(
        summary["test_relative_l2"], rel=1e-3
    )


def test_tuned_run_goes_on_with_the_same_bits_without_the_run_it_began_from(
    tuned, base, data, tmp_path, monkeypatch
):
    """The first half of it, then the second; the run that it started from is away by then."""
    folder, _ = tuned
    half = tmp_path / "half"
    shutil.copytree(folder, half)
    shutil.rmtree(half / "checkpoints" / "6")
    (half / "summary.json").unlink()
    # Of the run that it started from nothing but its name is left.
    monkeypatch.setattr(training_run, "take_weights", None)
    result = run(half, data, *TUNED, f"finetune.start_from={base}")
    assert result.code == 0, result.err
    assert "going on from step 3" in result.out
    expected, actual = (saved_arrays(of, 6) for of in (folder, half))
    assert actual.keys() == expected.keys()
    for path, values in expected.items():
        np.testing.assert_array_equal(actual[path], values, err_msg=path)


def test_adapters_are_merged_into_what_is_exported(tuned, tmp_path):
    from experiments.export_physicsnemo import export_run
    from experiments.physicsnemo.files import read_checkpoint
    from experiments.physicsnemo.weights import state_dict

    folder, _ = tuned
    out = tmp_path / "tuned.mdlus"
    export_run(folder, out, "last")
    trained, _ = restore_run(folder, "last")
    expected = state_dict(trained.with_weights())
    written = read_checkpoint(out).tensors
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(written[name], tensor)


def test_weights_may_be_drawn_anew(base, data, tmp_path):
    folder = tmp_path / "reset"
    result = run(
        *(folder, data, *TUNED[:4], f"finetune.start_from={base}", "train.steps=1"),
        *("optimizer.learning_rate=1e-30", "optimizer.weight_decay=0"),
        *("finetune.reset=[project_out.*,blocks.1.mlp.*]", "train.seed=5"),
    )
    assert result.code == 0, result.err
    given, own = flatten_dict(weights_of(base)), flatten_dict(weights_of(folder))
    for path, leaf in given.items():
        block = 1 if path[:3] == ("stack", "blocks", "mlp") else None
        if path[-1] != "kernel":
            continue
        if path[0] == "project_out":
            assert (own[path] != leaf).all()
        elif block is not None:
            assert (own[path][0] == leaf[0]).all()
            assert (own[path][1] != leaf[1]).all()
        else:
            assert (own[path] == leaf).all()


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            ["model.n_hidden=32"],
            ["norm_out.bias in an array of shape (32,)", "model.n_hidden is 32 here and 16 there"],
        ),
        (["model.n_layers=3"], ["expected blocks.0.attention", "(3, 2, 4, 8)"]),
        (["finetune.reset=[nothing.*]"], ["finetune.reset: expected a pattern", "'nothing.*'"]),
        (["finetune.freeze=['*']"], ["finetune: expected a weight that trains; got all frozen"]),
    ],
)
def test_weights_that_do_not_fit_are_named(overrides, messages, base, data, tmp_path):
    start = f"finetune.start_from={base}"
    result = run(tmp_path, data, "model.n_layers=2", "train.steps=1", start, *overrides)
    assert result.code == 2
    assert_one_line(result.err, *messages)
    assert not (tmp_path / "checkpoints").is_dir() or not list((tmp_path / "checkpoints").iterdir())


def test_a_run_that_was_refused_leaves_its_folder_free(base, data, tmp_path):
    """What was wrong is changed, and the command given again."""
    overrides = ["model.n_layers=2", "train.steps=1", f"finetune.start_from={base}"]
    for wrong in (["finetune.freeze=['*']"], ["finetune.lora_rank=1", "finetune.start_from=null"]):
        result = run(tmp_path, data, *overrides, *wrong)
        assert result.code == 2
    assert_one_line(result.err, "finetune.lora_rank: expected weights beside it")
    result = run(tmp_path, data, *overrides, "train.steps=2")
    assert result.code == 0, result.err
    # From its first step on it is what it is.
    result = run(tmp_path, data, *overrides)
    assert_one_line(result.err, "holds a run with another configuration: train.steps")


def test_statistics_of_other_quantities_are_refused(base):
    description = Description.load(base)
    (stream,) = description.streams
    other = dataclasses.replace(
        description, streams=(dataclasses.replace(stream, fields=("temperature",)),)
    )
    model = small_model_of(base)
    with pytest.raises(ValueError, match="normalization: expected data, since") as error:
        take_weights(tuned_from(base), model, other)
    assert_one_line(str(error.value), "'pressure'", "'temperature'", "got run")
    assert take_weights(tuned_from(base, normalization="data"), model, other) is None


def tuned_from(folder, **options):
    """The experiment of a run, that starts from it."""
    config = FinetuneConfig(start_from=str(folder), **options)
    return dataclasses.replace(configs.load(folder), finetune=config)


def small_model_of(folder, **changes):
    config = configs.load(folder)
    model = dataclasses.replace(config.model, **changes)
    return build_model(model, Description.load(folder), 1)


def test_what_is_drawn_anew_may_be_of_another_shape(base):
    model = small_model_of(base, mlp_ratio=2)
    before = to_host(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    take_weights(tuned_from(base, reset=["blocks.*.mlp.*"]), model, Description.load(base))
    after, given = (flatten_dict(of) for of in (nnx.to_pure_dict(nnx.state(model, nnx.Param)),
                                                weights_of(base)))  # fmt: skip
    for path, leaf in flatten_dict(before).items():
        expected = leaf if path[2:3] == ("mlp",) else given[path]
        np.testing.assert_array_equal(after[path], expected, err_msg=str(path))


def test_a_run_that_is_not_there_is_named(data, tmp_path):
    result = run(tmp_path / "new", data, f"finetune.start_from={tmp_path / 'none'}")
    assert result.code == 2
    assert_one_line(result.err, str(tmp_path / "none"), "expected a run's folder")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["checkpoint=first"], "finetune.checkpoint: expected one of last, best; got 'first'"),
        (["normalization=x"], "finetune.normalization: expected one of run, data; got 'x'"),
        (["lora_rank=-1"], "finetune.lora_rank: expected a number of at least 0; got -1"),
        (["lora_rank=1", "lora_alpha=0"], "finetune.lora_alpha: expected a positive number"),
        (["lora_alpha=2"], "finetune.lora_alpha: expected finetune.lora_rank beside it"),
        (["lora_layers=[a]"], "finetune.lora_layers: expected finetune.lora_rank beside it"),
        (["reset=[a]"], "finetune.reset: expected finetune.start_from beside it"),
        (["checkpoint=best"], "finetune.checkpoint: expected finetune.start_from beside it"),
        (["unfreeze=[a]"], "finetune.unfreeze: expected finetune.freeze beside it"),
        (["learning_rates=['a=-1']"], "expected PATTERN=FACTOR with a factor of at least 0; got"),
        (["learning_rates=['a=nan']"], "expected PATTERN=FACTOR with a factor of at least 0; got"),
        (["learning_rates=['=1']"], "finetune.learning_rates: expected PATTERN=FACTOR"),
        (["learning_rates=[a]"], "finetune.learning_rates: expected PATTERN=FACTOR"),
    ],
)
def test_bad_settings_are_named(given, message):
    with pytest.raises(ValueError, match="finetune") as error:
        compose(*(f"finetune.{item}" for item in given))
    assert_one_line(str(error.value), message)


@pytest.mark.parametrize(
    "options",
    [
        dict(freeze=["blok.*"]),
        dict(freeze=["*"], unfreeze=["blocks.2.*"]),
        dict(learning_rates=["x=1"]),
        dict(lora_rank=1, lora_layers=["norm_out"]),
    ],
)
def test_patterns_that_match_nothing_are_named(options):
    (option, pattern) = list(options.items())[-1]
    with pytest.raises(ValueError, match=rf"^finetune\.{option}: expected a pattern that") as error:
        Tuning(FinetuneConfig(**options), small_model())
    assert_one_line(str(error.value), f"got {pattern[0].partition('=')[0]!r}")
