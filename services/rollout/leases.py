"""The trajectories that this instance has claimed for one job: their leases are kept, and they are given back in order."""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial

import anyio
import msgspec
from structlog.typing import FilteringBoundLogger

from libs.common.errors import StaleEpochError
from libs.common.group_commit import Answer, GroupCommit
from libs.common.store import TrajectoryStore
from libs.common.trajectory import Release, Renew, TrajectorySpec, Transfer
from services.rollout.engine_link import EngineLink
from services.rollout.runner import EngineLost, Trajectory

ADOPT_S = 2.0
"""How long a trajectory that was handed over waits for its new owner before anyone may claim it."""


class Released(msgspec.Struct, frozen=True):
    """A trajectory that was let go, and the epoch that it has now."""

    spec: TrajectorySpec
    epoch: int


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
        self._storing: set[str] = set()

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
            if held.id == trajectory.id:
                held.lose("this instance lost it, and has claimed it again")
        self._held[trajectory.key] = trajectory

    @property
    def any_suspect(self) -> bool:
        """Whether one is held that must run alone: nothing may be added."""
        return any(held.claim.alone for held in self)

    @property
    def only_suspects(self) -> bool:
        """Whether nothing is held that runs beside others."""
        return all(held.claim.alone for held in self)

    def cheapest(self, count: int) -> list[Trajectory]:
        """At most ``count`` of those in a turn, the shortest first: their KV cache is the quickest to compute elsewhere."""
        return sorted((held for held in self if held.in_turn), key=lambda held: held.length)[:count]

    def remove(self, trajectory: Trajectory) -> None:
        """It has ended, or is somebody else's now."""
        if self._held.get(trajectory.key) is trajectory:
            del self._held[trajectory.key]

    def fail_turns(self, error: EngineLost) -> None:
        """The turns in progress can't end: the engine is gone."""
        for trajectory in self:
            trajectory.fail_turn(error)

    def lose_all(self, why: str) -> None:
        """Nothing that is held can be kept."""
        for trajectory in self:
            trajectory.lose(why)

    def store(self, trajectory: Trajectory) -> None:
        """Checkpoint a trajectory's new tokens; it is lost if the store refuses them.

        While its last checkpoint is on its way, new ones wait for the answer and go together: so a store that is away makes
        no queue that grows for as long as patience lasts, and has one write per trajectory to take when it is back.
        """
        if trajectory.key not in self._storing:
            for stored in self._commits.put(trajectory.checkpoint()):
                self._storing.add(trajectory.key)
                stored.add_done_callback(partial(self._stored, trajectory))

    def _stored(self, trajectory: Trajectory, done: "asyncio.Future[Answer]") -> None:
        self._storing.discard(trajectory.key)
        if done.cancelled():
            return
        if isinstance(refused := done.result(), StaleEpochError):
            trajectory.lose(str(refused))
        elif trajectory.key in self._held:
            self.store(trajectory)

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
                        trajectory.lease_refused(str(answer))

    async def let_go(self, chosen: Sequence[Trajectory], *, to: str = "") -> list[Released]:
        """Stop trajectories at a step boundary and release them with every token that they have.

        Args:
            to: the instance that owns them from now on, if it adopts them within ``ADOPT_S``; "" for whoever claims them.

        Returns:
            Those that were released; one that has just ended isn't, and ends here.
        """
        if not chosen:
            return []
        await self._engine.drop([trajectory.key for trajectory in chosen])
        releases: list[asyncio.Future[Answer]] = []
        for trajectory in chosen:
            id, epoch = trajectory.id, trajectory.claim.epoch
            end = Transfer(id, epoch, to, int(ADOPT_S * 1000)) if to else Release(id, epoch)
            releases.append(self._commits.put([*trajectory.checkpoint(), end])[-1])
        released: list[Released] = []
        for trajectory, answer in zip(chosen, await asyncio.gather(*releases), strict=True):
            if not isinstance(answer, StaleEpochError):
                trajectory.give_away(to)
                released.append(Released(trajectory.claim.spec, trajectory.claim.epoch + 1))
        self._log.info("released", trajectories=len(released), to=to or None)
        return released
