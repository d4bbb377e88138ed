"""A trainer that was frozen at the worst moment, replaced and woken: nothing of its successor's is touched."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from libs.common import manifest
from libs.common import messages as m
from libs.common.bus import Bus
from libs.common.errors import JigsawError
from libs.common.policy_store import PolicyStore
from libs.common.sections import TrainSection
from libs.common.service import Context
from libs.common.settings import default_settings
from libs.common.store import TrajectoryStore
from libs.common.tokens import PolicyVersion
from libs.common.trajectory import TrajectoryId
from services.trainer.compute_link import ComputeFailed
from services.trainer.hold import Hold, Superseded
from services.trainer.publication import Publication
from tests.contexts import context_of
from tests.trajectories import spec_of

TRAIN = TrainSection(keep_best=0)
STEP = 4


class FakeCompute:
    """Writes its name; on its way it can be frozen, after it has begun to write."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.freezes = False
        self.frozen, self.woken = asyncio.Event(), asyncio.Event()

    async def write_policy(self, directory: str) -> None:
        try:
            await self._write(Path(directory))
        except OSError as error:
            raise ComputeFailed(f"{directory} can't be written: {error}") from error

    async def write_checkpoint(self, _: int, directory: str, *, extra: dict[str, Any]) -> None:
        with manifest.complete_or_invisible(Path(directory), durable=False) as partial:
            await self._write(partial)

    async def _write(self, folder: Path) -> None:
        (folder / "begun").write_text(self._name)
        if self.freezes:
            self.frozen.set()
            await self.woken.wait()
        (folder / "done").write_text(self._name)


class Trainer:
    """One life of a job's trainer, without its step loop."""

    def __init__(self, context: Context, hold: Hold, folder: Path) -> None:
        self.compute = FakeCompute(str(hold.incarnation))
        policies = PolicyStore(str(folder / "policies"), mirror=folder / "mirror")
        self.publication = Publication(
            context,
            hold,
            compute=self.compute,  # type: ignore[arg-type]  # a fake
            policies=policies,
        )
        self.retained = [TrajectoryId(hold.job_uid, 0, 0)]

    async def checkpoint(self) -> None:
        self.publication.retain(self.retained)
        await self.publication.checkpoint(STEP, extra={}, rewards={}, train=TRAIN)

    async def freeze_in(self, what: Callable[[], Awaitable[Any]]) -> "asyncio.Task[Any]":
        """Begin something, and return when half of it is written."""
        self.compute.freezes = True
        doing = asyncio.ensure_future(what())
        await asyncio.wait_for(self.compute.frozen.wait(), 10)
        return doing


class World:
    """A job with one record that every trainer has trained."""

    def __init__(self, context: Context, uid: str, folder: Path) -> None:
        self.context, self.uid, self._folder = context, uid, folder

    async def trainer(self) -> Trainer:
        """One that takes the job."""
        trainer = Trainer(self.context, await Hold.take(self.context, self.uid, before=None), self._folder)
        await trainer.publication.tidy()
        return trainer

    async def pointer(self) -> PolicyVersion:
        published = await (await self.context.bus.table(m.PolicyPublished)).get(self.uid)
        assert published is not None
        return published.version


@pytest.fixture
async def world(bus: Bus, store: TrajectoryStore, job_uid: str, tmp_path: Path) -> World:
    await store.create([spec_of(TrajectoryId(job_uid, 0, 0))])
    return World(await context_of("t0", default_settings(tmp_path), bus, store), job_uid, tmp_path)


def written(folder: Path) -> set[str]:
    return {(folder / name).read_text() for name in ("begun", "done")}


async def test_a_checkpoint_is_not_replaced_by_one_that_was_begun_before_it(world: World) -> None:
    old = await world.trainer()
    writing = await old.freeze_in(old.checkpoint)
    new = await world.trainer()
    await new.checkpoint()
    old.compute.woken.set()
    with pytest.raises(JigsawError):
        await writing
    newest = new.publication.checkpoints.newest_first()[0]
    manifest.verify(newest, contents=True)
    assert written(newest) == {"2"}


async def test_a_late_checkpoint_that_gets_through_is_the_older_one_and_takes_no_record_with_it(world: World) -> None:
    old = await world.trainer()
    writing = await old.freeze_in(old.checkpoint)
    new = Trainer(world.context, await Hold.take(world.context, world.uid, before=None), Path())  # tidies later
    old.compute.woken.set()
    with pytest.raises(Superseded):
        await writing
    assert await world.context.store.members(world.uid) == old.retained
    await new.checkpoint()
    assert [written(path) for path in new.publication.checkpoints.newest_first()] == [{"2"}]  # the late one was pruned
    assert await world.context.store.members(world.uid) == []


async def test_the_pointer_stays_at_a_successors_policy(world: World) -> None:
    old = await world.trainer()
    await old.publication.policy(STEP)
    writing = await old.freeze_in(lambda: old.publication.policy(STEP + 1))
    new = await world.trainer()
    await new.publication.policy(STEP)
    old.compute.woken.set()
    with pytest.raises(Superseded):
        await writing
    assert await world.pointer() == PolicyVersion(STEP, 2)


async def test_a_model_is_one_trainers_whole_work(world: World) -> None:
    old = await world.trainer()
    writing = await old.freeze_in(old.publication.model)
    new = await world.trainer()
    new_writing = await new.freeze_in(new.publication.model)
    old.compute.woken.set()
    with pytest.raises(JigsawError, match="can't be written"):
        await writing
    new.compute.woken.set()
    folder = await new_writing
    manifest.verify(folder, contents=True)
    assert written(folder) == {"2"}


@pytest.mark.parametrize("what", ["policy", "checkpoint", "model"])
async def test_one_that_was_replaced_before_begins_to_write_nothing(world: World, what: str) -> None:
    old = await world.trainer()
    await world.trainer()
    done = {"policy": lambda: old.publication.policy(STEP), "checkpoint": old.checkpoint, "model": old.publication.model}
    with pytest.raises(Superseded):
        await done[what]()
    assert not list(Path(world.context.settings.home).rglob("begun"))


async def test_an_incarnation_that_the_store_has_lost_is_not_given_again(world: World) -> None:
    for _ in range(3):
        last = await world.trainer()
    await last.checkpoint()
    await world.context.store.forget_job(world.uid)
    assert await world.context.store.hold_job(world.uid, owner="t") == 1
    await world.context.store.forget_job(world.uid)
    assert (await Hold.take(world.context, world.uid, before=None)).incarnation == 4


async def test_a_record_that_was_forgotten_is_not_brought_back_by_a_replaced_trainer(world: World) -> None:
    await world.trainer()
    await world.trainer()
    for held in (True, False):
        if not held:
            await world.context.store.forget_job(world.uid)
        with pytest.raises(JigsawError, match="STALE incarnation 1"):
            await world.context.store.create([spec_of(TrajectoryId(world.uid, 9, 0))], incarnation=1)
    assert await world.context.store.members(world.uid) == []
