"""Holding a job: one trainer does at a time, by an incarnation that only grows; one that was replaced finds out here."""

from typing import Self

import anyio

from libs.common import messages as m
from libs.common.errors import JigsawError, StaleEpochError
from libs.common.service import Context
from services.trainer.checkpoints import Checkpoints


class Superseded(JigsawError):
    """Another trainer holds this job now, or the job has ended; this one ends without a word."""

    def __init__(self, job_uid: str) -> None:
        super().__init__(f"job {job_uid} has ended or is held by another trainer")


class Hold:
    """One life of a trainer holds a job.

    Args:
        incarnation: of this life; part of everything that it publishes.
    """

    def __init__(self, context: Context, job_uid: str, *, incarnation: int) -> None:
        self._context, self.job_uid, self.incarnation = context, job_uid, incarnation

    @classmethod
    async def take(cls, context: Context, job_uid: str, *, before: "Hold | None") -> Self:
        """Take a job, from whoever had it, or, if this trainer had a life ``before``, only from that one.

        Raises:
            Superseded: another trainer has taken it meanwhile.
        """
        owner, above = context.instance, await _latest_incarnation(context, job_uid)
        try:
            incarnation = await context.store.hold_job(job_uid, owner=owner, above=above, still=before is not None)
        except StaleEpochError:
            raise Superseded(job_uid) from None
        return cls(context, job_uid, incarnation=incarnation)

    async def require(self) -> None:
        """A trainer that was frozen and replaced must not touch what its successor needs.

        Raises:
            Superseded: another one holds the job, or the job has ended.
        """
        if await self._context.store.holder(self.job_uid) != self.incarnation:
            raise Superseded(self.job_uid)


async def _latest_incarnation(context: Context, job_uid: str) -> int:
    """The latest incarnation that has left something where the trajectory store's losses don't reach; 0 if none has."""
    pointer = await (await context.bus.table(m.PolicyPublished)).get(job_uid)
    checkpoints = Checkpoints.of(context.settings.job_folder(job_uid))
    versions = await anyio.to_thread.run_sync(checkpoints.versions)
    return max([version.incarnation for version in versions] + ([pointer.version.incarnation] if pointer else []), default=0)
