"""Work that is begun at once: what ends without a wait, and what goes on after one."""

import asyncio

import pytest
from loralane_router.gateway.begun import Begun


async def test_what_waits_for_nothing_has_ended_and_gives_its_result():
    async def work() -> int:
        return 3

    begun = Begun(work())

    assert not begun.waits
    assert await begun == 3


async def test_what_fails_at_once_fails_where_it_is_begun():
    async def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Begun(work())


async def test_what_waits_goes_on_when_it_is_awaited():
    order = []
    may_go_on = asyncio.get_running_loop().create_future()

    async def work() -> str:
        order.append("begun")
        got = await may_go_on
        await asyncio.sleep(0)
        order.append("ended")
        return got

    begun = Begun(work())
    order.append("made")
    may_go_on.set_result("here")

    assert begun.waits
    assert await begun == "here"
    assert not begun.waits
    assert order == ["begun", "made", "ended"]


async def test_what_fails_after_a_wait_fails_where_it_is_awaited():
    async def work() -> None:
        await asyncio.sleep(0)
        raise ValueError("late")

    begun = Begun(work())

    with pytest.raises(ValueError, match="late"):
        await begun


async def test_a_cancellation_reaches_what_waits_which_may_clean_up_first():
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    async def hold() -> None:
        await Begun(work())

    task = asyncio.create_task(hold())
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == [True]


async def test_work_may_answer_a_cancellation_with_a_result():
    async def work() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "kept"
        return "never"

    async def hold() -> str:
        return await Begun(work())

    task = asyncio.create_task(hold())
    await asyncio.sleep(0)
    task.cancel()

    assert await task == "kept"
