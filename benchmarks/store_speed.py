"""The trajectory store alone: a checkpoint for each of many trajectories in one pipelined round trip.

Through the client that the services use, on a Valkey of its own with the node's settings (append-only file, fsync every
second). One append is 32 tokens, the default checkpoint.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np

from benchmarks.report import Readings, Report, ratios
from libs.common.errors import JigsawError
from libs.common.store import TrajectoryStore
from libs.common.tokens import PolicyVersion, TokenArray, sampled
from libs.common.trajectory import Append, Claim, Restart, TrajectoryId, TrajectorySpec

CONCURRENT = (1, 100, 1000)
COMPARED = 100
"""Trajectories per round trip where short ones are compared with long ones."""
TOKENS, LONG = 32, 8192
LEASE_MS = 3_600_000


class Trajectories:
    """Claimed trajectories that grow together.

    Args:
        length: tokens of each at the start of every round trip.
    """

    def __init__(self, store: TrajectoryStore, claims: Sequence[Claim], *, length: int) -> None:
        self._store, self._claims = store, claims
        self._first, self._length = length, 0

    @classmethod
    async def claimed(cls, store: TrajectoryStore, count: int, *, length: int) -> Self:
        """New trajectories of a job of their own."""
        ids = [TrajectoryId(f"store-{count}-{length}", 0, sample) for sample in range(count)]
        await store.create([_spec(id) for id in ids])
        claims = await store.claim(ids, owner="benchmark", ttl_ms=LEASE_MS)
        made = cls(store, [claim for claim in claims if isinstance(claim, Claim)], length=length)
        if length:
            await made._append(_tokens(length))
        return made

    async def round_trip(self) -> float:
        """Seconds of one checkpoint for all; before it short ones begin anew, untimed, while long ones just go on."""
        if not self._first:
            await self._begin_anew()
        return await self._append(_tokens(TOKENS))

    async def _begin_anew(self) -> None:
        epochs = await self._store.write([Restart(claim.spec.id, claim.epoch) for claim in self._claims])
        if not all(isinstance(epoch, int) for epoch in epochs):
            raise JigsawError("the store refused to let a trajectory begin anew")
        self._claims = [
            msgspec.structs.replace(claim, epoch=epoch) for claim, epoch in zip(self._claims, epochs, strict=True)
        ]
        self._length = 0

    async def _append(self, tokens: TokenArray) -> float:
        writes = [Append(claim.spec.id, claim.epoch, self._length, tokens) for claim in self._claims]
        started = time.perf_counter()
        answers = await self._store.write(writes)
        taken = time.perf_counter() - started
        if answers != [1] * len(writes):
            raise JigsawError("the store refused an append")
        self._length += len(tokens)
        return taken


async def measure(report: Report, url: str, *, rounds: int) -> None:
    """``rounds`` round trips of each number of trajectories, in turn, after one of warm-up."""
    store = await TrajectoryStore.connect(url)
    try:
        await store.install(replace=True)
        short = {count: await Trajectories.claimed(store, count, length=0) for count in CONCURRENT}
        long = await Trajectories.claimed(store, COMPARED, length=LONG)
        taken: dict[int, list[float]] = {count: [] for count in CONCURRENT}
        taken_long: list[float] = []
        for _ in range(rounds + 1):
            for count, trajectories in short.items():
                taken[count].append(await trajectories.round_trip())
            taken_long.append(await long.round_trip())
    finally:
        await store.close()
    _note(report, {count: seconds[1:] for count, seconds in taken.items()}, taken_long[1:])


def _note(report: Report, taken: dict[int, list[float]], taken_long: list[float]) -> None:
    for count, seconds in taken.items():
        name = f"store.{count}"
        report.add(f"{name}.appends_per_s", count / statistics.median(seconds), "1/s", f"{TOKENS} tokens each")
        report.add(f"{name}.round_trip_ms", 1000 * statistics.median(seconds), "ms", "median")
        report.add(f"{name}.round_trip_p95_ms", 1000 * float(np.percentile(seconds, 95)), "ms", "95th percentile")
    one, most = CONCURRENT[0], CONCURRENT[-1]
    gain = most * statistics.median(taken[one]) / statistics.median(taken[most])
    report.add("store.batching", gain, "x", f"appends/s of {most} in one round trip over one by one")
    quartiles = np.percentile(ratios(taken_long, taken[COMPARED]).values, [25, 50, 75])
    report.add("store.length_ratio", Readings.of(quartiles.tolist()), "x", f"at {LONG} tokens over at 0 (quartiles): 1")


def _tokens(count: int) -> TokenArray:
    return sampled(range(count), [-1.0] * count, PolicyVersion(1, 1))


def _spec(id: TrajectoryId) -> TrajectorySpec:
    return TrajectorySpec(
        id=id,
        step=0,
        prompt="?",
        prompt_ids=[1],
        answer="",
        row={},
        seed=0,
        temperature=1.0,
        max_new_tokens=1_000_000,
        max_turns=1,
        max_attempts=3,
    )
