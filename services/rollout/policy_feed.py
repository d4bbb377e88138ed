"""The versions of a job's policy as its trainer publishes them, each fetched onto this machine before it is told of."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import anyio
from structlog.typing import FilteringBoundLogger

from libs.common import messages as m
from libs.common.bus import Bus
from libs.common.errors import JigsawError
from libs.common.policy_store import PolicyStore
from libs.common.tables import Table
from libs.common.tokens import PolicyVersion

RETRY_FETCH_S = 1.0


class PolicyFeed:
    """Follows one job's pointer; a version that another one replaces before it is fetched is passed over."""

    def __init__(self, bus: Bus, policies: PolicyStore, job_uid: str, *, log: FilteringBoundLogger) -> None:
        self._bus, self._policies, self._uid, self._log = bus, policies, job_uid, log

    async def versions(self) -> AsyncIterator[tuple[PolicyVersion, Path]]:
        """The current version and every later one, with the folder where it lies."""
        table = await self._bus.table(m.PolicyPublished)
        async for change in table.watch(self._uid):
            if change.value is not None and (folder := await self._fetched(table, change.value)) is not None:
                yield change.value.version, folder

    async def prune(self, *, before: PolicyVersion) -> None:
        """Delete this machine's copies of older versions."""
        await anyio.to_thread.run_sync(partial(self._policies.prune_copies, self._uid, before=before))

    async def forget(self) -> None:
        """Delete all of this machine's copies."""
        await anyio.to_thread.run_sync(self._policies.forget_copies, self._uid)

    async def _fetched(self, table: Table[m.PolicyPublished], published: m.PolicyPublished) -> Path | None:
        """The folder of a version; None if it has been replaced by a newer one, which the watch tells of."""
        fetch = partial(self._policies.fetch, self._uid, published.version, digest=published.digest)
        while True:
            try:
                return await anyio.to_thread.run_sync(fetch)
            except JigsawError as error:
                self._log.warning("policy_not_fetched", policy=str(published.version), reason=str(error))
                current = await table.get(self._uid)
                if current is None or current.version != published.version:
                    return None
                await anyio.sleep(RETRY_FETCH_S)
