"""Random calls on one record of the trajectory store, and what the record must be after each of them."""

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

from libs.common.tokens import PolicyVersion, TokenArray, from_bytes, sampled
from libs.common.trajectory import (
    TERMINAL,
    Alone,
    Append,
    Claim,
    Die,
    Fail,
    Finish,
    NotClaimed,
    Record,
    Release,
    Renew,
    Restart,
    Score,
    TrajectoryId,
    TrajectorySpec,
    Transfer,
    Write,
)
from tests.trajectories import spec_of
from tests.trajectory_model import ModelRecord

PROMPT = [5, 6, 7]
MAX_FAILURES = 3
LONG_MS = 10**7
COUNTS = ("claims", "failures", "deaths", "resumes", "moves", "recomputed")
WEIGHTS = {
    "claim": 8.0,
    "transfer": 1.0,
    "adopt": 1.0,
    "append": 2.0,
    "append_again": 1.0,
    "append_wrong": 0.3,
    "finish": 0.2,
    "finish_again": 0.2,
    "finish_wrong": 0.2,
    "renew": 0.5,
    "release": 1.0,
    "restart": 0.5,
    "alone": 1.5,
    "die": 1.0,
    "fail": 0.5,
    "score": 0.3,
    "unscorable": 0.1,
    "dies_alone": 0.5,
    "two_at_once": 0.5,
    "everyone": 0.3,
    "lease_ends": 1.0,
    "wait_ends": 0.5,
}
AGES = (0, 0, 0, 0, 0, 1, 2, 3, -1)


class Call(msgspec.Struct, frozen=True):
    """What one worker does next.

    Attributes:
        age: how many epochs it is behind the one in force; -1 is an epoch that nobody was ever given.
        count: of tokens. lasts: whether the lease that it asks for has any time.
        retry: after a failure, in milliseconds; None never.
    """

    kind: str
    worker: str
    age: int
    count: int
    lasts: bool
    retry: int | None


def sequence(seed: int, *, length: int) -> list[Call]:
    """Random calls. How likely each kind is depends on the seed, too: what is rare together comes together in some."""
    random = Random(seed)
    weights = [weight * random.choice((0.1, 1, 4)) for weight in WEIGHTS.values()]
    weights[list(WEIGHTS).index("claim")] = WEIGHTS["claim"]
    return [
        Call(
            kind=kind,
            worker=random.choice("abc"),
            age=random.choice(AGES),
            count=random.randrange(4),
            lasts=random.random() < 0.6,
            retry=random.choice((0, 0, 0, LONG_MS, LONG_MS, None)),
        )
        for kind in random.choices(list(WEIGHTS), weights, k=length)
    ]


class Wrong(Exception):
    """A record, or an answer, isn't what it should be; ``calls`` are those that led there."""

    def __init__(self, life: "Life", problem: str) -> None:
        self.seed, self.calls = life.id.sample, life.calls[: life.begun]
        super().__init__(problem)


class Life:
    """One record: what it should be, what the server had after the last call, and how many calls have begun."""

    def __init__(self, id: TrajectoryId, calls: Sequence[Call]) -> None:
        self.id, self.calls, self.begun = id, calls, 0
        self.key = f"jigsaw:{{{id.job_uid}}}:{id.member}"
        self.model = ModelRecord(prompt_tokens=len(PROMPT), max_failures=MAX_FAILURES)
        self.before: dict[str, Any] = {}
        self.given = [0]  # every epoch that has been in force
        self._next_token = 0

    @property
    def spec(self) -> TrajectorySpec:
        """What the record is created from."""
        return spec_of(self.id, prompt_ids=PROMPT, max_attempts=MAX_FAILURES)

    @property
    def call(self) -> Call:
        """The call that has begun last."""
        return self.calls[self.begun - 1]

    @property
    def taker(self) -> str:
        """Who claims or adopts; mostly the one that a transfer was meant for."""
        return self.model.owner if self.call.kind == "adopt" and self.call.count else self.call.worker

    @property
    def epoch(self) -> int:
        """The epoch that the caller believes in."""
        return self.given[max(0, len(self.given) - 1 - self.call.age)] if self.call.age >= 0 else self.model.epoch + 1

    @property
    def read_epoch(self) -> int:
        """The epoch of the record that was read to be scored; mostly it is as it was."""
        return self.model.epoch if self.call.lasts else self.epoch

    def writes(self) -> list[Write]:
        """What the caller writes in one round trip."""
        call, id, epoch, at = self.call, self.id, self.epoch, len(self.model.tokens)
        back = min(call.count, at)
        ttl_ms = LONG_MS if call.lasts else 0
        match call.kind:
            case "append":
                return [Append(id, epoch, at, self._new(call.count))]
            case "append_again":
                return [Append(id, epoch, at - back, _tokens(self.model.tokens[at - back :]))]
            case "append_wrong":
                return [Append(id, epoch, at - back if call.lasts else at + 1, self._new(call.count))]
            case "finish":
                return [Finish(id, epoch, at, self._new(call.count), "stop", f"text {at}", 1)]
            case "finish_again":
                return [Finish(id, epoch, at - back, _tokens(self.model.tokens[at - back :]), "stop", "again", 1)]
            case "finish_wrong":
                return [Finish(id, epoch, at + 1, self._new(call.count), "stop", "wrong", 1)]
            case "transfer":
                return [Transfer(id, epoch, call.worker, ttl_ms)]
            case "fail":
                return [Fail(id, epoch, "environment", call.retry)]
            case "die":
                return [Die(id, epoch, f"engine of {call.worker}")]
            case "score":
                return [Score(id, self.read_epoch, call.count / 4, "reason")]
            case "unscorable":
                return [Score(id, self.read_epoch, None, "no score")]
            case "renew":
                return [Renew(id, epoch, ttl_ms)]
            case "dies_alone":
                return [Alone(id, epoch), Die(id, epoch, f"engine of {call.worker}")]
            case "two_at_once":  # the owner checkpoints and gives back; another, who may be the same, goes on
                own = self.model.epoch
                first = [Append(id, own, at, self._new(call.count)), Release(id, own)]
                return [*first, Append(id, epoch, at + call.count, self._new(1)), Renew(id, epoch, ttl_ms)]
            case "everyone":  # whoever ever had it, and whoever might: one owner at most gets through
                return [Renew(id, epoch, LONG_MS) for epoch in (*self.given, self.model.epoch + 1)]
        return [{"release": Release, "restart": Restart, "alone": Alone}[call.kind](id, epoch)]

    def must(self, what: str, found: object, expected: object) -> None:
        """Something found must be as expected.

        Raises:
            Wrong: it isn't.
        """
        if found != expected:
            raise Wrong(self, f"{what} is {found!r} and should be {expected!r}")

    def check(self, raw: dict[bytes, bytes], tokens: bytes | None, state: bytes) -> None:
        """The record is what the model says, and may follow on what it was."""
        now: dict[str, Any] = {name.decode(): value.decode() for name, value in raw.items() if name != b"spec"}
        now["tokens"] = from_bytes(tokens or b"")["id"].tolist()
        self.must("state as told", state.decode(), self.model.seen_state)
        for name in ("state", "tokens", "owner", "error", "text"):
            self.must(name, now.get(name, ""), getattr(self.model, name))
        for name in ("epoch", *COUNTS):
            self.must(name, int(now[name]), getattr(self.model, name))
        self.must("lonely_deaths", int(now["lonely_deaths"]), self.model.killed_alone)
        if now["state"] == "failed":
            blamed = int(now["failures"]) > 0 or int(now["lonely_deaths"]) >= 2 or "stop_reason" in now
            self.must("a cause of failure other than deaths", blamed, True)
        if self.before:
            self._check_against_the_past(now, self.before)
        self.before = now

    def _check_against_the_past(self, now: dict[str, Any], before: dict[str, Any]) -> None:
        """What holds whatever the model says."""
        epoch, was = int(now["epoch"]), int(before["epoch"])
        if epoch != was:
            self.given.append(epoch)
        self.must("order of epochs", epoch >= was, True)
        if before["state"] == "running" == now["state"] and before["owner"] != now["owner"]:
            self.must("another owner's greater epoch", epoch > was, True)
        if before["state"] in TERMINAL:
            ignored = dict.fromkeys(("expires", "not_before"))
            self.must("what had ended", now | ignored, before | ignored)

    def check_given(self, got: Claim | NotClaimed, expected: str) -> None:
        """A claim or an adoption was answered as the model says."""
        record = self.model
        if isinstance(got, NotClaimed):
            self.must("answer", got.why, expected)
            self.must("a time to wait", got.wait_ms > 0, expected == "later")
            return
        self.must("answer", "claimed", expected)
        if self.call.kind == "claim":  # which epoch is the server's affair, as long as it grows
            self.must("a higher epoch", got.epoch > record.epoch, True)
            record.epoch = got.epoch
        counts = (record.epoch, record.failures, record.deaths, record.deaths >= 2)
        self.must("spec", got.spec, self.spec)
        self.must("epoch, failures, deaths, alone", (got.epoch, got.failures, got.deaths, got.alone), counts)
        self.must("tokens", got.tokens["id"].tolist(), record.tokens)

    def check_as_read(self, stored: Record | None) -> None:
        """The store's own client reads the same."""
        for name in ("state", "epoch", "owner", "error", "text", "reward", *COUNTS):
            self.must(name, getattr(stored, name), getattr(self.model, name))
        self.must("tokens", stored and stored.tokens["id"].tolist(), self.model.tokens)

    def _new(self, count: int) -> TokenArray:
        """Tokens that nobody has written before."""
        self._next_token += count
        return _tokens(range(self._next_token - count, self._next_token))


def _tokens(ids: "range | list[int]") -> TokenArray:
    return sampled(ids, [-0.5] * len(ids), PolicyVersion(1))
