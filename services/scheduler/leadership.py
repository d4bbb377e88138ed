"""Which scheduler leads: one at a time, by a lease in KV that is taken and renewed by compare-and-set.

Nobody trusts another's clock. The leader counts its lease from before it asked for it; a standby counts from when it saw the
key change, which is later, and then waits :data:`GRACE_S` longer for what the leader had sent in its last moment. So before
a standby takes over, the leader knows that it no longer leads, however long it was frozen or cut off: it asks
:meth:`Leadership.require` before everything that it does, and ends.

Every take-over has a term of its own, higher than all before it. A leader that leaves in order keeps its term in the key but
lets go of it, and a standby takes over at once.
"""

import time
from collections.abc import Callable

import anyio
from structlog.typing import FilteringBoundLogger

from libs.common import messages as m
from libs.common.changes import Changes
from libs.common.errors import JigsawError
from libs.common.subjects import LEADER_KEY
from libs.common.tables import Change, Table

GRACE_S = 0.5
RELEASE_S = 1.0

Clock = Callable[[], float]


class Deposed(JigsawError):
    """This scheduler no longer leads, or can't know that it does: it must do nothing more."""


class Tenure:
    """A leader's lease by its own clock.

    Args:
        lease_s: how long it lasts from the moment before it was asked for.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s, self._ends_s = lease_s, float("-inf")

    def renewed(self, asked_s: float) -> None:
        """The key was set; it was asked for at ``asked_s``."""
        self._ends_s = asked_s + self._lease_s

    def end(self) -> None:
        """It is given up."""
        self._ends_s = float("-inf")

    def left_s(self, now_s: float) -> float:
        """How long it lasts still; not positive once it is over."""
        return self._ends_s - now_s


class Sighting:
    """What a standby has seen of the key, and when by its own clock.

    Attributes:
        revision: of the key, 0 if it isn't there. term: the highest that was seen.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self.revision, self.term = -1, 0
        self._vacant_at_s = float("inf")

    def see(self, entry: Change[m.Leadership] | None, now_s: float) -> bool:
        """The key as it is now; whether it has changed."""
        revision = entry.revision if entry is not None and entry.value is not None else 0
        if revision == self.revision or 0 < revision < self.revision:  # a watch may tell late what a look has seen
            return False
        self.revision, self._vacant_at_s = revision, now_s
        if entry is not None and entry.value is not None:
            self.term = max(self.term, entry.value.term)
            if entry.value.held:
                self._vacant_at_s = now_s + self._lease_s + GRACE_S
        return True

    def vacant_in_s(self, now_s: float) -> float:
        """When it may be tried to take over, if nothing changes: in this many seconds."""
        return max(0.0, self._vacant_at_s - now_s)


class Leadership:
    """One scheduler's part in it.

    Args:
        table: that the key is in. instance: who this is. lease_s: renewed at a third of it.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        table: Table[m.Leadership],
        *,
        instance: str,
        lease_s: float,
        log: FilteringBoundLogger,
        clock: Clock = time.monotonic,
    ) -> None:
        self._table, self._instance, self._lease_s, self._log, self._clock = table, instance, lease_s, log, clock
        self._tenure, self._sighting = Tenure(lease_s), Sighting(lease_s)
        self._changes = Changes()
        self._revision, self._term = 0, 0

    async def take(self) -> int:
        """Wait until this scheduler leads; returns its term, higher than that of any before it."""
        self._see(await self._table.entry(LEADER_KEY))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            self._log.info("standing_by")
            while self._tenure.left_s(self._clock()) <= 0:
                with anyio.move_on_after(self._sighting.vacant_in_s(self._clock())) as vacant:
                    await self._changes.next()
                if vacant.cancelled_caught:
                    await self._try()
            tasks.cancel_scope.cancel()
        self._log.info("leading", term=self._term)
        return self._term

    def require(self) -> None:
        """Raises if this scheduler doesn't lead, or can't know that it does.

        Raises:
            Deposed: it doesn't.
        """
        if self._tenure.left_s(self._clock()) <= 0:
            raise Deposed(f"{self._instance} couldn't renew its lease of {self._lease_s:g} s in time: it no longer leads")

    async def keep(self) -> None:
        """Renew the lease until cancelled.

        Raises:
            Deposed: another leads, or the lease ran out before it was renewed.
        """
        while True:
            await anyio.sleep(self._lease_s / 3)
            asked_s = self._clock()
            with anyio.move_on_after(self._tenure.left_s(asked_s)):
                self._revision = await self._table.swap(LEADER_KEY, self._mine(), expected_revision=self._revision)
                if not self._revision:
                    self._tenure.end()
                    raise Deposed(f"another scheduler leads: {self._instance} gives way")
                self._tenure.renewed(asked_s)
            self.require()

    async def release(self) -> None:
        """Let a standby take over at once; nothing if this scheduler doesn't lead. Bounded: the lease runs out anyway."""
        left_s = self._tenure.left_s(self._clock())
        if left_s <= 0:
            return
        with anyio.CancelScope(shield=True), anyio.move_on_after(min(RELEASE_S, left_s)):
            await self._table.swap(LEADER_KEY, self._mine(held=False), expected_revision=self._revision)
            self._log.info("leadership_released", term=self._term)
        self._tenure.end()

    async def _try(self) -> None:
        asked_s, term = self._clock(), self._sighting.term + 1
        mine = m.Leadership(sender=self._instance, term=term)
        revision = await self._table.swap(LEADER_KEY, mine, expected_revision=self._sighting.revision)
        if revision:
            self._revision, self._term = revision, term
            self._tenure.renewed(asked_s)
        self._see(await self._table.entry(LEADER_KEY))

    def _mine(self, *, held: bool = True) -> m.Leadership:
        return m.Leadership(sender=self._instance, term=self._term, held=held)

    async def _watch(self) -> None:
        async for change in self._table.watch(LEADER_KEY):
            self._see(change)

    def _see(self, entry: Change[m.Leadership] | None) -> None:
        if self._sighting.see(entry, self._clock()):
            self._changes.notify()
