"""How trajectories leave this instance unharmed: to another one that is named, or to whoever has room."""

import anyio
from structlog.typing import FilteringBoundLogger

from libs.common import messages as m
from libs.common.errors import NodeError
from libs.common.service import Context
from libs.common.trajectory import Claim
from services.rollout.engine_link import EngineLink
from services.rollout.leases import ADOPT_S, Leases, Released

HAND_BACK_S = 10.0


class Handover:
    """Of one job's trajectories."""

    def __init__(
        self, context: Context, job_uid: str, *, leases: Leases, engine: EngineLink, log: FilteringBoundLogger
    ) -> None:
        self._context, self._uid, self._leases, self._engine, self._log = context, job_uid, leases, engine, log

    async def release(self, count: int, *, target: str) -> int:
        """Let go of trajectories, to an instance or ("") to whoever has room; returns of how many.

        An instance that doesn't answer doesn't matter: their leases run out, and they are announced again.
        """
        released = await self._leases.let_go(self._leases.cheapest(count), to=target)
        if not target:
            await self._context.bus.publish_all([self.task(one) for one in released])
        elif released:
            offers = [m.Offer(one.spec.id.group, one.spec.id.sample, one.epoch) for one in released]
            offer = m.AdoptTrajectories(sender=self._context.instance, job_uid=self._uid, offers=offers)
            try:
                await self._context.bus.request(target, offer, timeout_s=ADOPT_S)
            except NodeError as error:
                self._log.warning("not_adopted", trajectories=len(offers), reason=str(error))
        return len(released)

    async def hand_back(self, *, announce: bool = True) -> None:
        """Give back everything, and tell others that it waits."""
        with anyio.move_on_after(HAND_BACK_S, shield=True) as limit:
            released = await self._leases.let_go(list(self._leases))
            if announce:
                await self._context.bus.publish_all([self.task(one) for one in released])
        if limit.cancelled_caught:
            self._log.warning("not_handed_back", trajectories=len(self._leases))
            self._leases.lose_all("engine or store didn't answer in time")

    def task(self, one: Claim | Released) -> m.StartRollout:
        """The announcement of a trajectory; the claim's epoch numbers it."""
        return m.StartRollout(
            sender=self._context.instance,
            job_uid=self._uid,
            step=one.spec.step,
            group=one.spec.id.group,
            sample=one.spec.id.sample,
            policy=self._engine.version,
            attempt=one.epoch,
        )
