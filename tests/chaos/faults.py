"""What is done to a cluster: every kind of fault, whom it strikes, and how it heals.

A fault strikes whoever works for a job at that moment. What doesn't heal by itself is healed after a while: a killed process
comes back by itself, but a frozen one is woken, a wire mended, a server started again, a drained worker told to work again.
"""

import asyncio
import contextlib
import random
import signal
from collections.abc import Awaitable, Callable
from enum import StrEnum

import anyio
import psutil

from libs.common import messages as m
from libs.common.errors import JigsawError
from libs.common.subjects import LEADER_KEY
from libs.node.servers import Server
from tests.chaos.cluster import SCHEDULER_LEASE_S, WORKER_LOST_S, Cluster, Instance
from tests.chaos.jobs import LEASE_S
from tests.chaos.proxy import Wire
from tests.chaos.watch import JobWatch, Watch


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
    END_ROLLOUT = "SIGTERM rollout service"
    END_TRAINER = "SIGTERM trainer service"
    END_NATS = "SIGTERM NATS"
    END_VALKEY = "SIGTERM Valkey"
    FREEZE_ROLLOUT = "freeze rollout service past its leases"
    FREEZE_ENGINE = "freeze engine process"
    FREEZE_TRAINER = "freeze trainer service until it is replaced"
    FREEZE_REWARD = "freeze reward service"
    FREEZE_LEADER = "freeze leading scheduler past its lease"
    FREEZE_NATS = "freeze NATS"
    FREEZE_VALKEY = "freeze Valkey"
    CUT_ROLLOUT_BUS = "cut rollout service off the bus"
    CUT_ROLLOUT_STORE = "cut rollout service off the store"
    CUT_TRAINER_BUS = "cut trainer service off the bus"
    CUT_TRAINER_STORE = "cut trainer service off the store"
    CUT_REWARD_STORE = "cut reward service off the store"
    CUT_LEADER_BUS = "cut leading scheduler off the bus"
    DRAIN = "drain rollout service"
    MIGRATE = "migrate trajectories"


AWAY_S = 0.2
ANSWERS_S = 20.0


class Missed(Exception):
    """There was nothing alive to strike."""


class Attack:
    """One fault about to strike.

    Attributes:
        busy: names of what is suffering already; a fault strikes nobody twice at a time.
        target: whom it struck.
    """

    def __init__(self, cluster: Cluster, watch: Watch, job: JobWatch, *, draw: random.Random, busy: set[str]) -> None:
        self.cluster, self.watch, self.job, self.draw, self.busy = cluster, watch, job, draw, busy
        self.target = ""

    async def rollout(self) -> Instance:
        """The rollout instance with most of the job's running trajectories; else one that holds the job."""
        owners = await self.watch.owners(self.job.uid)
        names = [name for name, _ in owners.most_common()] or await self.holders()
        return self._aim([name for name in names if name.startswith("rollout")])

    async def trainer(self) -> Instance:
        """The job's trainer."""
        return self._aim([self.job.trainer])

    async def reward(self) -> Instance:
        """The reward service."""
        return self._aim([instance.name for instance in self.cluster.with_role("reward")])

    async def leader(self) -> Instance:
        """The scheduler that leads."""
        leader = await (await self.cluster.bus.table(m.Leadership)).get(LEADER_KEY)
        return self._aim([leader.sender] if leader is not None and leader.held else [])

    def server(self, server: Server) -> Server:
        """A server, for oneself."""
        if server.name in self.busy:
            raise Missed(f"{server.name} is suffering already")
        self.target = server.name
        self.busy.add(self.target)
        return server

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
                self.target = name
                self.busy.add(name)
                return instance
        raise Missed(f"nobody of {names} can be struck")


Healing = Callable[[], Awaitable[None]]
Strike = Callable[[Attack], Awaitable[Healing | None]]
"""Does the damage; returns what heals it, if it needs to be healed. Raises Missed if there was nothing to be struck."""
Find = Callable[[Attack], Awaitable[Instance]]


def _signalling(find: Find, number: signal.Signals) -> Strike:
    async def strike(attack: Attack) -> None:
        (await find(attack)).signal(number)

    return strike


def _killing_child(find: Find, words: str) -> Strike:
    async def strike(attack: Attack) -> None:
        _child(attack, await find(attack), words).kill()

    return strike


def _freezing(find: Find, seconds: float) -> Strike:
    async def strike(attack: Attack) -> Healing:
        return _freeze((await find(attack)).process, seconds)

    return strike


def _freezing_child(find: Find, words: str, seconds: float) -> Strike:
    async def strike(attack: Attack) -> Healing:
        return _freeze(_child(attack, await find(attack), words), seconds)

    return strike


def _freezing_server(which: str, seconds: float) -> Strike:
    async def strike(attack: Attack) -> Healing:
        return _freeze(psutil.Process(attack.server(getattr(attack.cluster, which)).pid), seconds)

    return strike


def _cutting(find: Find, which: str, seconds: float) -> Strike:
    async def strike(attack: Attack) -> Healing:
        wire: Wire = getattr(await find(attack), which)
        wire.cut()

        async def heal() -> None:
            await asyncio.sleep(seconds)
            wire.mend(torn=attack.draw.random() < 0.5)

        return heal

    return strike


def _restarting(which: str, number: signal.Signals) -> Strike:
    async def strike(attack: Attack) -> Healing:
        server = attack.server(getattr(attack.cluster, which))
        psutil.Process(server.pid).send_signal(number)

        async def heal() -> None:
            await server.ended()
            await asyncio.sleep(AWAY_S)
            server.start_again()
            await asyncio.to_thread(server.wait_until_answers)

        return heal

    return strike


async def _drain(attack: Attack) -> Healing:
    instance = await attack.rollout()
    await _ask(attack, instance.name, m.Drain(sender="chaos"))

    async def heal() -> None:
        await asyncio.sleep(LEASE_S)
        undo = m.Drain(sender="chaos", undo=True)
        with anyio.fail_after(ANSWERS_S):
            while True:  # it may be starting anew just now, and isn't draining any more then
                try:
                    await attack.cluster.bus.request(instance.name, undo, timeout_s=2.0)
                    return
                except JigsawError:
                    await asyncio.sleep(0.1)

    return heal


async def _migrate(attack: Attack) -> None:
    source = await attack.rollout()
    others = [name for name in await attack.holders() if name.startswith("rollout") and name != source.name]
    target, count = attack.draw.choice([*others, ""]), attack.draw.randint(1, 8)
    release = m.ReleaseTrajectories(sender="chaos", job_uid=attack.job.uid, target=target, count=count)
    if not await _ask(attack, source.name, release):
        raise Missed(f"nothing was running on {source.name}")


def _freeze(process: psutil.Process, seconds: float) -> Healing:
    process.suspend()

    async def heal() -> None:
        await asyncio.sleep(seconds)
        with contextlib.suppress(psutil.NoSuchProcess):  # whoever owned it has ended it meanwhile
            process.resume()

    return heal


def _child(attack: Attack, instance: Instance, words: str) -> psutil.Process:
    """One of the instance's children of a kind."""
    children = instance.children(words)
    if not children:
        raise Missed(f"{instance.name} has no {words}")
    return attack.draw.choice(children)


async def _ask(attack: Attack, name: str, request: m.Message) -> int:
    try:
        return (await attack.cluster.bus.request(name, request, timeout_s=ANSWERS_S)).count
    except JigsawError as error:
        raise Missed(str(error)) from None


_ENGINE, _TRAINING, _SCORER = "services.rollout.engine_process", "services.trainer.", "multiprocessing.spawn"
"""Words in the command lines of child processes."""

STRIKES: dict[Kind, Strike] = {
    Kind.KILL_ROLLOUT: _signalling(Attack.rollout, signal.SIGKILL),
    Kind.KILL_ENGINE: _killing_child(Attack.rollout, _ENGINE),
    Kind.KILL_TRAINER: _signalling(Attack.trainer, signal.SIGKILL),
    Kind.KILL_TRAINING: _killing_child(Attack.trainer, _TRAINING),
    Kind.KILL_REWARD: _signalling(Attack.reward, signal.SIGKILL),
    Kind.KILL_SCORER: _killing_child(Attack.reward, _SCORER),
    Kind.KILL_LEADER: _signalling(Attack.leader, signal.SIGKILL),
    Kind.KILL_NATS: _restarting("nats", signal.SIGKILL),
    Kind.KILL_VALKEY: _restarting("valkey", signal.SIGKILL),
    Kind.END_ROLLOUT: _signalling(Attack.rollout, signal.SIGTERM),
    Kind.END_TRAINER: _signalling(Attack.trainer, signal.SIGTERM),
    Kind.END_NATS: _restarting("nats", signal.SIGTERM),
    Kind.END_VALKEY: _restarting("valkey", signal.SIGTERM),
    Kind.FREEZE_ROLLOUT: _freezing(Attack.rollout, 2.0 * LEASE_S),
    Kind.FREEZE_ENGINE: _freezing_child(Attack.rollout, _ENGINE, 1.5 * LEASE_S),
    Kind.FREEZE_TRAINER: _freezing(Attack.trainer, 1.5 * WORKER_LOST_S),
    Kind.FREEZE_REWARD: _freezing(Attack.reward, 1.5 * LEASE_S),
    Kind.FREEZE_LEADER: _freezing(Attack.leader, 2.0 * SCHEDULER_LEASE_S),
    Kind.FREEZE_NATS: _freezing_server("nats", 1.5 * LEASE_S),
    Kind.FREEZE_VALKEY: _freezing_server("valkey", 1.5 * LEASE_S),
    Kind.CUT_ROLLOUT_BUS: _cutting(Attack.rollout, "bus", 1.5 * LEASE_S),
    Kind.CUT_ROLLOUT_STORE: _cutting(Attack.rollout, "store", 2.0 * LEASE_S),
    Kind.CUT_TRAINER_BUS: _cutting(Attack.trainer, "bus", 1.5 * WORKER_LOST_S),
    Kind.CUT_TRAINER_STORE: _cutting(Attack.trainer, "store", 1.5 * LEASE_S),
    Kind.CUT_REWARD_STORE: _cutting(Attack.reward, "store", 1.5 * LEASE_S),
    Kind.CUT_LEADER_BUS: _cutting(Attack.leader, "bus", 1.5 * SCHEDULER_LEASE_S),
    Kind.DRAIN: _drain,
    Kind.MIGRATE: _migrate,
}
