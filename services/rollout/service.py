"""The rollout service: runs one :class:`JobRuntime` for each job that it holds an allocation for."""

from pathlib import Path

import anyio

from libs.common import messages as m
from libs.common.holdings import Holdings
from libs.common.policy_store import PolicyStore
from libs.common.service import Context, heartbeat
from services.rollout.job_runtime import JobRuntime


async def serve(context: Context) -> None:
    """Run until told to stop, then give everything back."""
    settings = context.settings
    policies = PolicyStore(settings.policies, mirror=Path(settings.home) / "mirror")

    def make(record: m.JobRecord) -> JobRuntime:
        return JobRuntime(context, record, policies)

    holdings = Holdings(context, m.Role.ROLLOUT, max_units=settings.rollout.max_units, make=make)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(heartbeat, context, holdings.presence)
        tasks.start_soon(holdings.follow, tasks)
        await context.stopping.wait()
        await holdings.close()
        tasks.cancel_scope.cancel()
