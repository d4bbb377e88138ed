"""What runs inside a scorer's worker process: load the scorer once, call it, contain whatever it does.

Invariant: only built-in types leave the process. An exception or number of a user's own class would be unpickled, and so
its module imported, in the service.
"""

import ctypes
import functools
import importlib
import inspect
import math
import numbers
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal

import msgspec

from libs.rewards.answers import shorten
from libs.rewards.resolve import Scorer
from libs.rewards.score import Score

Answer = tuple[Literal["scored", "failed", "unloadable"], float, str]
"""Status, reward (0 unless scored), reason."""

_PR_SET_PDEATHSIG = 1
_MAX_REASON = 300


class Contained:
    """Context that keeps a foreign function's exception (or ``sys.exit``) inside and tells what it was in ``problem``."""

    def __init__(self) -> None:
        self.problem = ""

    def __enter__(self) -> "Contained":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if kind is None or not issubclass(kind, (Exception, SystemExit)):
            return False
        # Unlike str(error), this survives an exception whose own __str__ raises.
        self.problem = shorten(traceback.format_exception_only(kind, error)[-1], _MAX_REASON)
        return True


def initialise(parent_pid: int, scorer: bytes) -> None:
    """Prepare a fresh worker: tie it to its parent, make it killable at once, import the scorer outside any time limit.

    On Linux the kernel kills the worker with its parent, whatever it is doing; elsewhere it ends once it looks for work.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent died before it could be watched
    # A Python-level handler waits for native code (a regular expression that backtracks for ever) to return.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _loaded(scorer)


def probe(scorer: bytes) -> str:
    """Why the scorer can't be loaded, or ""."""
    return _loaded(scorer)[1]


def run(scorer: bytes, completion_text: str, answer: str, row: Mapping[str, Any]) -> Answer:
    """Score one completion with the encoded :class:`~libs.rewards.resolve.Scorer`; never raises."""
    function, problem = _loaded(scorer)
    if problem:
        return "unloadable", 0.0, problem
    with Contained() as contained:
        return _answer(function(completion_text, answer, row))
    return "failed", 0.0, f"the scorer raised {contained.problem}"


@functools.cache
def _loaded(encoded: bytes) -> tuple[Callable[..., object], str]:
    """The scorer's function with its arguments bound, and why it can't be used ("" if it can)."""
    scorer = msgspec.msgpack.decode(encoded, type=Scorer)
    sys.path[:0] = [folder for folder in scorer.folders if folder not in sys.path]
    module_name, _, function_name = scorer.target.partition(":")
    with Contained() as contained:
        for module in scorer.needs:
            importlib.import_module(module)
        function: Callable[..., object] = getattr(importlib.import_module(module_name), function_name)
        inspect.signature(function).bind("", "", {}, **scorer.args)
        return functools.partial(function, **scorer.args), ""
    return _answer, contained.problem


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
    return "scored", number, shorten(reason, _MAX_REASON)
