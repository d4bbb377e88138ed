"""A bus or a store that is away for too long ends the process that needs it, and is held against no job and no sample."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from libs.common import messages as m
from libs.common.bus import Bus
from libs.common.errors import Unreachable
from libs.common.job import Job, job_from
from libs.common.policy_store import PolicyStore
from libs.common.service import Context
from libs.common.settings import default_settings
from libs.common.store import TrajectoryStore
from libs.common.trajectory import Record, TrajectoryId
from libs.node.servers import Server, start_nats, start_valkey
from services.reward.service import RewardService
from services.trainer.held_job import HeldJob
from tests.contexts import context_of
from tests.trajectories import spec_of

UID = "job"
PATIENCE_S = 0.5


class Away:
    """A service's context on servers that can be frozen for good."""

    def __init__(self, context: Context, nats: Server, valkey: Server) -> None:
        self.context, self.nats, self.valkey = context, nats, valkey

    @staticmethod
    def freeze(server: Server) -> None:
        os.kill(server.pid, signal.SIGSTOP)


@pytest.fixture
async def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Away]:
    monkeypatch.setattr("libs.common.connection.PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr("libs.common.connection.ANSWER_S", PATIENCE_S)
    monkeypatch.setattr("libs.common.store_connection.ANSWER_S", PATIENCE_S)
    with start_nats(tmp_path) as nats, start_valkey(tmp_path) as valkey:
        nats.wait_until_answers()
        valkey.wait_until_answers()
        context = await context_of("any-0", default_settings(tmp_path), *await clients(nats, valkey))
        yield Away(context, nats, valkey)
        for server in (nats, valkey):
            os.kill(server.pid, signal.SIGCONT)
        await context.store.close()
        await context.bus.close()


async def clients(nats: Server, valkey: Server) -> tuple[Bus, TrajectoryStore]:
    bus = await Bus.connect(nats.url, instance="any-0", log=structlog.get_logger())
    await bus.set_up()
    store = await TrajectoryStore.connect(valkey.url, patience_s=PATIENCE_S)
    await store.install(replace=True)
    return bus, store


def job() -> Job:
    raw: dict[str, Any] = {"name": "t", "model": {"path": "m"}, "data": {"task": "products"}, "train": {"engine": "replay"}}
    return job_from(raw | {"rollout": {"engine": "replay"}}, file="t")


async def test_a_sample_is_not_failed_for_a_bus_that_is_away(away: Away) -> None:
    id = TrajectoryId(UID, 0, 0)
    await away.context.store.create([spec_of(id)])
    (record,) = await away.context.store.read([id])
    assert isinstance(record, Record)
    away.freeze(away.nats)
    with pytest.raises(Unreachable, match="NATS at nats://"):
        await RewardService(away.context)._verdict(record)


async def test_a_job_is_not_failed_for_a_store_that_is_away(away: Away, tmp_path: Path) -> None:
    record = m.JobRecord(sender="s", job_uid=UID, job=job(), state=m.JobState.RUNNING, submitted_at=0.0)
    held = HeldJob(away.context, record, PolicyStore(str(tmp_path / "policies"), mirror=tmp_path / "mirror"))
    away.freeze(away.valkey)
    with pytest.raises(Unreachable, match="the trajectory store at redis://"):
        await held.run()
    jobs = await away.context.bus.client.jetstream().stream_info("JOBS")
    assert jobs.state.messages == 0, "no word that the job has ended"
