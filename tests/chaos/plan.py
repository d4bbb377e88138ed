"""Which faults strike at which moments: drawn from a seed."""

import random

import msgspec

from tests.chaos.attack import Kind
from tests.chaos.watch import Moment

CELLS = len(Kind) * len(Moment)


class Planned(msgspec.Struct, frozen=True):
    """A fault to come: what, at which moment of a job's step, and how long after the one before."""

    kind: Kind
    moment: Moment
    pause_s: float


def planned(seed: int, count: int) -> list[Planned]:
    """``count`` faults of which no pair of kind and moment comes again before all have come; pauses up to 0.2 s.

    What is drawn for a pair depends on no other one: so a seed that has found a bug still brings the same faults in the same
    order when there are new kinds, which come in between.
    """
    plan = list[Planned]()
    for turn in range(-(-count // CELLS)):
        drawn = [
            (draw.random(), Planned(kind, moment, draw.uniform(0.0, 0.2)))
            for kind in Kind
            for moment in Moment
            for draw in [random.Random(f"{seed}, {turn}, {kind}, {moment}")]
        ]
        plan += [one for _, one in sorted(drawn, key=lambda pair: pair[0])]
    return plan[:count]
