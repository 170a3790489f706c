"""The step at which all processes stop, agreed on between them."""

import math
import time

import jax
import numpy as np

from experiments.processes.signals import StopSignals

# Seconds between two looks at the signals of all processes; clusters give half a minute.
_SECONDS_TO_AGREE = 2.0


class Agreement:
    """Has all processes stop at one step, whichever of them a signal reaches, and when.

    The signals of all are put together by an exchange between the hosts, which waits for the
    devices. It takes place where the loss is read or a checkpoint is due, when the host waits
    anyway, and in between as often as two seconds go by, but not at every step (unless one takes
    that long, when the wait does not count): a cluster that takes its hosts back gives half a
    minute or more. When that is, in steps, is agreed on in the same exchange.
    """

    def __init__(self, signals: StopSignals, step: int) -> None:
        """Begins at a step.

        Args:
            signals: of this process.
            step: the last step that was taken.
        """
        self._signals = signals
        self._step, self._next, self._time = step, step, time.monotonic()

    def received(self, step: int, *, waits: bool) -> int | None:
        """The signal by which all processes are to stop at a step, or `None`.

        Args:
            step: the step that was just taken; all processes call this at every step.
            waits: whether the host waits for this step anyway.
        """
        if not jax.distributed.is_initialized():
            return self._signals.received
        if not waits and step < self._next:
            return None
        from jax.experimental import multihost_utils

        now = time.monotonic()
        seconds = (now - self._time) / (step - self._step)
        # A few steps say little of the next: at most twice as many go by as did before.
        most = min(10_000, 2 * (step - self._step))
        steps = min(most, max(1, math.floor(_SECONDS_TO_AGREE / max(seconds, 1e-6))))
        own = np.array([self._signals.received or 0, steps], np.int32)
        signal, steps = multihost_utils.process_allgather(own).max(0).tolist()
        self._step, self._next, self._time = step, step + steps, now
        return signal or None
