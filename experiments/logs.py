"""What a run tells while it trains: a progress bar, JSON lines and TensorBoard."""

import json
from pathlib import Path

import jax
from tensorboardX import SummaryWriter
from tqdm import tqdm

from experiments.files import write_atomically

LOG_FILE = "log.jsonl"


class RunLog:
    """Progress bar, `log.jsonl` and TensorBoard events of a run; written by the first process."""

    def __init__(self, folder: Path, first_step: int, steps: int, samples_a_step: int):
        """Opens the logs and drops rows after `first_step`, which will be written again.

        Args:
            folder: the run's folder.
            first_step: step from which the run goes on.
            steps: steps of the whole run.
            samples_a_step: samples that a step trains on.
        """
        self._samples = samples_a_step
        self._active, self._failed = jax.process_index() == 0, False
        self._bar = tqdm(
            total=steps * samples_a_step,
            initial=first_step * samples_a_step,
            unit="sample",
            unit_scale=True,
            desc="training",
            disable=not self._active,
            mininterval=0.5,
        )
        if self._active:
            rows = [row for row in read_log(folder) if row["step"] <= first_step]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            write_atomically(folder / LOG_FILE, lambda path: path.write_text(text))
            self._file = (folder / LOG_FILE).open("a")
            self._events = SummaryWriter(
                str(folder / "tensorboard"), purge_step=first_step + 1, write_to_disk=True
            )

    def advance(self) -> None:
        """Counts a step on the progress bar."""
        self._bar.update(self._samples)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes a row of values at a step."""
        if not self._active:
            return
        if "loss" in values:
            self._bar.set_postfix_str(f"loss {values['loss']:.4f}", refresh=False)
        try:
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            # The disk is full, say; training is worth more than its log.
            if not self._failed:
                self._bar.write(f"{self._file.name}: could not be written: {error.strerror}")
            self._failed = True
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes everything."""
        self._bar.close()
        if self._active:
            self._file.close()
            self._events.close()


def read_log(folder: Path) -> list[dict]:
    """The rows of `log.jsonl`; a last one that a kill cut short is left out."""
    path = folder / LOG_FILE
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
