"""What a run tells while it trains: a progress bar, JSON lines and TensorBoard."""

import json
import socket
import time
from pathlib import Path

import jax
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import scalar
from tqdm import tqdm

from experiments.files import write_text

LOG_FILE = "log.jsonl"
# Seconds between two times that the events of TensorBoard reach the disk.
_FLUSHED = 30.0


def say(text: str) -> None:
    """Prints a line, once where several processes run."""
    if jax.process_index() == 0:
        print(text, flush=True)


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
            write_text(folder / LOG_FILE, text)
            self._file = (folder / LOG_FILE).open("a")
            self._events = _Events(folder / "tensorboard", first_step + 1)

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
            self._events.write(step, values)
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        """Tells once of a disk that is full, say; training is worth more than its log."""
        if not self._failed:
            self._bar.write(f"{self._file.name}: could not be written: {error.strerror}")
        self._failed = True

    def close(self) -> None:
        """Flushes and closes everything."""
        self._bar.close()
        if self._active:
            for each in (self._file, self._events):
                try:
                    each.close()
                except OSError as error:
                    self._tell(error)


class _Events:
    """Scalars for TensorBoard.

    The writer that tensorboardX has for them writes in a thread, which a full disk ends, and for
    which a run would wait from then on.
    """

    def __init__(self, folder: Path, first_step: int):
        """Opens a file in which what others hold of `first_step` and later is void."""
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
        self._writer = RecordWriter(str(folder / name))
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))
        self._flushed = float("-inf")

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes the values of a step."""
        for name, value in values.items():
            self._add(Event(step=step, summary=scalar(name, value)))
        if time.monotonic() > self._flushed + _FLUSHED:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()


def read_log(folder: Path) -> list[dict]:
    """The rows of `log.jsonl`; a last one that a kill cut short is left out."""
    path = folder / LOG_FILE
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            break
        rows.append(row)
    return rows
