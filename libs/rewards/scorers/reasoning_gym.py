"""``reasoning_gym``: a reasoning-gym task's own scoring of the answer found in the completion.

The row is the task's entry with its metadata, and names the task (``task``) and its settings (``args``), as
:mod:`libs.datasets.tasks` makes it.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import msgspec

from libs.rewards.answers import after_marker, last_number, parse_number, shorten
from libs.rewards.score import Score

Extract = Literal["last_number", "marker", "whole"]


def score(
    completion_text: str,
    answer: str,
    row: Mapping[str, Any],
    *,
    extract: Extract = "last_number",
    marker: str = "Answer:",
) -> Score:
    """The task's ``score_answer``, usually 0 to 1, of the answer that the completion gives.

    Args:
        extract: what counts as the answer: ``last_number`` of the completion, the first non-blank line after the last
            ``marker``, or the ``whole`` completion, stripped.
        marker: used with ``extract = "marker"`` only.

    Raises:
        ValueError: ``last_number`` for a task whose reference isn't a number.
        KeyError: the row doesn't come from a task.
    """
    if extract == "last_number" and parse_number(answer) is None:
        raise ValueError(f'the reference {shorten(answer)!r} isn\'t a number: set extract to "marker" or "whole"')
    found = _extracted(completion_text, extract, marker)
    if found is None:
        what = repr(marker) if extract == "marker" else "number"
        return Score(reward=0.0, reason=f"no {what} in the completion")
    task = _task(row["task"], msgspec.json.encode(row["args"], order="sorted"))
    reward = float(task.score_answer(found, dict(row)))
    return Score(reward=reward, reason=f"{shorten(found)!r} scores {reward:g} by the task {row['task']}")


def _extracted(text: str, extract: Extract, marker: str) -> str | None:
    if extract == "whole":
        return text.strip()
    if extract == "marker":
        return after_marker(text, marker)
    number = last_number(text)
    if number is None:
        return None
    # Tasks compare text: 45.0 and 045 are the 45 that they expect.
    return str(number.value) if number.value.denominator == 1 else number.text


@lru_cache(maxsize=64)
def _task(name: str, args: bytes) -> Any:
    """The task's dataset; scoring needs its settings, not its rows."""
    import reasoning_gym  # seconds: only in the worker, which imports it ahead of its first task

    return reasoning_gym.create_dataset(name, **msgspec.json.decode(args), seed=0, size=1)
