"""Signals as a request to stop, at a step of the loop's choice."""

import signal
from types import FrameType
from typing import Any


class StopSignals:
    """Remembers SIGTERM and SIGINT, so that a loop can end at a step of its choice.

    A second SIGINT interrupts at once.

    Attributes:
        received: number of the signal that came, or `None`.
    """

    def __init__(self) -> None:
        """Nothing has come."""
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        """Starts to listen."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.received = number

    def __exit__(self, *error: object) -> None:
        """Gives the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
