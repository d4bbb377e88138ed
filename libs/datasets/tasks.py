"""Rows drawn from a reasoning-gym task.

Invariants: the same settings draw the same rows; no question occurs twice. A task may have few distinct questions
(``products`` with two terms of one digit has 100), and a repeated one could be in the training and the held-out part at
once, so repetitions are always dropped, keeping first occurrences; ``size`` counts rows before that.
"""

import difflib
from collections.abc import Iterator
from typing import Any

from libs.common.errors import DataError
from libs.datasets.rows import as_json


def task_rows(task: str, *, args: dict[str, Any], size: int, seed: int) -> Iterator[object]:
    """The task's distinct entries (question, answer, metadata), each with ``task`` and ``args``, for its scorer.

    Args:
        task: name of a reasoning-gym dataset.
        args: its settings.
        size: entries drawn, repetitions included.
        seed: of the draw.

    Raises:
        DataError: unknown task or settings, or reasoning-gym isn't installed.
    """
    file = f"task {task}"
    entries = _created(task, args=args, size=size, seed=seed)
    seen: set[str] = set()
    for index in range(size):
        entry = entries[index]
        if index == 0:
            _check_scoring(entries, entry, file=file)
        if entry["question"] not in seen:
            seen.add(entry["question"])
            yield {**entry, "task": task, "args": args}


def _created(task: str, *, args: dict[str, Any], size: int, seed: int) -> Any:
    file = f"task {task}"
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError:
        raise DataError(file=file, problem="a task needs the package `reasoning-gym`: install it") from None
    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise DataError(file=file, problem=f"reasoning-gym has no such task{hint}")
    for key in ("size", "seed"):
        if key in args:
            raise DataError(file=file, field=f"args.{key}", problem=f"belongs in data.{key}")
    try:
        return reasoning_gym.create_dataset(task, **args, size=size, seed=seed)
    except (TypeError, ValueError, AssertionError) as error:  # the library checks settings with assertions
        raise DataError(file=file, field="args", problem=f"not accepted: {error}") from None


def _check_scoring(entries: Any, entry: dict[str, Any], *, file: str) -> None:
    """Refuse a task whose scoring needs more than JSON keeps of its metadata (tuples, say): rewards would be wrong."""
    try:
        kept = as_json(entry)
    except (TypeError, ValueError) as error:
        raise DataError(file=file, row=1, problem=f"can't be kept as JSON: {error}") from None
    if entries.score_answer(entry["answer"], kept) != entries.score_answer(entry["answer"], entry):
        raise DataError(file=file, problem="its rows can't be scored once stored as JSON")
