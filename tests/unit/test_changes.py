"""Waiting for a condition without polling."""

import anyio

from libs.common.changes import Changes


async def test_a_waiter_looks_again_at_every_change_and_goes_on_when_it_holds() -> None:
    changes, seen, looked = Changes(), list[int](), 0

    def enough() -> bool:
        nonlocal looked
        looked += 1
        return len(seen) >= 2

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(changes.until, enough)
        for value in range(2):
            await anyio.wait_all_tasks_blocked()
            seen.append(value)
            changes.notify()
    assert looked == 3


async def test_what_holds_already_is_not_waited_for() -> None:
    await Changes().until(lambda: True)
