"""The witness: looks at trajectories in the store as often as it can, and remembers all that it has ever seen of them.

What must hold of every look:

- All tokens of a trajectory were sampled from the policy of its step.
- What was there at the look before is there still, every bit of it (ids, log-probs, versions); anything new comes after it.
- Where the store may have lost what was written last, because the end of its log was torn off, that holds of what had been
  seen long enough before. The rest may be gone, and grows again with the same ids: they follow from the trajectory's seed
  and its step's policy alone. So all that is ever seen of a trajectory are beginnings of one and the same sequence of ids.
"""

import bisect
from collections.abc import Sequence

import msgspec

from libs.common.tokens import TOKEN
from libs.common.trajectory import Record, TrajectoryId

LATE_S = 1.0
"""From the moment that something can be seen to the one that it is in the log: a server whose disk is slow appends late."""


class Testimony(msgspec.Struct, frozen=True):
    """What a witness can say.

    Attributes:
        seen: trajectories that it saw at all. running: those of them that it saw before they had ended, with tokens.
        grown: times that it saw one that had more tokens than at the look before, which had some already.
        taken_back: tokens that the store had lost, by what was seen of them.
    """

    seen: int = 0
    running: int = 0
    grown: int = 0
    taken_back: int = 0


class _Seen:
    """What was seen of a trajectory.

    Attributes:
        longest: all ids that were ever seen. tokens: at the last look, in bytes.
        safe: so many tokens of them can't be lost.
    """

    def __init__(self) -> None:
        self.longest, self.tokens, self.safe = b"", b"", 0
        self.ran = False
        self._lengths: list[tuple[float, int]] = []

    def note(self, at_s: float, tokens: bytes, *, ids: bytes) -> None:
        """A look that was begun at a time."""
        self.tokens = tokens
        self.longest = max(self.longest, ids, key=len)
        if not self._lengths or self._lengths[-1][1] != self.length:
            self._lengths.append((at_s, self.length))

    @property
    def length(self) -> int:
        """Tokens at the last look."""
        return len(self.tokens) // TOKEN.itemsize

    def length_at(self, time_s: float) -> int:
        """Tokens at the last look that was begun before a time."""
        before = bisect.bisect_left(self._lengths, (time_s, 0))
        return self._lengths[before - 1][1] if before else 0


class Witness:
    """Compares what it is shown with what it saw before; what can't be is in ``broken``, in words."""

    def __init__(self) -> None:
        self.broken: list[str] = []
        self._seen: dict[TrajectoryId, _Seen] = {}
        self._lost_at = float("-inf")
        self._grown = self._taken_back = 0

    def see(self, records: Sequence[Record], *, asked_at: float) -> None:
        """Records as the store has them; it was asked at that time, in seconds that only grow."""
        for record in records:
            self._compare(record, asked_at)

    def expect_loss(self, *, written_after: float, now: float) -> None:
        """The store, which is away at the moment, may have lost what was written after a time."""
        self._lost_at = now
        for seen in self._seen.values():
            seen.safe = min(seen.safe, seen.length_at(written_after - LATE_S))

    @property
    def testimony(self) -> Testimony:
        """What it has seen so far."""
        running = sum(seen.ran for seen in self._seen.values())
        return Testimony(len(self._seen), running, self._grown, self._taken_back)

    def _compare(self, record: Record, asked_at: float) -> None:
        id, tokens, ids = record.spec.id, record.tokens.tobytes(), record.tokens["id"].tobytes()
        seen = self._seen.setdefault(id, _Seen())
        had, has, policies = seen.length, len(record.tokens), set(record.tokens["step"].tolist())
        if policies - {record.spec.step}:
            self.broken.append(f"{id} of step {record.spec.step} has tokens of the policies {policies}")
        if not (ids.startswith(seen.longest) or seen.longest.startswith(ids)):
            self.broken.append(f"{id} has other tokens than were seen before: {has} now, {len(seen.longest) // 4} then")
        elif not tokens.startswith(seen.tokens[: seen.safe * TOKEN.itemsize]):
            self.broken.append(f"{id} had {had} tokens, {seen.safe} of them safe, and has {has} that don't begin with those")
        self._grown += has > had > 0
        self._taken_back += max(0, had - has)
        seen.ran |= has > 0 and record.state == "running"
        seen.note(asked_at, tokens, ids=ids)
        if asked_at > self._lost_at:  # else it may be an answer from before the loss
            seen.safe = has
