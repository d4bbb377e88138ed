"""Issues a step's trajectories and gathers them: messages say when to look, the store says what is so.

Every now and then the store is asked about whatever is still missing, so a lost message costs some time and never a sample.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import msgspec
from structlog.typing import FilteringBoundLogger

from libs.common import messages as m
from libs.common.bus import Bus
from libs.common.errors import StaleEpochError
from libs.common.pulling import Puller
from libs.common.store import TrajectoryStore
from libs.common.tokens import PolicyVersion
from libs.common.trajectory import TERMINAL, Record, TrajectoryId, TrajectorySpec
from services.trainer.hold import Superseded
from services.trainer.job_data import JobData
from services.trainer.steps import StepLedger


class Waits(msgspec.Struct, frozen=True):
    """How long the trainer waits for news, in seconds.

    Attributes:
        look: between two looks into the store.
        second_look: after a look that saw a lease run out: one that still has is then announced again.
        quiet: a trajectory that nobody works on is announced again once nothing at all has come back for this long.
    """

    look: float
    second_look: float
    quiet: float

    @classmethod
    def of(cls, lease_s: float) -> Self:
        """In proportion to the job's leases: looking more often than they run out would find nothing."""
        return cls(look=0.6 * lease_s, second_look=0.2 * lease_s, quiet=3.0 * lease_s)


class Gatherer:
    """Gets a step's trajectories generated and scored."""

    def __init__(
        self,
        *,
        bus: Bus,
        store: TrajectoryStore,
        job_uid: str,
        instance: str,
        waits: Waits,
        log: FilteringBoundLogger,
    ) -> None:
        self._bus, self._store, self._uid, self._instance, self._log = bus, store, job_uid, instance, log
        self._waits = waits
        self._specs: dict[TrajectoryId, TrajectorySpec] = {}
        self._policy = PolicyVersion(0)
        self._expired = set[TrajectoryId]()
        self._attempt = int(time.time() * 1000) % (1 << 40)  # announcements of an earlier life must not swallow ours

    async def gather(
        self,
        ledger: StepLedger,
        groups: Sequence[Sequence[TrajectorySpec]],
        *,
        data: JobData,
        policy: PolicyVersion,
        settled: Puller,
        on_progress: Callable[[], None],
    ) -> list[Record]:
        """Issue ``groups`` and wait until the ledger is complete, replacements included.

        Returns:
            The records of all of them, in order of issue; every one is in a terminal state.

        Raises:
            Superseded: another trainer than the one that published ``policy`` holds the job.
        """
        self._specs, self._policy = {}, policy
        await self._issue(ledger, groups)
        heard_at = checked_at = time.monotonic()
        patience_s = self._waits.quiet
        await self._reconcile(ledger, quiet=False)  # after a restart most of it may be there already
        on_progress()
        while True:
            useless = ledger.useless()
            if useless and await self._confirmed(ledger, useless) and (replace := ledger.take_replaceable()):
                self._log.warning("groups_replaced", groups=replace, step=ledger.step)
                await self._issue(ledger, data.training_groups(replace, step=ledger.step))
            if ledger.complete and (records := await self._confirmed(ledger, ledger.present())) is not None:
                return records
            look_s = self._waits.second_look if self._expired else self._waits.look
            deliveries = await settled.fetch(256, wait_s=look_s)
            for delivery in deliveries:
                event = delivery.message
                if isinstance(event, m.TrajectorySettled):
                    ledger.settle(event.group, event.sample, event.state)
                await delivery.ack()
            now = time.monotonic()
            if deliveries:
                heard_at, patience_s = now, self._waits.quiet
                on_progress()
            if now - checked_at >= look_s:
                quiet = now - heard_at >= patience_s
                await self._reconcile(ledger, quiet=quiet)
                checked_at = now
                if quiet:  # perhaps everyone is busy with long ones: ask less and less often
                    heard_at, patience_s = now, 2 * patience_s

    async def _issue(self, ledger: StepLedger, groups: Sequence[Sequence[TrajectorySpec]]) -> None:
        for group in groups:
            ledger.issue(group[0].id.group, purpose=group[0].purpose, samples=len(group))
        specs = [spec for group in groups for spec in group]
        self._specs |= {spec.id: spec for spec in specs}
        created = await self._create(specs)
        if created < len(specs):
            self._log.info("records_found", records=len(specs) - created, step=ledger.step)
        await self._announce([spec.id for spec in specs], ledger.step)

    async def _create(self, specs: Sequence[TrajectorySpec]) -> int:
        try:
            return await self._store.create(specs, incarnation=self._policy.incarnation)
        except StaleEpochError:
            raise Superseded(self._uid) from None

    async def _announce(self, ids: Sequence[TrajectoryId], step: int) -> None:
        await self._tell(m.StartRollout, ids, step, policy=self._policy)

    async def _tell(self, kind: type[m.TrajectoryNews], ids: Sequence[TrajectoryId], step: int, **more: Any) -> None:
        self._attempt += 1
        about = {"sender": self._instance, "job_uid": self._uid, "step": step, "attempt": self._attempt, **more}
        await self._bus.publish_all([kind(group=id.group, sample=id.sample, **about) for id in ids])

    async def _confirmed(self, ledger: StepLedger, settled: Sequence[tuple[int, int]]) -> list[Record] | None:
        """The records of samples that messages told are settled.

        None if the store hasn't all of that: in a crash it may lose its last second. What it has lost is open again then.
        """
        ids = [TrajectoryId(self._uid, group, sample) for group, sample in settled]
        records = [record for record in await self._store.read(ids) if record is not None and record.state in TERMINAL]
        if len(records) == len(ids):
            return records
        lost = set(ids) - {record.spec.id for record in records}
        for id in lost:
            ledger.reopen(id.group, id.sample)
        self._log.warning("settled_records_lost", records=len(lost), step=ledger.step)
        await self._reconcile(ledger, quiet=True)
        return None

    async def _reconcile(self, ledger: StepLedger, *, quiet: bool) -> None:
        """Ask the store about what is missing; announce again what nobody seems to work on."""
        missing = [TrajectoryId(self._uid, group, sample) for group, sample in ledger.missing()]
        unclaimed, unscored, lost, expired = [], [], list[TrajectorySpec](), set[TrajectoryId]()
        for id, state in zip(missing, await self._store.states(missing), strict=True):
            if state == "gone":
                lost.append(self._specs[id])
            elif state in TERMINAL:
                ledger.settle(id.group, id.sample, "scored" if state == "scored" else "failed")
            elif state == "expired":
                expired.add(id)
            elif state == "pending" and quiet:
                unclaimed.append(id)
            elif state == "finished" and quiet:
                unscored.append(id)
        # Its worker may only have been cut off for a moment, as the store may have been: it may renew until the next look.
        unclaimed += sorted(expired & self._expired)
        self._expired = expired
        if lost:  # the store lost its last second, or all of it
            self._log.warning("records_lost", records=len(lost), step=ledger.step)
            await self._create(lost)
            unclaimed += [spec.id for spec in lost]
        if unclaimed:
            self._log.info("announced_again", trajectories=len(unclaimed), step=ledger.step)
            await self._announce(unclaimed, ledger.step)
        await self._tell(m.TrajectoryFinished, unscored, ledger.step)
