r"""``math_verify``: LaTeX answers, compared as mathematics by the math-verify library.

Plain numbers on both sides are compared exactly by this project's own rules (:mod:`libs.rewards.answers`): the library
reads ``2 2/3`` as 4/3 and takes ``50%`` for both 50 and 0.5. Its time limits use ``signal.alarm`` and are switched off: the
pool that runs scorers has its own.
"""

import logging
from collections.abc import Mapping
from typing import Any

from libs.rewards.answers import last_boxed, parse_number, shorten
from libs.rewards.score import Score


def score(completion_text: str, answer: str, row: Mapping[str, Any], *, require_boxed: bool = False) -> Score:
    r"""1 if the completion's last complete ``\boxed{…}`` equals the reference, else 0.

    Args:
        require_boxed: a completion without a box scores 0; otherwise the library looks for an answer in its text.

    Raises:
        ValueError: the reference isn't an expression that the library can read.
    """
    reference = last_boxed(answer) or answer
    boxed = last_boxed(completion_text)
    if boxed is None and require_boxed:
        return Score(reward=0.0, reason=r"no \boxed{} in the completion")
    if boxed is not None and (found := parse_number(boxed)) is not None and (number := parse_number(reference)) is not None:
        return _score(right=found == number, found=boxed, reference=reference)
    return _compare(completion_text if boxed is None else _boxed(boxed), reference)


def _compare(text: str, reference: str) -> Score:
    from math_verify import parse, verify  # seconds of sympy: only in the worker, which imports it ahead of its first task

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns at each call that its time limits are off
    gold = parse(_boxed(reference), parsing_timeout=None)
    if not gold:
        raise ValueError(f"the reference answer {shorten(reference)!r} can't be read as mathematics")
    found = parse(text, parsing_timeout=None)
    if not found:
        return Score(reward=0.0, reason="no answer that can be read as mathematics")
    return _score(right=verify(gold, found, timeout_seconds=None), found=str(found[-1]), reference=reference)


def _boxed(expression: str) -> str:
    return rf"\boxed{{{expression.strip().strip('$')}}}"


def _score(*, right: bool, found: str, reference: str) -> Score:
    if right:
        return Score(reward=1.0, reason=f"{shorten(found)} is right")
    return Score(reward=0.0, reason=f"{shorten(found)} isn't {shorten(reference)}")
