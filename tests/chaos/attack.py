"""A fault about to strike: which kinds there are, and whom each of them strikes."""

import random
from enum import StrEnum

from libs.common import messages as m
from libs.common.subjects import LEADER_KEY
from libs.node.servers import Server
from tests.chaos.cluster import Cluster, Instance
from tests.chaos.watch import GENERATES, JobWatch, Moment, Watch


class Kind(StrEnum):
    """The kinds of fault."""

    KILL_ROLLOUT = "kill rollout service"
    KILL_ENGINE = "kill engine process"
    KILL_TRAINER = "kill trainer service"
    KILL_TRAINING = "kill training process"
    KILL_REWARD = "kill reward service"
    KILL_SCORER = "kill scorer process"
    KILL_LEADER = "kill leading scheduler"
    KILL_NATS = "kill NATS"
    KILL_VALKEY = "kill Valkey"
    TEAR_VALKEY = "kill Valkey and tear off the end of its log"
    END_ROLLOUT = "SIGTERM rollout service"
    END_TRAINER = "SIGTERM trainer service"
    END_REWARD = "SIGTERM reward service"
    END_LEADER = "SIGTERM leading scheduler"
    END_NATS = "SIGTERM NATS"
    END_VALKEY = "SIGTERM Valkey"
    FREEZE_ROLLOUT = "freeze rollout service past its leases"
    FREEZE_ENGINE = "freeze engine process"
    FREEZE_TRAINER = "freeze trainer service until it is replaced"
    FREEZE_TRAINING = "freeze training process"
    FREEZE_REWARD = "freeze reward service"
    FREEZE_REWARD_LONG = "freeze reward service until another has its work"
    FREEZE_LEADER = "freeze leading scheduler past its lease"
    FREEZE_NATS = "freeze NATS"
    FREEZE_VALKEY = "freeze Valkey"
    CUT_ROLLOUT_BUS = "cut rollout service off the bus"
    CUT_ROLLOUT_STORE = "cut rollout service off the store"
    CUT_TRAINER_BUS = "cut trainer service off the bus"
    CUT_TRAINER_STORE = "cut trainer service off the store"
    CUT_REWARD_BUS = "cut reward service off the bus"
    CUT_REWARD_STORE = "cut reward service off the store"
    CUT_LEADER_BUS = "cut leading scheduler off the bus"
    CUT_LEADER_STORE = "cut leading scheduler off the store while a job ends"
    DRAIN = "drain rollout service"
    MIGRATE = "migrate trajectories"
    CANCEL = "cancel job"


class Missed(Exception):
    """There was nothing alive to strike."""


class Attack:
    """One fault about to strike.

    Args:
        job, moment: whose work is struck, and in which moment of its step it is.
        running: so many of its trajectories run.
        busy: names of what is suffering already; a fault strikes nobody twice at a time.

    Attributes:
        target: whom it struck.
        running: of a strike at a rollout instance, the trajectories that ran there.
    """

    def __init__(
        self,
        cluster: Cluster,
        watch: Watch,
        job: JobWatch,
        *,
        moment: Moment,
        running: int,
        draw: random.Random,
        busy: set[str],
    ) -> None:
        self.cluster, self.watch, self.job, self.draw, self.busy = cluster, watch, job, draw, busy
        self.running, self._moment = running, moment
        self.target = ""

    async def rollout(self) -> Instance:
        """The rollout instance with most of the job's running trajectories; while it doesn't generate, one that holds it."""
        owners = await self.watch.owners(self.job.uid)
        names = [name for name, _ in owners.most_common()]
        if self._moment not in GENERATES:
            names += await self.holders()
        instance = self._aim([name for name in names if name.startswith("rollout")])
        self.running = owners[instance.name]
        return instance

    async def trainer(self) -> Instance:
        """The job's trainer."""
        return self._aim([self.job.trainer])

    async def reward(self) -> Instance:
        """A reward service; one that has begun to score, if there is any."""
        instances = [instance for instance in self.cluster.with_role("reward") if instance.is_up]
        self.draw.shuffle(instances)
        return self._aim([one.name for one in sorted(instances, key=lambda one: not one.children(SCORER))])

    async def leader(self) -> Instance:
        """The scheduler that leads."""
        leader = await (await self.cluster.bus.table(m.Leadership)).get(LEADER_KEY)
        return self._aim([leader.sender] if leader is not None and leader.held else [])

    def server(self, server: Server) -> Server:
        """A server, for oneself."""
        self.take(server.name)
        return server

    def take(self, name: str) -> None:
        """Make something the target, for oneself."""
        if name in self.busy:
            raise Missed(f"{name} is suffering already")
        self.target = name
        self.busy.add(name)

    async def holders(self) -> list[str]:
        """Instances that hold the job, in any order."""
        allocations = await (await self.cluster.bus.table(m.Allocation)).all()
        names = [one.instance for one in allocations.values() if one.job_uid == self.job.uid]
        self.draw.shuffle(names)
        return names

    def _aim(self, names: list[str]) -> Instance:
        for name in names:
            instance = self.cluster.instances.get(name)
            if instance is not None and instance.is_up and name not in self.busy:
                self.take(name)
                return instance
        raise Missed(f"nobody of {names} can be struck")


ENGINE, TRAINING, SCORER = "services.rollout.engine_process", "services.trainer.", "multiprocessing.spawn"
"""Words in the command lines of child processes."""
