"""Checkpoints of running trajectories while the store takes its time."""

import anyio
import anyio.lowlevel
import structlog

from libs.common.errors import StaleEpochError
from libs.common.group_commit import GroupCommit
from libs.common.job import job_from
from libs.common.tokens import PolicyVersion, join
from libs.common.trajectory import Append, Claim, TrajectoryId, Write
from services.rollout.leases import Leases
from services.rollout.runner import Tools, Trajectory
from tests.trajectories import spec_of


class SlowStore:
    """Answers once it is let; refuses what is of a stale epoch."""

    def __init__(self) -> None:
        self.back, self.asked = anyio.Event(), anyio.Event()
        self.writes: list[Write] = []
        self.stale = False

    async def write(self, writes: list[Write]) -> list[int | StaleEpochError]:
        self.writes += writes
        self.asked.set()
        await self.back.wait()
        return [StaleEpochError("another owns it") if self.stale else 1 for _ in writes]


class Running:
    """A trajectory that is held, and the store behind it."""

    def __init__(self) -> None:
        self.store = SlowStore()
        self.commits = GroupCommit(self.store)  # type: ignore[arg-type]  # a fake store
        log = structlog.get_logger()
        self.leases = Leases(self.store, commits=self.commits, engine=None, ttl_s=5, log=log)  # type: ignore[arg-type]
        job = job_from({"name": "t", "model": {"path": "m"}, "data": {"path": "d.jsonl"}}, file="t")
        claim = Claim(spec_of(TrajectoryId("job", 0, 0)), 4, failures=0, deaths=0, alone=False, tokens=join())
        self.trajectory = Trajectory(claim, Tools(job, None, None, None, self.commits))  # type: ignore[arg-type]
        self.leases.add(self.trajectory)

    def generate(self, token: int) -> None:
        """The engine hands over a token, to be stored."""
        self.trajectory.take(ids=[token], logprobs=[-1.0], version=PolicyVersion(1), stopped=None)
        self.leases.store(self.trajectory)

    def stored(self) -> list[tuple[int, list[int]]]:
        """Writes that the store was asked for: expected length and ids."""
        appends = [write for write in self.store.writes if isinstance(write, Append)]
        return [(append.expected_length, append.tokens["id"].tolist()) for append in appends]


async def test_what_comes_while_the_store_is_away_is_one_write_when_it_is_back() -> None:
    running = Running()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.commits.run)
        running.generate(0)
        await running.store.asked.wait()
        for token in range(1, 100):
            running.generate(token)
        assert running.stored() == [(0, [0])]
        running.store.back.set()
        with anyio.fail_after(5):
            while len(running.stored()) < 2:
                await anyio.lowlevel.checkpoint()
        running.generate(100)
        with anyio.fail_after(5):
            while len(running.stored()) < 3:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert running.stored() == [(0, [0]), (1, list(range(1, 100))), (100, [100])]


async def test_nothing_more_is_stored_of_one_that_another_owns() -> None:
    running = Running()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.commits.run)
        running.generate(0)
        await running.store.asked.wait()
        running.generate(1)
        running.store.stale = True
        running.store.back.set()
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert running.stored() == [(0, [0])]
