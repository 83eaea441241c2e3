"""The token that puts prefills into trace order."""

from __future__ import annotations

import asyncio

from kvstore.replay.turns import Turn


async def test_turns_come_in_the_order_of_the_calls() -> None:
    turn, order = Turn(inbox=None, outbox=None, first=True), list[int]()

    async def work(number: int) -> None:
        await turn.take()
        order.append(number)
        await asyncio.sleep(0)
        turn.pass_on()

    await asyncio.gather(*(work(number) for number in range(5)))
    assert order == [0, 1, 2, 3, 4]


async def test_a_cancelled_call_is_passed_over_and_keeps_no_token() -> None:
    turn = Turn(inbox=None, outbox=None, first=True)
    await turn.take()
    gone, next_in_line = (asyncio.ensure_future(turn.take()) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    turn.pass_on()
    await asyncio.wait_for(next_in_line, 5)
    turn.pass_on()
    await asyncio.wait_for(turn.take(), 5)
