"""How long bus and store may be away before a process gives up: one rule for both.

Whatever is asked of them may be repeated, so it is asked again until it is answered or :data:`PATIENCE_S` have passed since
the first failure. A process whose patience is over ends; its supervisor starts it again, and it goes on from what is stored.
"""

import time

from libs.common.errors import Unreachable

PATIENCE_S = 30.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


class Tries:
    """The tries of one operation.

    Args:
        whom: is asked, for the error. patience_s: from the first failure to the last try.
    """

    def __init__(self, whom: str, *, patience_s: float) -> None:
        self._whom, self._patience_s = whom, patience_s
        self._failures, self._since = 0, 0.0

    def failed(self, why: object) -> float:
        """Note a failure; returns how long to wait before the next try, in seconds.

        Raises:
            Unreachable: patience is over.
        """
        if not self._failures:
            self._since = time.monotonic()
        self._failures += 1
        if self.left_s <= 0:
            raise Unreachable(f"{self._whom} doesn't answer, for {self._patience_s:g} s now: {why}")
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 10), self.left_s)

    @property
    def left_s(self) -> float:
        """Patience that is left, in seconds."""
        return self._since + self._patience_s - time.monotonic() if self._failures else self._patience_s
