"""Telling progress on a real bus: who was replaced can't, and a new life keeps what was told until it knows better."""

from pathlib import Path

import pytest

from libs.common import messages as m
from libs.common.bus import Bus
from libs.common.history import History
from libs.common.settings import default_settings
from libs.common.store import TrajectoryStore
from services.trainer.hold import Hold, Superseded
from services.trainer.progress import Progress
from tests.contexts import context_of

UID = "job"


def progress(step: int, history: History | None = None) -> m.JobProgress:
    return m.JobProgress(
        sender="t", job_uid=UID, phase=m.Phase.TRAIN, step=step, steps=9, settled=0, expected=0, history=history or History()
    )


async def test_who_was_replaced_cannot_tell(bus: Bus, store: TrajectoryStore, tmp_path: Path) -> None:
    context = await context_of("trainer-0", default_settings(tmp_path), bus, store)
    old, new = (Progress(context, Hold(context, UID, incarnation=number)) for number in (1, 2))
    table = await bus.table(m.JobProgress)
    await old.tell(lambda: progress(1))
    await old.tell(lambda: progress(2))
    await new.tell(lambda: progress(0))
    with pytest.raises(Superseded):
        await old.tell(lambda: progress(3))
    told = await table.get(UID)
    assert told is not None and (told.step, told.incarnation) == (0, 2)


async def test_a_new_life_finds_what_was_told(bus: Bus, store: TrajectoryStore, tmp_path: Path) -> None:
    context = await context_of("trainer-0", default_settings(tmp_path), bus, store)
    first, second = (Progress(context, Hold(context, UID, incarnation=number)) for number in (1, 2))
    assert await first.history() == History()
    await first.tell(lambda: progress(3, History(steps=3, trained=48)))
    assert (await second.history()).trained == 48
