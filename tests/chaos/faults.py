"""What is done to a cluster: every kind of fault, whom it strikes, and how it heals.

A fault strikes whoever works for a job at that moment. What doesn't heal by itself is healed after a while: a killed process
comes back by itself, but a frozen one is woken, a wire mended, a server started again, a drained worker told to work again.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable

import anyio
import psutil

from libs.common import messages as m
from libs.common.errors import JigsawError
from tests.chaos.attack import ENGINE, SCORER, TRAINING, Attack, Kind, Missed
from tests.chaos.cluster import SCHEDULER_LEASE_S, WORKER_LOST_S, Instance
from tests.chaos.jobs import LEASE_S
from tests.chaos.proxy import Wire

AWAY_S = 0.2
ANSWERS_S = 20.0
JOB_ENDS_S = 10.0

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


async def _cut_leader_store(attack: Attack) -> Healing:
    """A scheduler needs the store only to clean up after a job: the wire stays cut until one that is done waits for that."""
    if not any(job.about_to_end for job in attack.watch.alive()):
        raise Missed("no job is about to end")
    wire = (await attack.leader()).store
    wire.cut()

    async def heal() -> None:
        with anyio.move_on_after(JOB_ENDS_S):
            await attack.watch.changes.until(lambda: any(job.phase is m.Phase.DONE for job in attack.watch.alive()))
        await asyncio.sleep(SCHEDULER_LEASE_S)
        wire.mend(torn=attack.draw.random() < 0.5)

    return heal


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


async def _tear_valkey(attack: Attack) -> Healing:
    """As a power cut leaves it with ``appendfsync everysec``: some of what was written in the last second isn't there."""
    server, log = attack.server(attack.cluster.valkey), attack.cluster.valkey_log
    killed_at = time.monotonic()
    psutil.Process(server.pid).kill()

    async def heal() -> None:
        await server.ended()
        since = log.tear(before=killed_at, draw=attack.draw)
        attack.watch.witness.expect_loss(written_after=since, now=time.monotonic())
        await asyncio.sleep(AWAY_S)
        server.start_again()
        await asyncio.to_thread(server.wait_until_answers)

    return heal


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


async def _cancel(attack: Attack) -> None:
    job = attack.job
    if m.Outcome.CANCELLED in job.may_end:
        raise Missed(f"{job.uid} is cancelled already")
    attack.take(job.uid)
    job.may_end.add(m.Outcome.CANCELLED)
    await attack.cluster.bus.publish(m.CancelJob(sender="chaos", job_uid=job.uid))
    if not job.about_to_end:
        job.may_end.discard(m.Outcome.SUCCEEDED)


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


STRIKES: dict[Kind, Strike] = {
    Kind.KILL_ROLLOUT: _signalling(Attack.rollout, signal.SIGKILL),
    Kind.KILL_ENGINE: _killing_child(Attack.rollout, ENGINE),
    Kind.KILL_TRAINER: _signalling(Attack.trainer, signal.SIGKILL),
    Kind.KILL_TRAINING: _killing_child(Attack.trainer, TRAINING),
    Kind.KILL_REWARD: _signalling(Attack.reward, signal.SIGKILL),
    Kind.KILL_SCORER: _killing_child(Attack.reward, SCORER),
    Kind.KILL_LEADER: _signalling(Attack.leader, signal.SIGKILL),
    Kind.KILL_NATS: _restarting("nats", signal.SIGKILL),
    Kind.KILL_VALKEY: _restarting("valkey", signal.SIGKILL),
    Kind.TEAR_VALKEY: _tear_valkey,
    Kind.END_ROLLOUT: _signalling(Attack.rollout, signal.SIGTERM),
    Kind.END_TRAINER: _signalling(Attack.trainer, signal.SIGTERM),
    Kind.END_REWARD: _signalling(Attack.reward, signal.SIGTERM),
    Kind.END_LEADER: _signalling(Attack.leader, signal.SIGTERM),
    Kind.END_NATS: _restarting("nats", signal.SIGTERM),
    Kind.END_VALKEY: _restarting("valkey", signal.SIGTERM),
    Kind.FREEZE_ROLLOUT: _freezing(Attack.rollout, 2.0 * LEASE_S),
    Kind.FREEZE_ENGINE: _freezing_child(Attack.rollout, ENGINE, 1.5 * LEASE_S),
    Kind.FREEZE_TRAINER: _freezing(Attack.trainer, 1.5 * WORKER_LOST_S),
    Kind.FREEZE_TRAINING: _freezing_child(Attack.trainer, TRAINING, 1.5 * WORKER_LOST_S),
    Kind.FREEZE_REWARD: _freezing(Attack.reward, 1.5 * LEASE_S),
    Kind.FREEZE_REWARD_LONG: _freezing(Attack.reward, 1.5 * WORKER_LOST_S),
    Kind.FREEZE_LEADER: _freezing(Attack.leader, 2.0 * SCHEDULER_LEASE_S),
    Kind.FREEZE_NATS: _freezing_server("nats", 1.5 * LEASE_S),
    Kind.FREEZE_VALKEY: _freezing_server("valkey", 1.5 * LEASE_S),
    Kind.CUT_ROLLOUT_BUS: _cutting(Attack.rollout, "bus", 1.5 * LEASE_S),
    Kind.CUT_ROLLOUT_STORE: _cutting(Attack.rollout, "store", 2.0 * LEASE_S),
    Kind.CUT_TRAINER_BUS: _cutting(Attack.trainer, "bus", 1.5 * WORKER_LOST_S),
    Kind.CUT_TRAINER_STORE: _cutting(Attack.trainer, "store", 1.5 * LEASE_S),
    Kind.CUT_REWARD_BUS: _cutting(Attack.reward, "bus", 1.5 * LEASE_S),
    Kind.CUT_REWARD_STORE: _cutting(Attack.reward, "store", 1.5 * LEASE_S),
    Kind.CUT_LEADER_BUS: _cutting(Attack.leader, "bus", 1.5 * SCHEDULER_LEASE_S),
    Kind.CUT_LEADER_STORE: _cut_leader_store,
    Kind.DRAIN: _drain,
    Kind.MIGRATE: _migrate,
    Kind.CANCEL: _cancel,
}
