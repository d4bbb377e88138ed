"""The trajectories that this instance has claimed for one job: their leases are kept, and they are given back in order."""

import asyncio
from collections.abc import Iterator, Sequence

import anyio
from structlog.typing import FilteringBoundLogger

from libs.common.errors import JigsawError, StaleEpochError
from libs.common.group_commit import GroupCommit
from libs.common.store import Claim, Release, Renew, TrajectoryStore, Write
from services.rollout.engine_link import EngineLink
from services.rollout.runner import Lost, Trajectory


class Leases:
    """What is running here, by its key on the engine.

    Args:
        ttl_s: life of a lease without renewal.
    """

    def __init__(
        self, store: TrajectoryStore, *, commits: GroupCommit, engine: EngineLink, ttl_s: float, log: FilteringBoundLogger
    ) -> None:
        self._store, self._commits, self._engine, self._ttl_s, self._log = store, commits, engine, ttl_s, log
        self._held: dict[str, Trajectory] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(list(self._held.values()))

    def get(self, key: str) -> Trajectory | None:
        """The trajectory with this key, if it is still held."""
        return self._held.get(key)

    def add(self, trajectory: Trajectory) -> None:
        """Keep the lease of a trajectory that was claimed just now."""
        for held in self:
            if held.id == trajectory.id:  # this instance lost it and has claimed it again
                held.fail_turn(Lost("claimed anew"))
        self._held[trajectory.key] = trajectory

    def remove(self, trajectory: Trajectory) -> None:
        """It has ended, or is somebody else's now."""
        self._held.pop(trajectory.key, None)

    def fail_turns(self, error: JigsawError) -> None:
        """The turns in progress can't end: the engine is gone."""
        for trajectory in self:
            trajectory.fail_turn(error)

    async def renew(self) -> None:
        """Renew the leases until cancelled."""
        while True:
            await anyio.sleep(self._ttl_s / 3)
            held = list(self)
            if held:
                ttl_ms = int(self._ttl_s * 1000)
                writes = [Renew(trajectory.id, trajectory.claim.epoch, ttl_ms) for trajectory in held]
                for trajectory, answer in zip(held, await self._store.write(writes), strict=True):
                    if isinstance(answer, StaleEpochError):
                        trajectory.fail_turn(Lost(str(answer)))

    async def hand_back(self) -> Sequence[Claim]:
        """Stop what is running at a step boundary and release it with every token that it has; returns what that was."""
        held = list(self)
        if not held:
            return []
        await self._engine.drop([trajectory.key for trajectory in held])
        writes: list[Write] = []
        for trajectory in held:
            writes += trajectory.checkpoint()
            writes.append(Release(trajectory.id, trajectory.claim.epoch))
        await asyncio.gather(*self._commits.put(writes))
        for trajectory in held:
            trajectory.fail_turn(Lost("handed back"))
        self._log.info("handed_back", trajectories=len(held))
        return [trajectory.claim for trajectory in held]
