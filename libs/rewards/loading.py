"""Loads the function behind a scorer. It runs a user's code, so only ever in a process made for that.

``python -m libs.rewards.loading`` reads an encoded scorer from standard input and prints why it can't be loaded, or nothing.
"""

import functools
import importlib
import inspect
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec

from libs.rewards.answers import shorten
from libs.rewards.resolve import Scorer

LOAD_S = 60.0
MAX_REASON = 300


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
        self.problem = shorten(traceback.format_exception_only(kind, error)[-1], MAX_REASON)
        return True


@functools.cache
def loaded(encoded: bytes) -> tuple[Callable[..., object] | None, str]:
    """The function of an encoded :class:`~libs.rewards.resolve.Scorer` with its arguments bound, or why there is none."""
    scorer = msgspec.msgpack.decode(encoded, type=Scorer)
    sys.path[:0] = [folder for folder in scorer.folders if folder not in sys.path]
    module_name, _, function_name = scorer.target.partition(":")
    with Contained() as contained:
        for module in scorer.needs:
            importlib.import_module(module)
        function: Callable[..., object] = getattr(importlib.import_module(module_name), function_name)
        inspect.signature(function).bind("", "", {}, **scorer.args)
        return functools.partial(function, **scorer.args), ""
    return None, contained.problem


def problem_of(scorer: Scorer, *, timeout_s: float = LOAD_S) -> str:
    """Why a scorer can't be loaded, or ""; found out in a process of its own."""
    command = [sys.executable, "-m", "libs.rewards.loading"]
    try:
        done = subprocess.run(
            command,
            input=msgspec.msgpack.encode(scorer),
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"loading it takes longer than {timeout_s:g} s"
    if done.returncode != 0:
        return f"loading it ended the process with exit status {done.returncode}"
    return done.stdout.decode(errors="replace").strip()


def main() -> None:
    """Entry point; what the user's module prints is no answer."""
    answer, sys.stdout = sys.stdout, sys.stderr
    answer.write(loaded(sys.stdin.buffer.read())[1])


if __name__ == "__main__":
    main()
