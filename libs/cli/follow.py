"""Following jobs: their records and their progress, as they change."""

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager

import anyio

from libs.cli.options import Target, instance_id, latest_uid
from libs.cli.summary import JobSummary, summaries
from libs.common.bus import Bus
from libs.common.errors import NodeError
from libs.common.logging import configure
from libs.common.messages import JobProgress, JobRecord

REFRESH_S = 0.2
CONNECT_S = 3.0
SET_UP_S = 5.0

Show = Callable[[Sequence[JobSummary]], None]


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[Bus]:
    """The node's bus.

    Raises:
        NodeError: it doesn't answer, or isn't JigsawRL's.
    """
    instance = instance_id()
    log = configure(instance=instance, level="error")
    bus = await Bus.connect(target.nats_url, instance=instance, log=log, patience_s=CONNECT_S)
    try:
        await bus.wait_until_set_up(SET_UP_S)
        yield bus
    finally:
        with anyio.CancelScope(shield=True):
            await bus.close()


async def all_jobs(bus: Bus) -> tuple[dict[str, JobRecord], dict[str, JobProgress]]:
    """Records and progress of all jobs that the node knows."""
    records, progress = await bus.table(JobRecord), await bus.table(JobProgress)
    return await records.all(), await progress.all()


async def find_job(bus: Bus, reference: str) -> JobRecord:
    """The job that the user means.

    Raises:
        JigsawError: there is none, or more than one.
    """
    records, _ = await all_jobs(bus)
    ordered = [job.uid for job in summaries(records, {})]
    return records[latest_uid(reference, ordered)]


async def follow(bus: Bus, wanted: Collection[str], show: Show) -> list[JobSummary]:
    """Show the wanted jobs (none: all there are and will be) whenever they change, until every wanted one has ended."""
    records: dict[str, JobRecord] = {}
    progress: dict[str, JobProgress] = {}
    changed = anyio.Event()

    def current() -> list[JobSummary]:
        return [job for job in summaries(records, progress) if not wanted or job.uid in wanted]

    async def watch_records() -> None:
        async for change in (await bus.table(JobRecord)).watch():
            if change.value is not None:
                records[change.key] = change.value
            changed.set()

    async def watch_progress() -> None:
        async for change in (await bus.table(JobProgress)).watch():
            if change.value is not None:
                progress[change.key] = change.value
            changed.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch_records)
        tasks.start_soon(watch_progress)
        while not (wanted and _all_ended(current(), wanted)):
            await changed.wait()
            changed = anyio.Event()
            await anyio.sleep(REFRESH_S)  # several changes are shown as one
            show(current())
        tasks.cancel_scope.cancel()
    jobs = [job for job in summaries(*await all_jobs(bus)) if job.uid in wanted]  # both tables as they are at the end
    show(jobs)
    return jobs


async def wait_until_accepted(bus: Bus, uid: str, *, timeout_s: float) -> JobRecord:
    """The job's record, once the scheduler has put it.

    Raises:
        NodeError: not within the time.
    """
    with anyio.move_on_after(timeout_s):
        async for change in (await bus.table(JobRecord)).watch(uid):
            if change.value is not None:
                return change.value
    raise NodeError(f"no scheduler has accepted {uid} within {timeout_s:.0f} s; it stays queued on the bus")


def _all_ended(jobs: Sequence[JobSummary], wanted: Collection[str]) -> bool:
    return len(jobs) == len(wanted) and all(job.ended_at is not None for job in jobs)
