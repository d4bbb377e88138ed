"""The rollout service: runs one :class:`JobRuntime` for each job that it holds an allocation for."""

from pathlib import Path

from libs.common import messages as m
from libs.common.errors import NodeError
from libs.common.holdings import Holdings
from libs.common.policy_store import PolicyStore
from libs.common.service import Context
from services.rollout.job_runtime import JobRuntime


async def serve(context: Context) -> None:
    """Run until told to stop, then give everything back."""
    settings = context.settings
    policies = PolicyStore(settings.policies, mirror=Path(settings.home) / "mirror" / context.instance)

    def make(record: m.JobRecord) -> JobRuntime:
        return JobRuntime(context, record, policies)

    holdings = Holdings(context, m.Role.ROLLOUT, max_units=settings.rollout.max_units, make=make)

    def runtime(job_uid: str) -> JobRuntime:
        held = holdings.held(job_uid)
        if held is None:
            raise NodeError(f"{context.instance} doesn't hold {job_uid}")
        return held

    async def release(request: m.ReleaseTrajectories) -> m.Answer:
        count = await runtime(request.job_uid).release(request.count, target=request.target)
        return m.Answer(sender=context.instance, count=count)

    async def adopt(request: m.AdoptTrajectories) -> m.Answer:
        count = await runtime(request.job_uid).adopt(request.offers)
        return m.Answer(sender=context.instance, count=count)

    await context.endpoints.answer(m.ReleaseTrajectories, release)
    await context.endpoints.answer(m.AdoptTrajectories, adopt)
    await holdings.run()
