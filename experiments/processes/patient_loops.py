"""Event loops that outlive a failure: what runs beside it ends before they close.

Where TensorStore cannot read one array of a checkpoint, Orbax lets the error through while it reads
the others; their ends then find the loop closed, and print a traceback each (Orbax 0.12.8).
"""

import asyncio
import contextlib
from collections.abc import Iterator


class _PatientLoop(asyncio.SelectorEventLoop):
    def close(self) -> None:
        """Waits for all tasks, whatever they end with."""
        tasks = [] if self.is_closed() else asyncio.all_tasks(self)
        if tasks:
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """One that is patient."""
        return _PatientLoop()


@contextlib.contextmanager
def patient_loops() -> Iterator[None]:
    """Event loops that are made within are patient."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_Policy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)
