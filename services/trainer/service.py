"""The trainer service: runs the step loop of each job that it holds an allocation for."""

from pathlib import Path

import anyio

from libs.common import messages as m
from libs.common.holdings import Holdings
from libs.common.policy_store import PolicyStore
from libs.common.service import Context
from services.trainer.held_job import HeldJob
from services.trainer.leftovers import delete_leftovers


async def serve(context: Context) -> None:
    """Run until told to stop; a job that is cut short goes on elsewhere, or here after a restart."""
    settings = context.settings
    policies = PolicyStore(settings.policies, mirror=Path(settings.home) / "mirror" / context.instance)

    def make(record: m.JobRecord) -> HeldJob:
        return HeldJob(context, record, policies)

    holdings = Holdings(context, m.Role.TRAINER, max_units=len(settings.device.cores), make=make)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tidy, context, policies)
        await holdings.run()
        tasks.cancel_scope.cancel()


async def tidy(context: Context, policies: PolicyStore) -> None:
    """Delete what nobody needs of jobs that have ended: policy versions and what was half-written; the rest stays."""
    table = await context.bus.table(m.JobRecord)
    async for change in table.watch():
        if change.value is None or change.value.state is m.JobState.ENDED:
            await anyio.to_thread.run_sync(policies.forget, change.key)
            await anyio.to_thread.run_sync(delete_leftovers, context.settings.job_folder(change.key))
