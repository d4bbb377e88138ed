"""What can be seen of running jobs from outside: in which moment of its step each one is, and whose work is alive.

It also looks at what the store has of them, for a witness: at what is being generated as often as it can, at everything now
and then.
"""

import time
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import anyio
from nats.aio.msg import Msg

from libs.common import messages as m
from libs.common.changes import Changes
from libs.common.trajectory import Record, TrajectoryId
from tests.chaos.cluster import Cluster
from tests.chaos.witness import Witness

LOOK_S = 0.05
LOOK_AT_ALL_S = 0.5


class Moment(StrEnum):
    """The moments of a step at which something may die."""

    ISSUED = "issued"  # its tasks have just been announced
    GENERATING = "generating"  # less than half of it is finished
    SCORING = "scoring"  # something waits for its score
    TAIL = "tail"  # more than half is finished, not all
    TRAINING = "training"
    PUBLISHED = "published"  # the next policy is out; the checkpoint, if it is time for one, isn't


GENERATES = frozenset({Moment.GENERATING, Moment.TAIL})
"""The moments at which some of its trajectories run."""

ISSUED_S = 0.05
"""How long a step counts as just issued."""

ABOUT_TO_END = 2
"""Steps that a job may do before anyone here has heard of it."""


class JobWatch:
    """One job as its messages show it.

    Attributes:
        may_end: the outcomes that are right for it; whoever asks for another one says so here.
    """

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.step, self.policy, self.phase = -1, -1, m.Phase.STARTING
        self.steps, self._told_step = 0, -1
        self.trainer, self.outcome = "", ""
        self.may_end = {m.Outcome.SUCCEEDED}
        self._issued_at = 0.0
        self._issued, self._finished, self._settled = set[TrajectoryId](), set[TrajectoryId](), set[TrajectoryId]()

    def hear(self, message: Any) -> None:
        """Take note of a message about this job."""
        match message:
            case m.StartRollout(step=step):
                if step != self.step:
                    self.step, self._issued_at = step, time.monotonic()
                    self._issued, self._finished, self._settled = set(), set(), set()
                self._issued.add(_id(message))
            case m.TrajectoryFinished(step=step) if step == self.step:
                self._finished.add(_id(message))
            case m.TrajectorySettled(step=step) if step == self.step:
                self._settled.add(_id(message))
            case m.JobProgress():
                self.phase, self.steps, self._told_step = message.phase, message.steps, message.step
            case m.PolicyPublished():
                self.policy = message.version.step
            case m.JobRecord():
                self.trainer = message.trainer
                self.outcome = message.outcome or ""

    @property
    def about_to_end(self) -> bool:
        """Whether it may have ended before anyone here has heard of it."""
        return max(self.step, self._told_step) >= self.steps - ABOUT_TO_END

    def unfinished(self) -> list[TrajectoryId]:
        """What is being generated, or waits for it."""
        return sorted(self._issued - self._finished)

    def is_in(self, moment: Moment) -> bool:
        """Whether it is in a moment now."""
        if self.outcome or self.step < 0:
            return False
        age_s, issued = time.monotonic() - self._issued_at, len(self._issued)
        if self.policy > self.step:
            return moment is Moment.PUBLISHED
        if self.phase is m.Phase.TRAIN:
            return moment is Moment.TRAINING
        match moment:
            case Moment.ISSUED:
                return age_s < ISSUED_S
            case Moment.GENERATING:
                return age_s > ISSUED_S and 2 * len(self._finished) < issued
            case Moment.SCORING:
                return bool(self._finished - self._settled)
            case Moment.TAIL:
                return issued < 2 * len(self._finished) < 2 * issued
            case _:
                return False


class Watch:
    """All jobs of a cluster that were asked to be watched."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.jobs: dict[str, JobWatch] = {}
        self.changes = Changes()
        self.witness = Witness()
        self._looking = anyio.Lock()

    def follow(self, uid: str) -> JobWatch:
        """Watch a job, from before it is handed in."""
        watch = self.jobs[uid] = JobWatch(uid)
        return watch

    def alive(self) -> list[JobWatch]:
        """Jobs that haven't ended."""
        return [job for job in self.jobs.values() if not job.outcome]

    async def run(self) -> None:
        """Watch, until cancelled."""
        client = self._cluster.bus.client
        for subject in ("tasks.>", "trajectories.>"):
            await client.subscribe(subject, cb=self._hear_raw)
        async with anyio.create_task_group() as tasks:
            for kind in (m.JobProgress, m.PolicyPublished, m.JobRecord):
                tasks.start_soon(self._follow_table, kind)
            tasks.start_soon(self._look)
            tasks.start_soon(self._look_at_all)

    async def owners(self, uid: str) -> Counter[str]:
        """How many running trajectories of a job each instance owns, by the store."""
        records = await self._records_of(uid)
        return Counter(record.owner for record in records if record.state == "running")

    async def _follow_table(self, kind: type[Any]) -> None:
        async for change in (await self._cluster.bus.table(kind)).watch():
            if change.value is not None:
                self._hear(change.value)

    async def _hear_raw(self, msg: Msg) -> None:
        self._hear(m.decode(msg.data))

    def _hear(self, message: Any) -> None:
        if (watch := self.jobs.get(message.job_uid)) is not None:
            watch.hear(message)
            self.changes.notify()

    async def _look(self) -> None:
        """Show the witness what is being generated."""
        while True:
            for job in self.alive():
                await self._records(job.unfinished())
            await anyio.sleep(LOOK_S)

    async def _look_at_all(self) -> None:
        """Show it everything."""
        while True:
            for job in self.alive():
                await self._records_of(job.uid)
            await anyio.sleep(LOOK_AT_ALL_S)

    async def _records_of(self, uid: str) -> list[Record]:
        return await self._records(await self._cluster.store.members(uid))

    async def _records(self, ids: Sequence[TrajectoryId]) -> list[Record]:
        """Records, which the witness sees, too; one look after another."""
        async with self._looking:
            asked_at = time.monotonic()
            records = [record for record in await self._cluster.store.read(ids) if record is not None]
            self.witness.see(records, asked_at=asked_at)
        return records


def _id(news: m.TrajectoryNews) -> TrajectoryId:
    return TrajectoryId(news.job_uid, news.group, news.sample)
