"""`python -m experiments.train`: trains the experiment that a configuration describes.

Started again in the folder of a run, it goes on where the run stopped.
"""

import contextlib
import signal
import sys
from pathlib import Path
from typing import Any

import hydra
import jax
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from experiments.building import make_device_mesh
from experiments.cli import one_line_errors
from experiments.configuration import configs
from experiments.configuration.errors import explain, known_keys
from experiments.configuration.schema import ExperimentConfig
from experiments.data.dataset import Dataset
from experiments.datasets import load_dataset
from experiments.processes.coordination import first_then_others
from experiments.processes.distributed import together
from experiments.processes.signals import StopSignals
from experiments.training.faults import only_run_in
from experiments.training.logs import LOG_FILE
from experiments.training.run import TrainingRun
from experiments.training.summary import finish


def train(config: ExperimentConfig, folder: Path) -> dict[str, Any] | None:
    """Trains a run, or what is left of it, and writes its results into its folder.

    Args:
        config: the experiment.
        folder: the run's folder; made if it is not there.

    Returns:
        The summary that is also in `summary.json`; `None` if a signal stopped the run before its
        end.

    Raises:
        ValueError: the folder holds another experiment, or the configuration does not fit the
            data or the devices.
        ConnectionError: another process has ended.
    """
    with together(config.distributed):
        return _train(config, folder)


def _train(config: ExperimentConfig, folder: Path) -> dict[str, Any] | None:
    mesh = make_device_mesh(config.mesh)
    dataset = load_dataset(config.data)
    with contextlib.ExitStack() as held, jax.set_mesh(mesh), StopSignals() as signals:

        def enter() -> None:
            held.enter_context(only_run_in(folder))
            _claim(folder, config, dataset)

        first_then_others(enter)
        run = TrainingRun(config, folder, dataset, mesh)
        try:
            if not run.advance(signals):
                return None
            summary = finish(run)
            run.require_saved()
            return summary
        finally:
            run.checkpoints.close()


def _claim(folder: Path, config: ExperimentConfig, dataset: Dataset) -> None:
    """Writes configuration and description into the folder, or checks the one that is there."""
    written = (folder / configs.CONFIG_FILE).is_file()
    # Other processes meet what the first one has just written.
    if written and (jax.process_index() or _has_begun(folder)):
        changed = configs.difference(configs.load(folder), config)
        if changed:
            raise ValueError(
                f"{folder}: holds a run with another configuration: {', '.join(changed)}; choose "
                "another folder (hydra.run.dir=FOLDER) or delete this one"
            )
        return
    if jax.process_index():
        raise ValueError(
            f"{folder}: expected the folder of the first process, shared by all; got another one"
        )
    folder.mkdir(parents=True, exist_ok=True)
    dataset.description.save(folder)
    configs.save(config, folder)


def _has_begun(folder: Path) -> bool:
    """Whether a run took a step, or was given weights; not if it was refused at its start."""
    return (folder / LOG_FILE).exists() or any((folder / "checkpoints").glob("[0-9]*"))


def main() -> int:
    """The command: composes the configuration, trains, and gives the exit code."""
    configs.register_schemas()
    code, failure = 0, None

    @hydra.main(version_base="1.3", config_path=str(configs.CONFIG_DIR), config_name="config")
    def job(config: DictConfig) -> None:
        nonlocal code, failure
        folder = _relative(Path(HydraConfig.get().runtime.output_dir))
        try:
            if train(configs.typed(config), folder) is None:
                code = 128 + signal.SIGTERM
        except (ValueError, OSError) as error:
            # Hydra would print a line of its own before it hands an error on.
            failure = failure or error

    try:
        job()
    except (HydraException, OmegaConfBaseException) as error:
        overrides = [argument for argument in sys.argv[1:] if "=" in argument]
        with hydra.initialize_config_dir(str(configs.CONFIG_DIR), version_base="1.3"):
            known = known_keys(overrides)
        raise ValueError(explain(error, known)) from error
    except OSError as error:
        # Hydra makes the folder before it hands over; some of its own errors are of this kind too.
        raise ValueError(
            f"hydra.run.dir: expected a folder that can be made; got {error.filename} "
            f"({error.strerror})"
        ) from error
    if failure is not None:
        raise failure
    return code


def _relative(folder: Path) -> Path:
    """A folder as a user would name it: relative to where the program was started, if below."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


if __name__ == "__main__":
    one_line_errors(main)
