"""What scoring a trajectory gives: a scorer's own answer (:class:`Score`) and the pool's verdict about it.

Invariant: a verdict has a finite reward exactly when its outcome is ``SCORED``.
"""

from enum import StrEnum

import msgspec


class Score(msgspec.Struct, frozen=True):
    """What a scorer thinks of a completion; ``reason`` is one short line for people. A bad completion is reward 0."""

    reward: float
    reason: str


class Outcome(StrEnum):
    """Whether there is a reward, and if not, whose fault that is.

    SCORED: the scorer answered. FAILED: the scorer looped, raised, or answered something that isn't a finite number; trying
    again gives the same. LOST: worker processes kept dying under it (out of memory, killed from outside), which says
    nothing about the completion.
    """

    SCORED = "scored"
    FAILED = "failed"
    LOST = "lost"


class Verdict(msgspec.Struct, frozen=True):
    """The pool's answer for one trajectory.

    Attributes:
        reward: finite, or None unless scored.
        reason: one line: why this reward, or why there is none.
    """

    outcome: Outcome
    reward: float | None
    reason: str
