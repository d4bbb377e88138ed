"""What a scheduling policy is: a view in, a plan out.

A policy has no clock, no randomness and no I/O; it may remember its own earlier plans, and a new one must be able to start
from any view (the scheduler may have been restarted).
"""

from typing import Protocol

import msgspec

from services.scheduler.view import View


class Placement(msgspec.Struct, frozen=True):
    """A job's step loop goes to a trainer instance; for a queued job this admits it."""

    job_uid: str
    trainer: str


class Grant(msgspec.Struct, frozen=True):
    """An instance holds a job, with these units of its device; no units: paused, its state kept."""

    instance: str
    job_uid: str
    units: tuple[int, ...]


class Move(msgspec.Struct, frozen=True):
    """So many running trajectories of a job go from one rollout instance to another, which computes their KV cache anew."""

    job_uid: str
    source: str
    target: str
    count: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole decision: who holds which job with what. An instance not named for a job is taken off it.

    Attributes:
        moves: what is merged. reason: why it is so, for people.
        gain_s: seconds of the objective that the policy expects to gain over leaving everything as it is; 0 if it doesn't
            predict.
    """

    placements: tuple[Placement, ...] = ()
    grants: tuple[Grant, ...] = ()
    moves: tuple[Move, ...] = ()
    reason: str
    gain_s: float = 0.0


class Policy(Protocol):
    """Divides devices among jobs.

    Attributes:
        name: by which it is chosen.
        watches_sub_stages: whether it is asked at every change of a sub-stage, too, and now and then; else only when jobs,
            workers and stages change.
    """

    name: str
    watches_sub_stages: bool

    def decide(self, view: View) -> Plan:
        """The plan for the situation; called at each event that may change it."""
