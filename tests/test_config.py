"""The configuration: groups, types, values, and errors of one line."""

import dataclasses
import json
import re

import pytest
from commands import assert_one_line, call, compose
from omegaconf import OmegaConf

from experiments import train
from experiments.cli import one_line_errors
from experiments.configuration import configs, schema
from experiments.configuration.configs import CONFIG_DIR
from experiments.configuration.schema import ExperimentConfig

GROUPS = [
    f"{path.parent.name}={path.stem}"
    for path in sorted(CONFIG_DIR.glob("*/*.yaml"))
    if path.parent != CONFIG_DIR
]

STORES = ("surface", "volume", "surface_volume", "bodies")
MODEL_NAMES = f"model.name: expected one of {', '.join(schema.MODELS)}"
DATA_NAMES = f"data.name: expected one of {', '.join(schema.DATA)}"
MODEL_CHOICES = ", ".join(sorted(path.stem for path in CONFIG_DIR.glob("model/*.yaml")))


@pytest.fixture(scope="module")
def default():
    """The configuration without overrides."""
    return compose()


@pytest.fixture
def changed(default):
    """Changes one key of the default configuration."""
    return lambda override: configs.typed(
        OmegaConf.merge(OmegaConf.structured(default), OmegaConf.from_dotlist([override]))
    )


@pytest.fixture
def reached(monkeypatch):
    """The configurations with which `experiments.train` would have trained."""
    reached = []
    monkeypatch.setattr(train, "train", lambda config, folder: reached.append(config) or {})
    return reached


@pytest.fixture
def saved(default, tmp_path):
    """A folder with a saved configuration, and its text."""
    configs.save(default, tmp_path)
    return tmp_path, (tmp_path / configs.CONFIG_FILE).read_text()


@pytest.mark.parametrize("choice", GROUPS)
def test_every_choice_of_a_group_composes_and_is_typed(choice):
    config = compose(choice)
    assert type(config) is ExperimentConfig
    assert type(config.model) in schema.MODELS.values()
    assert type(config.data) in schema.DATA.values()
    assert type(config.train.steps) is int
    assert type(config.optimizer.learning_rate) is float


def test_every_model_and_data_set_has_a_file_and_every_file_a_schema():
    for group, kinds in (("model", schema.MODELS), ("data", schema.DATA)):
        seen = set()
        for path in (CONFIG_DIR / group).glob("*.yaml"):
            # A store has no place of its own.
            overrides = ["data.path=store"] if path.stem in STORES else []
            config = getattr(compose(f"{group}={path.stem}", *overrides), group)
            assert type(config) is kinds[config.name]
            seen.add(config.name)
        assert seen == set(kinds)


def test_override_reaches_its_field_in_its_type():
    config = compose("optimizer.learning_rate=1", "model.chunk_size=64", "optimizer.clip_norm=null")
    assert config.optimizer.learning_rate == 1.0
    assert type(config.optimizer.learning_rate) is float
    assert config.model.chunk_size == 64
    assert config.optimizer.clip_norm is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "optimizer.lr=1",
            "unknown config key 'optimizer.lr'; did you mean 'optimizer.learning_rate'?",
        ),
        ("trian.steps=5", "unknown config key 'trian.steps'; did you mean 'train.steps'?"),
        ("+trian.steps=5", "unknown config key 'trian'; did you mean 'train'?"),
        ("+train.step=5", "unknown config key 'train.step'; did you mean 'train.steps'?"),
        ("modle=flare", "unknown config key 'modle'; did you mean 'model'?"),
        ("steps=5", "unknown config key 'steps'; did you mean 'train.steps'?"),
        ("foo=1", "unknown config key 'foo'; known are model, data, mesh, optimizer, train"),
        ("mesh.zzz=1", "known are mesh.data, mesh.points, mesh.heads, mesh.cpu_devices"),
        ("model=flar", f"unknown choice model=flar: expected one of {MODEL_CHOICES}"),
        ("optimizer=sgd", "unknown choice optimizer=sgd: expected one of adamw, muon"),
        ("model.n_layers=abc", "model.n_layers=abc: value 'abc' of type 'str' could not be"),
        ("model.n_layers=2.5", "model.n_layers=2.5: value '2.5' of type 'float' could not be"),
        ("model.structured=maybe", "model.structured=maybe: value 'maybe' is not a valid bool"),
        ("train.steps=null", "train.steps=null: field 'train.steps' is not Optional"),
        ("train=3", "train=3: invalid type assigned: int is not a subclass of TrainConfig"),
        ("model.name=flar", f"{MODEL_NAMES}; got 'flar'"),
        ("data.name=stokes", f"{DATA_NAMES}; got 'stokes'"),
        ("data.resolution=${nowhere}", "data.resolution: interpolation key 'nowhere' not found"),
        ("train.steps", "'train.steps' missing EQUAL"),
    ],
)
def test_bad_override_ends_the_command_with_one_line(reached, override, message):
    result = call(train.main, override)
    assert result.code == 2
    assert not reached
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert_one_line(result.err, message)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train=0", "a positive number; got 0"),
        ("data.validation=-1", "a positive number; got -1"),
        ("data.test=0", "a positive number; got 0"),
        ("train.steps=0", "a positive number; got 0"),
        ("train.batch_size=-4", "a positive number; got -4"),
        ("train.checkpoint_every=0", "a positive number; got 0"),
        ("train.keep=0", "a positive number; got 0"),
        ("train.log_every=0", "a positive number; got 0"),
        ("train.loader_threads=-1", "a number of at least 0; got -1"),
        ("train.seed=-1", "an integer in [0, 2**32); got -1"),
        ("train.seed=4294967296", "an integer in [0, 2**32); got 4294967296"),
        ("data.seed=-1", "an integer in [0, 2**32); got -1"),
        ("data.seed=4294967296", "an integer in [0, 2**32); got 4294967296"),
        ("optimizer.learning_rate=0", "a positive number; got 0.0"),
        ("optimizer.learning_rate=nan", "a positive number; got nan"),
        ("model.scale=nan", "a positive number; got nan"),
        ("optimizer.learning_rate=inf", "a positive number; got inf"),
        ("optimizer.adam_learning_rate=-1", "a positive number; got -1.0"),
        ("optimizer.weight_decay=-1", "a number of at least 0; got -1.0"),
        ("optimizer.beta1=1", "a number in [0, 1); got 1.0"),
        ("optimizer.beta2=2", "a number in [0, 1); got 2.0"),
        ("optimizer.clip_norm=-1", "a positive number; got -1.0"),
        ("optimizer.warmup=1", "a number in [0, 1); got 1.0"),
        ("optimizer.final_fraction=-0.1", "a number in [0, 1); got -0.1"),
        ("optimizer.accumulate=0", "a positive number; got 0"),
        ("optimizer.ema_decay=1", "a number in [0, 1); got 1.0"),
        ("optimizer.name=sgd", "one of adamw, muon; got 'sgd'"),
        ("optimizer.schedule=step", "one of one_cycle, cosine, constant; got 'step'"),
        ("model.dtype=float16", "one of float32, bfloat16; got 'float16'"),
        ("model.param_dtype=int8", "one of float32, bfloat16; got 'int8'"),
    ],
)
def test_value_out_of_range_is_named(changed, override, expected):
    with pytest.raises(ValueError, match="expected") as error:
        changed(override)
    assert str(error.value) == f"{override.partition('=')[0]}: expected {expected}"


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.ema_decay=0",
        "optimizer.clip_norm=null",
        "optimizer.warmup=0",
        "optimizer.weight_decay=0",
        "train.loader_threads=0",
        "train.seed=4294967295",
    ],
)
def test_value_at_the_end_of_its_range_is_taken(changed, override):
    changed(override)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.shapes=joukowski", "one of naca, uiuc; got 'joukowski'"),
        ("data.points=0", "a positive number; got 0"),
        ("data.max_points=0", "a positive number; got 0"),
        ("data.surface_points=31", "a number of at least 32; got 31"),
        ("data.angles=0", "a positive number; got 0"),
        ("data.min_angle=-90", "an angle within 90 degrees of 0; got -90.0"),
        ("data.max_angle=nan", "an angle within 90 degrees of 0; got nan"),
    ],
)
def test_airfoil_value_out_of_range_is_named(override, expected):
    config = OmegaConf.structured(compose("data=airfoil"))
    with pytest.raises(ValueError, match="expected") as error:
        configs.typed(OmegaConf.merge(config, OmegaConf.from_dotlist([override])))
    assert str(error.value) == f"{override.partition('=')[0]}: expected {expected}"


def test_full_traceback_is_there_when_asked_for(reached, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train", "train.steps=0"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match=r"train\.steps: expected a positive number"):
        one_line_errors(train.main)
    assert not reached


def test_good_overrides_reach_the_run(reached):
    assert call(train.main, "model.n_layers=1", "mesh=data") == (0, "", "")
    (config,) = reached
    assert config.model.n_layers == 1
    assert config.mesh == schema.MeshConfig(data=-1, points=1)


def test_saved_config_reads_back_equal(tmp_path):
    config = compose(
        "optimizer=adamw", "optimizer.ema_decay=0.99", "model.chunk_size=16", "mesh.cpu_devices=2"
    )
    configs.save(config, tmp_path)
    assert configs.load(tmp_path) == config
    assert [path.name for path in tmp_path.iterdir()] == [configs.CONFIG_FILE]


def test_saved_config_is_resolved(tmp_path):
    configs.save(compose("data.resolution=${train.batch_size}", "train.batch_size=6"), tmp_path)
    saved = OmegaConf.load(tmp_path / configs.CONFIG_FILE)
    assert saved.data.resolution == 6
    assert json.loads(json.dumps(OmegaConf.to_container(saved)))


def test_overrides_change_what_is_loaded(saved):
    folder, _ = saved
    changed = configs.load(folder, ["mesh.points=4", "data.test=7"])
    expected = configs.load(folder)
    expected.mesh.points, expected.data.test = 4, 7
    assert changed == expected


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("n_layers:", "n_layer:", "unknown config key 'model.n_layer'; did you mean 'model.n_lay"),
        ("  steps:", "  stpes:", "unknown config key 'train.stpes'; did you mean 'train.steps'?"),
        ("model:", "foo: 1\nmodel:", "unknown config key 'foo'; known are model, data"),
        ("n_layers: 4", "n_layers: four", "model.n_layers: value 'four' of type 'str'"),
        ("steps: 1000", "steps: -1", "train.steps: expected a positive number; got -1"),
        ("name: flare", "name: flar", f"{MODEL_NAMES}; got 'flar'"),
        ("name: flare", "name: [1]", f"{MODEL_NAMES}; got [1]"),
        (
            "steps: 1000",
            "steps: ${nowhere}",
            "train.steps: expected a value; got the interpolation",
        ),
        ("steps: 1000", "steps: '${'", "expected YAML"),
        ("model:", "model: flare", "expected YAML; got mapping values are not allowed here"),
        ("model:", "model: [", "expected YAML; got while parsing a flow"),
        ("model:", "model: {}\nmodel:", "found duplicate key model"),
    ],
)
def test_damaged_saved_config_is_named(saved, old, new, message):
    folder, text = saved
    assert old in text
    path = folder / configs.CONFIG_FILE
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        configs.load(folder)
    assert_one_line(str(error.value), f"{path}: ", message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a configuration; got an empty file"),
        (b"3\n", "expected YAML; got Invalid loaded object type: int"),
        (b"- a\n- b\n", "expected a mapping; got a list"),
        (b"model: 3\n", "model: expected a mapping; got 3"),
        (b"\xff\xfe\x00", "expected YAML; got 'utf-8' codec can't decode"),
    ],
    ids=["empty", "number", "list", "number_as_group", "binary"],
)
def test_file_that_is_no_config_is_named(tmp_path, content, message):
    path = tmp_path / configs.CONFIG_FILE
    path.write_bytes(content)
    with pytest.raises(ValueError, match="expected") as error:
        configs.load(tmp_path)
    assert_one_line(str(error.value), f"{path}: ", message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mesh.point=4", "unknown config key 'mesh.point'; did you mean 'mesh.points'?"),
        ("model.n_layers=abc", "model.n_layers: value 'abc' of type 'str'"),
        ("mesh.points", "mesh.points: incompatible value 'None' for field of type 'int'"),
        ("model=flare", "model: expected a mapping; got 'flare'"),
        ("mesh.points=[", "mesh.points=[: expected key=value; got while parsing a flow node"),
    ],
)
def test_bad_override_of_a_saved_config_does_not_blame_the_file(saved, override, message):
    folder, _ = saved
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        configs.load(folder, [override])
    assert_one_line(str(error.value), message)
    assert str(folder) not in str(error.value)


def test_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a run's folder with config"):
        configs.load(tmp_path / "nothing")


def test_only_what_changes_the_experiment_is_a_difference(default):
    def changed(group, **values):
        part = dataclasses.replace(getattr(default, group), **values)
        return configs.difference(default, dataclasses.replace(default, **{group: part}))

    assert changed("mesh", points=4, cpu_devices=8) == []
    assert changed("train", log_every=1, keep=9, loader_threads=2, checkpoint_every=9) == []
    assert changed("data", cache_dir="elsewhere") == []
    assert changed("model", n_layers=8) == ["model.n_layers (4 there, 8 here)"]
    assert changed("data", seed=1) == ["data.seed (0 there, 1 here)"]
    assert changed("optimizer", ema_decay=0.5) == ["optimizer.ema_decay (None there, 0.5 here)"]
    assert changed("train", steps=1, batch_size=2) == [
        "train.batch_size (4 there, 2 here)",
        "train.steps (1000 there, 1 here)",
    ]
