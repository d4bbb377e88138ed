"""What runs inside a scorer's worker process: load the scorer once, call it, contain whatever it does.

Invariant: only built-in types leave the process. An exception or number of a user's own class would be unpickled, and so
its module imported, in the service.
"""

import math
import numbers
import os
import signal
from collections.abc import Mapping
from typing import Any, Literal

from libs.common.child import die_with_parent
from libs.rewards.answers import shorten
from libs.rewards.loading import MAX_REASON, Contained, loaded
from libs.rewards.score import Score

Answer = tuple[Literal["scored", "failed", "unloadable"], float, str]
"""Status, reward (0 unless scored), reason."""


def initialise(parent_pid: int, scorer: bytes) -> None:
    """Prepare a fresh worker: tie it to its parent, make it killable at once, import the scorer outside any time limit.

    On Linux the kernel kills the worker with its parent, whatever it is doing; elsewhere it ends once it looks for work.
    """
    die_with_parent()
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent died before it could be watched
    # A Python-level handler waits for native code (a regular expression that backtracks for ever) to return.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    loaded(scorer)


def run(scorer: bytes, completion_text: str, answer: str, row: Mapping[str, Any]) -> Answer:
    """Score one completion with the encoded :class:`~libs.rewards.resolve.Scorer`; never raises."""
    function, problem = loaded(scorer)
    if function is None:
        return "unloadable", 0.0, problem
    with Contained() as contained:
        return _answer(function(completion_text, answer, row))
    return "failed", 0.0, f"the scorer raised {contained.problem}"


def _answer(value: object) -> Answer:
    """What a scorer returned, as an answer: a Score, a real number, or (number, reason); anything else has failed."""
    reward, reason = value, ""
    if isinstance(value, Score):
        reward, reason = value.reward, value.reason
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
        reward, reason = value
    if not isinstance(reward, numbers.Real):
        return "failed", 0.0, f"the scorer returned {type(value).__name__}, not a number or (number, reason)"
    number = float(reward)
    if not math.isfinite(number):
        return "failed", 0.0, f"the scorer returned {number}, not a finite number"
    return "scored", number, shorten(reason, MAX_REASON)
