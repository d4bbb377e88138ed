"""The node's workers, what can be asked of them, and the messages that nobody could process."""

import time
from typing import Annotated

import anyio
import typer

from libs.cli import options, render
from libs.cli.follow import connected, find_job
from libs.common.errors import JigsawError
from libs.common.messages import DeadLetter, Drain, Leadership, ReleaseTrajectories, Worker
from libs.common.subjects import LEADER_KEY

DRAIN_S = 30.0


def workers(
    *, json: options.Json = False, home: options.Home = None, url: options.Url = None, redis_url: options.RedisUrl = None
) -> None:
    """List the rollout and trainer instances that announce themselves, with the device that each computes on.

    Also says which scheduler leads.

    Example: jigsaw workers
    """

    async def run() -> None:
        async with connected(options.locate(home, url, redis_url)) as bus:
            found = sorted((await (await bus.table(Worker)).all()).values(), key=lambda worker: worker.sender)
            leader = await (await bus.table(Leadership)).get(LEADER_KEY)
        if json:
            render.print_json({"workers": found, "scheduler": leader})
            return
        columns = ("worker", "role", "device", "units", "memory", "state", "up for", "jobs")
        render.print_rows(columns, [_row(worker) for worker in found], empty="no workers")
        render.say(f"{leader.sender} leads" if leader is not None and leader.held else "no scheduler leads")

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


def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="A rollout or trainer instance: see `jigsaw workers`.")],
    *,
    undo: Annotated[bool, typer.Option("--undo", help="Let it take work again.")] = False,
    home: options.Home = None,
    url: options.Url = None,
    redis_url: options.RedisUrl = None,
) -> None:
    """Make a worker give back everything that it runs, and take nothing more until --undo.

    Its trajectories go on elsewhere from their last token. Use it before you stop a worker for good.

    Example: jigsaw drain rollout-1
    """

    async def run() -> None:
        async with connected(options.locate(home, url, redis_url)) as bus:
            answer = await bus.request(worker, Drain(sender=options.instance_id(), undo=undo), timeout_s=DRAIN_S)
        if undo:
            render.say(f"{worker} takes work again")
        else:
            render.say(f"{worker} is drained; it held {answer.count} job{'' if answer.count == 1 else 's'}")

    anyio.run(run)


def migrate(
    job: options.JobRef,
    *,
    source: Annotated[str, typer.Option("--from", metavar="WORKER", help="Rollout instance that lets go.")],
    target: Annotated[str, typer.Option("--to", metavar="WORKER", help="Rollout instance that goes on with them.")] = "",
    count: Annotated[int, typer.Option(min=1, help="At most so many trajectories.")] = 1_000_000,
    home: options.Home = None,
    url: options.Url = None,
    redis_url: options.RedisUrl = None,
) -> None:
    """Move running trajectories of a job from one rollout worker to another, or to any that has room.

    Nothing is generated twice: the target computes the KV cache of what there is and goes on.

    Example: jigsaw migrate demo-products --from rollout-0 --to rollout-1 --count 4
    """

    async def run() -> None:
        async with connected(options.locate(home, url, redis_url)) as bus:
            uid = (await find_job(bus, job)).job_uid
            request = ReleaseTrajectories(sender=options.instance_id(), job_uid=uid, target=target, count=count)
            answer = await bus.request(source, request, timeout_s=DRAIN_S)
        render.say(f"{source} let go of {answer.count} trajectories")

    anyio.run(run)


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
                await bus.replay(letter)
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
