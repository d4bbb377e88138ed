"""``jigsaw workers`` and ``dead-letters``: the node's workers, and the messages that nobody could process."""

import time
from typing import Annotated

import anyio
import typer

from libs.cli import options, render
from libs.cli.follow import connected
from libs.common.errors import JigsawError
from libs.common.messages import DeadLetter, Worker


def workers(
    *, json: options.Json = False, home: options.Home = None, url: options.Url = None, redis_url: options.RedisUrl = None
) -> None:
    """List the rollout and trainer instances that announce themselves, with the device that each computes on.

    Example: jigsaw workers
    """

    async def run() -> None:
        async with connected(options.locate(home, url, redis_url)) as bus:
            found = sorted((await (await bus.table(Worker)).all()).values(), key=lambda worker: worker.sender)
        if json:
            render.print_json({"workers": found})
            return
        columns = ("worker", "role", "device", "units", "memory", "state", "up for", "jobs")
        render.print_rows(columns, [_row(worker) for worker in found], empty="no workers")

    anyio.run(run)


def _row(worker: Worker) -> list[str]:
    return [
        worker.sender,
        worker.role.value,
        worker.device,
        f"up to {worker.max_units} of {worker.units}",
        f"{worker.memory_mb / 1024:.1f} GB",
        "draining" if worker.draining else "ready",
        f"{max(0.0, time.time() - worker.started_at):.0f} s",
        ", ".join(worker.revisions),
    ]


def dead_letters(
    *,
    replay: Annotated[
        int | None, typer.Option(min=1, help="Publish the letter with this number on its subject again.", metavar="NUMBER")
    ] = None,
    json: options.Json = False,
    home: options.Home = None,
    url: options.Url = None,
    redis_url: options.RedisUrl = None,
) -> None:
    """List messages that couldn't be processed, with the reason; or replay one.

    Example: jigsaw dead-letters --replay 1
    """

    async def run() -> None:
        async with connected(options.locate(home, url, redis_url)) as bus:
            letters = await bus.history(DeadLetter)
            if replay is not None:
                if replay > len(letters):
                    raise JigsawError(f"there are {len(letters)} dead letters, so no number {replay}")
                letter = letters[replay - 1]
                await bus.client.jetstream().publish(letter.subject, letter.payload)
                render.say(f"replayed number {replay} on {letter.subject}")
                return
        if json:
            render.print_json({"dead_letters": letters})
            return
        rows = [
            [str(index), time.strftime("%F %T", time.localtime(letter.died_at)), letter.subject, letter.reason]
            for index, letter in enumerate(letters, start=1)
        ]
        render.print_rows(("number", "died", "subject", "reason"), rows, empty="no dead letters")

    anyio.run(run)
