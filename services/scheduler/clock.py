"""Time as the scheduler counts it: only ever forward, and never faster than it is being told.

Time-outs must not fire because a clock was set, a machine slept or the scheduler was frozen: in that time it couldn't have
heard from anyone. So a gap between two events counts for :data:`LONGEST_GAP_S` at most.
"""

LONGEST_GAP_S = 5.0


class SteadyClock:
    """Seconds since the first event, immune to jumps of the clock that the events carry."""

    def __init__(self) -> None:
        self._last: float | None = None
        self.steady_s = 0.0

    def advance(self, now: float) -> float:
        """Take note of the time ``now`` (seconds, any origin) and return the steady time in seconds."""
        if self._last is not None:
            self.steady_s += min(max(now - self._last, 0.0), LONGEST_GAP_S)
        self._last = now
        return self.steady_s
