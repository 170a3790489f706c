"""Event loops that wait for what runs beside a failure."""

import asyncio

import pytest

from experiments.processes.patient_loops import patient_loops


def test_what_runs_beside_a_failure_ends_before_the_loop_closes():
    ended = []

    async def fail():
        raise ValueError("the first")

    async def go_on(number):
        await asyncio.sleep(0.01 * number)
        ended.append(number)
        if number == 2:
            raise ValueError("another, that nobody retrieves")

    async def read():
        await asyncio.gather(fail(), *(go_on(number) for number in (1, 2, 3)))

    with patient_loops():
        loop = asyncio.new_event_loop()
    with pytest.raises(ValueError, match="the first"):
        loop.run_until_complete(read())
    loop.close()
    assert ended == [1, 2, 3]
    assert loop.is_closed()
    other = asyncio.new_event_loop()
    other.close()
    assert type(other) is not type(loop)
