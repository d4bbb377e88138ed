"""What the trajectory store holds and what may be written to it; the client is in :mod:`libs.common.store`.

A worker owns a record from a claim or an adoption on, under an *epoch* that only grows. Every write by a worker carries
the epoch that it was given, and is refused once another one is in force.
"""

from typing import Any, Literal

import msgspec

from libs.common.tokens import TokenArray

TERMINAL = frozenset({"scored", "failed"})

State = Literal["pending", "running", "finished", "scored", "failed"]


class TrajectoryId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The identity of a trajectory; a job's groups are numbered once over its whole life."""

    job_uid: str
    group: int
    sample: int

    @property
    def member(self) -> str:
        """Name within the job."""
        return f"{self.group}.{self.sample}"

    def __str__(self) -> str:
        return f"{self.job_uid}/{self.member}"


class TrajectorySpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a trajectory starts from; never changes.

    Attributes:
        step: of the job that trains (or evaluates) its group. purpose: trained on, or held-out evaluation.
        prompt: the question as text, for people. prompt_ids: the rendered opening prompt.
        answer, row: what scorer and environment need. seed: of all randomness in this trajectory.
        max_new_tokens: sampled tokens over all turns. max_turns: model turns.
        max_attempts: ordinary failures that end it.
    """

    id: TrajectoryId
    step: int
    purpose: Literal["train", "eval"] = "train"
    prompt: str
    prompt_ids: list[int]
    answer: str
    row: dict[str, Any]
    seed: int
    temperature: float
    max_new_tokens: int
    max_turns: int
    max_attempts: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory as stored.

    Attributes:
        claims: given so far. failures: attempts that failed in an ordinary way (environment, tool, deadline).
        deaths: times that its worker, or the worker's engine, died under it.
        resumes: claims that found tokens. moves: planned transfers.
        recomputed: prompt and response tokens whose KV resumes and moves had to compute again.
    """

    spec: TrajectorySpec
    state: State
    epoch: int
    tokens: TokenArray
    text: str = ""
    turns: int = 0
    stop_reason: str = ""
    reward: float | None = None
    reason: str = ""
    error: str = ""
    owner: str = ""
    claims: int = 0
    failures: int = 0
    deaths: int = 0
    resumes: int = 0
    moves: int = 0
    recomputed: int = 0


# --- ownership -----------------------------------------------------------------------------------------------------------


class Claim(msgspec.Struct, frozen=True):
    """A trajectory that this worker owns until its lease runs out: what to continue, and the epoch to write with.

    Attributes:
        failures, deaths: so far, as in :class:`Record`. alone: it is a suspect and must run alone on its worker.
    """

    spec: TrajectorySpec
    epoch: int
    failures: int
    deaths: int
    alone: bool
    tokens: TokenArray


class NotClaimed(msgspec.Struct, frozen=True):
    """Why a claim wasn't given.

    ``held`` by another, ``later`` (backing off), ``poisoned`` (it has just failed, for killing its workers, and nobody else
    has told), ``gone``, or the state it is in.
    """

    why: str
    wait_ms: int = 0


class Offer(msgspec.Struct, frozen=True):
    """A trajectory that was transferred, and the epoch that the transfer gave it."""

    id: TrajectoryId
    epoch: int


# --- writes --------------------------------------------------------------------------------------------------------------


class Append(msgspec.Struct, frozen=True):
    """New tokens of a running trajectory, after the ``expected_length`` already stored."""

    id: TrajectoryId
    epoch: int
    expected_length: int
    tokens: TokenArray


class Finish(msgspec.Struct, frozen=True):
    """The last tokens of a trajectory, with its final text: state *finished*."""

    id: TrajectoryId
    epoch: int
    expected_length: int
    tokens: TokenArray
    stop_reason: str
    text: str
    turns: int


class Renew(msgspec.Struct, frozen=True):
    """Keep the lease for another ``ttl_ms``."""

    id: TrajectoryId
    epoch: int
    ttl_ms: int


class Release(msgspec.Struct, frozen=True):
    """Give a trajectory back unharmed; anyone may claim it."""

    id: TrajectoryId
    epoch: int


class Transfer(msgspec.Struct, frozen=True):
    """Give a trajectory to another worker, who has ``ttl_ms`` to adopt it. The answer is the epoch to adopt it with."""

    id: TrajectoryId
    epoch: int
    to: str
    ttl_ms: int


class Restart(msgspec.Struct, frozen=True):
    """Begin again: what it has so far can't be continued. The claim stays, the answer is its epoch from now on."""

    id: TrajectoryId
    epoch: int


class Alone(msgspec.Struct, frozen=True):
    """Until the claim ends, this worker runs nothing else beside it: its death would be this one's doing."""

    id: TrajectoryId
    epoch: int


class Fail(msgspec.Struct, frozen=True):
    """An attempt failed in an ordinary way.

    It is tried again after ``backoff_ms`` until ``max_attempts`` have failed; None never tries again. The answer is the
    state that it has now.
    """

    id: TrajectoryId
    epoch: int
    error: str
    backoff_ms: int | None


class Die(msgspec.Struct, frozen=True):
    """The worker's engine died under it, which may not have been its doing. The answer is the state that it has now.

    It waits to be claimed again, however often this happens; but two deaths *alone*, each without a single new token since
    its claim, fail it.
    """

    id: TrajectoryId
    epoch: int
    error: str


class Score(msgspec.Struct, frozen=True):
    """A score for what was finished under an epoch; None if it can't be scored, which fails the sample.

    The answer is whether it is effective: a record that was scored already, or was finished anew since, isn't touched.
    """

    id: TrajectoryId
    epoch: int
    reward: float | None
    reason: str


Write = Append | Finish | Renew | Release | Transfer | Restart | Alone | Fail | Die | Score
