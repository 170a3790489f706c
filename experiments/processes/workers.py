"""Many tasks that do not know of each other, in several processes."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any


def in_processes(
    function: Callable[..., Any], tasks: Sequence[tuple], workers: int
) -> Iterator[Any]:
    """`function(*task)` of every task, as they are done.

    Args:
        function: of a module.
        tasks: arguments.
        workers: processes; with one, or for one task, it is done here.
    """
    if workers == 1 or len(tasks) < 2:
        for task in tasks:
            yield function(*task)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(tasks)), mp_context=context) as pool:
        jobs = [pool.submit(function, *task) for task in tasks]
        try:
            for job in as_completed(jobs):
                yield job.result()
        finally:
            pool.shutdown(cancel_futures=True)
