"""What can be seen of running jobs from outside: in which moment of its step each one is, and whose work is alive.

Also the witness of two invariants: what the store has of a trajectory only ever grows at its end, and all of it was sampled
from the policy of its step.
"""

import time
from collections import Counter
from enum import StrEnum
from typing import Any

import anyio
from nats.aio.msg import Msg

from libs.common import messages as m
from libs.common.changes import Changes
from libs.common.trajectory import Record, TrajectoryId
from tests.chaos.cluster import Cluster

LOOK_S = 0.1


class Moment(StrEnum):
    """The moments of a step at which something may die."""

    ISSUED = "issued"  # its tasks have just been announced
    GENERATING = "generating"  # less than half of it is finished
    SCORING = "scoring"  # something waits for its score
    TAIL = "tail"  # more than half is finished, not all
    TRAINING = "training"
    PUBLISHED = "published"  # the next policy is out; the checkpoint, if it is time for one, isn't


ISSUED_S = 0.05
"""How long a step counts as just issued."""


class JobWatch:
    """One job as its messages show it."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.step, self.policy, self.phase = -1, -1, m.Phase.STARTING
        self.trainer, self.outcome = "", ""
        self._issued_at = 0.0
        self._issued, self._finished, self._settled = set[str](), set[str](), set[str]()

    def hear(self, message: Any) -> None:
        """Take note of a message about this job."""
        match message:
            case m.StartRollout(step=step):
                if step != self.step:
                    self.step, self._issued_at = step, time.monotonic()
                    self._issued, self._finished, self._settled = set(), set(), set()
                self._issued.add(_member(message))
            case m.TrajectoryFinished(step=step) if step == self.step:
                self._finished.add(_member(message))
            case m.TrajectorySettled(step=step) if step == self.step:
                self._settled.add(_member(message))
            case m.JobProgress():
                self.phase = message.phase
            case m.PolicyPublished():
                self.policy = message.version.step
            case m.JobRecord():
                self.trainer = message.trainer
                self.outcome = message.outcome or ""

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
        self._prefixes: dict[TrajectoryId, bytes] = {}
        self.broken: list[str] = []

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
            tasks.start_soon(self._watch_prefixes)

    async def owners(self, uid: str) -> Counter[str]:
        """How many running trajectories of a job each instance owns, by the store."""
        records = await self._records(uid)
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

    async def _watch_prefixes(self) -> None:
        while True:
            for job in self.alive():
                for record in await self._records(job.uid):
                    self._compare(record)
            await anyio.sleep(LOOK_S)

    def _compare(self, record: Record) -> None:
        id, ids = record.spec.id, record.tokens["id"].tobytes()
        if set(record.tokens["step"].tolist()) - {record.spec.step}:
            self.broken.append(
                f"{id} of step {record.spec.step} has tokens of the policies {set(record.tokens['step'].tolist())}"
            )
        if not ids.startswith(before := self._prefixes.get(id, b"")):
            self.broken.append(f"{id} had {len(before) // 4} tokens, and now has {len(ids) // 4} that don't begin with them")
        self._prefixes[id] = ids

    async def _records(self, uid: str) -> list[Record]:
        store = self._cluster.store
        return [record for record in await store.read(await store.members(uid)) if record is not None]


def _member(news: m.TrajectoryNews) -> str:
    return f"{news.group}.{news.sample}"
