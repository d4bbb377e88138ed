"""What a job's trainer tells of its progress: the current value in KV, for the scheduler and for people.

A trainer that was frozen and replaced can't tell any more: what it says would make the scheduler give units to the wrong
stage. So the value carries the incarnation of who told it, and is set by compare-and-set.
"""

from collections.abc import Callable

import anyio
import msgspec

from libs.common import messages as m
from libs.common.history import History
from libs.common.service import Context
from libs.common.tables import Table
from services.trainer.hold import Hold, Superseded


class Progress:
    """Tells for one life of a job's trainer.

    Args:
        hold: of this life.
    """

    def __init__(self, context: Context, hold: Hold) -> None:
        self._bus, self._uid, self._incarnation = context.bus, hold.job_uid, hold.incarnation
        self._telling = anyio.Lock()
        self._table: Table[m.JobProgress] | None = None
        self._revision = 0

    async def history(self) -> History:
        """What an earlier life had told of the job's history; empty if there was none."""
        entry = await (await self._progress()).entry(self._uid)
        return History() if entry is None or entry.value is None else entry.value.history

    async def tell(self, current: Callable[[], m.JobProgress]) -> None:
        """Set the value to what ``current`` returns once it is its turn.

        Raises:
            Superseded: a newer life has told something.
        """
        async with self._telling:
            table = await self._progress()
            told = msgspec.structs.replace(current(), incarnation=self._incarnation)
            while not (revision := await table.swap(self._uid, told, expected_revision=self._revision)):
                entry = await table.entry(self._uid)
                if entry is not None and entry.value is not None and entry.value.incarnation > self._incarnation:
                    raise Superseded(self._uid)
                self._revision = entry.revision if entry else 0
            self._revision = revision

    async def _progress(self) -> Table[m.JobProgress]:
        if self._table is None:
            self._table = await self._bus.table(m.JobProgress)
        return self._table
