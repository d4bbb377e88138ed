"""One step of a job as a pure state machine: which groups it waits for, which it must replace, when it is complete.

A group is complete when all its samples are settled (scored or failed). With fewer than two valid samples it is useless to
GRPO: it is dropped and another prompt takes its place, at most as many times as the step has groups, so that a step in
which nothing works is tried twice and then ends without a valid group. Settling is idempotent, so messages may come late,
twice or never (then the store is asked).
"""

from typing import Literal

import msgspec

Purpose = Literal["train", "eval"]
Settled = Literal["scored", "failed"]

MIN_VALID = 2


class IssuedGroup(msgspec.Struct):
    """A group that the step waits for."""

    group: int
    purpose: Purpose
    samples: int
    settled: dict[int, Settled] = {}
    handled: bool = False

    @property
    def complete(self) -> bool:
        """All samples are settled."""
        return len(self.settled) == self.samples

    @property
    def valid(self) -> int:
        """Samples with a score."""
        return sum(state == "scored" for state in self.settled.values())


class StepLedger:
    """What a step has issued and what has come back.

    Args:
        replacements: how many groups may be replaced.
    """

    def __init__(self, *, step: int, replacements: int) -> None:
        self.step = step
        self._groups: dict[int, IssuedGroup] = {}
        self._replacements = replacements

    def issue(self, group: int, *, purpose: Purpose, samples: int) -> None:
        """The step waits for this group, too."""
        self._groups[group] = IssuedGroup(group, purpose, samples, {})

    def settle(self, group: int, sample: int, state: Settled) -> None:
        """A sample reached a terminal state; unknown and repeated ones change nothing."""
        issued = self._groups.get(group)
        if issued is not None and sample < issued.samples:
            issued.settled.setdefault(sample, state)

    def reopen(self, group: int, sample: int) -> None:
        """A sample isn't settled after all: the store, which alone knows, has lost that."""
        self._groups[group].settled.pop(sample, None)

    def useless(self) -> list[tuple[int, int]]:
        """(group, sample) of the training groups that have turned out useless and haven't been counted yet."""
        return [(issued.group, sample) for issued in self._useless() for sample in range(issued.samples)]

    def take_replaceable(self) -> int:
        """How many training groups have just turned out useless and may be replaced; each is counted once."""
        count = 0
        for issued in self._useless():
            issued.handled = True
            if self._replacements > 0:
                self._replacements -= 1
                count += 1
        return count

    def _useless(self) -> list[IssuedGroup]:
        return [
            issued
            for issued in self._groups.values()
            if issued.purpose == "train" and issued.complete and issued.valid < MIN_VALID and not issued.handled
        ]

    @property
    def complete(self) -> bool:
        """Everything has come back."""
        return all(issued.complete for issued in self._groups.values())

    def present(self) -> list[tuple[int, int]]:
        """(group, sample) of everything that has come back."""
        return [(issued.group, sample) for issued in self._groups.values() for sample in sorted(issued.settled)]

    def missing(self) -> list[tuple[int, int]]:
        """(group, sample) of everything that hasn't come back."""
        return [
            (issued.group, sample)
            for issued in self._groups.values()
            for sample in range(issued.samples)
            if sample not in issued.settled
        ]

    def valid_groups(self) -> list[int]:
        """Training groups with enough valid samples."""
        return [
            issued.group
            for issued in self._groups.values()
            if issued.purpose == "train" and issued.complete and issued.valid >= MIN_VALID
        ]

    @property
    def counts(self) -> tuple[int, int]:
        """(settled, expected) samples."""
        return sum(len(issued.settled) for issued in self._groups.values()), sum(
            issued.samples for issued in self._groups.values()
        )


def is_evaluation_step(step: int, *, every: int, steps: int) -> bool:
    """Whether the policy after ``step`` optimiser steps is evaluated: the first, every ``every``-th, and the last."""
    return step % every == 0 or step == steps
