"""The trajectory store's rules for one record as a plain Python model, to compare the server with.

It is written from what the rules say, not from how the server keeps them: it knows whether a lease has time left instead of
when it ends, and whether a claim has got any further instead of how many tokens it began with.
"""

from enum import Enum

import msgspec

from libs.common.trajectory import (
    Alone,
    Append,
    Die,
    Fail,
    Finish,
    Release,
    Renew,
    Restart,
    Score,
    State,
    Transfer,
    Write,
)


class Refused(Enum):
    """Why a write isn't carried out."""

    STALE = "another epoch is in force, or nobody runs it"
    LENGTH = "not the tokens that come next"


Answer = int | str | Refused


class ModelRecord(msgspec.Struct, kw_only=True):
    """A record as it should be.

    Attributes:
        leased: the lease has time left. waiting: backing off. grown: the claim has added a token.
        offered: handed over, and not adopted yet.
        ended_by, ended_with: what ended an epoch last, which one, and what was answered.
        killed_alone: deaths alone before the first new token. tokens: ids.
    """

    prompt_tokens: int
    max_failures: int
    state: State = "pending"
    epoch: int = 0
    owner: str = ""
    leased: bool = False
    waiting: bool = False
    grown: bool = False
    offered: bool = False
    alone: bool = False
    killed_alone: int = 0
    claims: int = 0
    failures: int = 0
    deaths: int = 0
    resumes: int = 0
    moves: int = 0
    recomputed: int = 0
    error: str = ""
    ended_by: tuple[type, int] | None = None
    ended_with: Answer = 0
    tokens: list[int] = []
    text: str = ""
    reward: float | None = None

    @property
    def seen_state(self) -> str:
        """The state as the store tells it."""
        return "expired" if self.state == "running" and not self.leased else self.state

    def claim(self, owner: str, *, ttl_ms: int) -> str:
        """Answers ``claimed`` or why not."""
        if self.state == "running":
            if self.leased:
                return "held"
            if not self.offered and self._died(self.error) == "failed":
                return "poisoned"
        elif self.state != "pending":
            return self.state
        elif self.waiting:
            return "later"
        self.state, self.claims = "running", self.claims + 1
        if self.tokens:
            self.resumes += 1
            self.recomputed += self.prompt_tokens + len(self.tokens)
        self._take_over(owner, ttl_ms)
        return "claimed"

    def adopt(self, epoch: int, owner: str, *, ttl_ms: int) -> str:
        """Answers ``claimed`` or why not."""
        if self.state != "running":
            return self.state
        if (self.epoch, self.owner) != (epoch, owner):
            return "held"
        self.recomputed += self.prompt_tokens + len(self.tokens)
        self._take_over(owner, ttl_ms)
        return "claimed"

    def write(self, write: Write) -> Answer:
        """Carry out a write, or refuse it."""
        if isinstance(write, Score):
            return self._score(write)
        if isinstance(write, Finish) and (self.state, self.epoch) == ("finished", write.epoch):
            return 0
        if self.state != "running" or write.epoch != self.epoch:
            is_repeat = self.ended_by == (type(write), write.epoch)
            return self.ended_with if is_repeat else Refused.STALE
        answer = self._carry_out(write)
        if isinstance(write, Release | Transfer | Restart | Fail | Die):
            self.ended_by, self.ended_with = (type(write), write.epoch), answer
        return answer

    def _carry_out(self, write: Write) -> Answer:
        match write:
            case Append() | Finish():
                return self._put(write)
            case Renew():
                self.leased = write.ttl_ms > 0
            case Alone():
                self.alone = True
            case Restart():
                self.tokens, self.grown = [], False
                self.epoch += 1
                return self.epoch
            case Release():
                self._give_back("pending")
            case Fail():
                return self._fail(write)
            case Die():
                return self._died(write.error)
            case Transfer():
                self.moves += 1
                self.epoch += 1
                self.owner, self.leased, self.alone, self.offered = write.to, write.ttl_ms > 0, False, True
                return self.epoch
        return 1

    def _take_over(self, owner: str, ttl_ms: int) -> None:
        self.owner, self.leased, self.grown, self.alone, self.offered = owner, ttl_ms > 0, False, False, False

    def _give_back(self, state: State) -> None:
        self.state, self.leased = state, False
        self.epoch += 1

    def _put(self, write: Append | Finish) -> Answer:
        new, at = write.tokens["id"].tolist(), write.expected_length
        if at == len(self.tokens):
            self.tokens = self.tokens + new
            self.grown = self.grown or bool(new)
        else:
            repeated = self.tokens[at:] if isinstance(write, Finish) else self.tokens[at : at + len(new)]
            if at > len(self.tokens) or repeated != new:
                return Refused.LENGTH
        if isinstance(write, Finish):
            self.state, self.text = "finished", write.text
        return 1

    def _fail(self, write: Fail) -> str:
        self.failures += 1
        again = write.backoff_ms is not None and self.failures < self.max_failures
        self.waiting = again and bool(write.backoff_ms)
        self.error = write.error
        self._give_back("pending" if again else "failed")
        return self.state

    def _died(self, error: str) -> str:
        self.deaths += 1
        self.killed_alone += self.alone and not self.grown
        poison = self.killed_alone >= 2
        self.error = error
        if poison:
            self.error = "killed its worker twice while it ran alone" + (f"; last error: {error}" if error else "")
        self._give_back("failed" if poison else "pending")
        return self.state

    def _score(self, write: Score) -> int:
        if self.state != "finished" or write.epoch != self.epoch:
            return 0
        self.state, self.reward = ("failed", None) if write.reward is None else ("scored", write.reward)
        if write.reward is None:
            self.error = write.reason
        return 1
