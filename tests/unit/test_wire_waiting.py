"""Waiting with a limit: results, lateness, and a cancellation that comes at the very moment the work ends."""

from __future__ import annotations

import asyncio

import pytest

from kvstore_wire.waiting import acquired_within, within


async def _returns(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def test_a_result_in_time_is_returned() -> None:
    assert await within(5, _returns(7)) == 7
    assert await within(None, _returns(8)) == 8


async def test_an_error_of_the_work_is_the_caller_s() -> None:
    async def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await within(5, fails())


async def test_late_work_is_cancelled() -> None:
    ended = asyncio.Event()

    async def never() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    with pytest.raises(asyncio.TimeoutError):
        await within(0.001, never())
    await asyncio.wait_for(ended.wait(), 5)


@pytest.mark.parametrize("steps", range(6))
async def test_a_cancellation_is_never_lost(steps: int) -> None:
    """Whatever the loop was about when it came."""

    async def loops() -> None:
        while True:
            await within(5, _returns(1))

    task = asyncio.ensure_future(loops())
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    finished, _ = await asyncio.wait({task}, timeout=5)
    assert task in finished, "the cancellation was lost"
    assert task.cancelled()


async def test_slots_are_taken_and_waited_for() -> None:
    slots = asyncio.Semaphore(1)
    assert await acquired_within(None, slots)
    assert not await acquired_within(0.001, slots)
    waiting = asyncio.ensure_future(acquired_within(5, slots))
    await asyncio.sleep(0)
    slots.release()
    assert await waiting
    assert slots.locked()


@pytest.mark.parametrize("steps", range(6))
async def test_a_slot_that_comes_with_a_cancellation_goes_back(steps: int) -> None:
    slots = asyncio.Semaphore(1)
    assert await acquired_within(None, slots)
    waiting = asyncio.ensure_future(acquired_within(5, slots))
    await asyncio.sleep(0)
    slots.release()
    for _ in range(steps):
        await asyncio.sleep(0)
    if waiting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        assert waiting.result()
        slots.release()
    assert await acquired_within(5, slots), "the slot was lost"
