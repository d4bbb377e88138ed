"""One dataset row as the rest of the system sees it, and the checks that every raw row must pass.

Invariants of a :class:`Row`: prompt and answer are non-blank text; fields are plain JSON data.
"""

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec

from libs.common.errors import DataError

PROMPT_FALLBACKS = ("question", "problem")
"""Columns that hold the prompt when the job leaves ``data.prompt`` at its default and there is no column of that name."""

DEFAULT_PROMPT = "prompt"

_FINAL_ANSWER = re.compile(r"(?:^|\n)[ \t]*####(?P<final>[^\n]*)\s*$")


class Row(msgspec.Struct, frozen=True):
    """A question, its reference answer, and the whole row for scorers and environments that need more."""

    prompt: str
    answer: str
    fields: dict[str, Any]


class Columns(msgspec.Struct, frozen=True):
    """Which columns hold what."""

    prompt: str
    answer: str


def columns_of(first: object, *, prompt: str, answer: str) -> Columns:
    """The columns of a dataset, judged by its first row.

    A job that leaves ``data.prompt`` at ``prompt`` can use a dataset that calls it ``question`` (GSM8K, HotpotQA,
    reasoning-gym) or ``problem`` (MATH); a column that the job names is used as named.
    """
    if prompt == DEFAULT_PROMPT and isinstance(first, Mapping) and prompt not in first:
        prompt = next((name for name in PROMPT_FALLBACKS if name in first), prompt)
    return Columns(prompt=prompt, answer=answer)


def row_from(raw: object, *, columns: Columns, file: str, number: int) -> Row:
    """Check one raw row.

    The answer may be a number. If it is text whose last line is ``#### N`` (GSM8K), the row's answer is N; the whole
    solution stays in ``fields``.

    Args:
        raw: the row as read.
        columns: which columns hold prompt and answer.
        file: the dataset, for errors.
        number: 1-based row number, for errors.

    Raises:
        DataError: naming file, row and field.
    """
    if not isinstance(raw, Mapping):
        raise DataError(file=file, row=number, problem=f"an object is expected, not {type(raw).__name__}")
    try:
        fields = as_json(raw)
    except (TypeError, ValueError) as error:
        raise DataError(file=file, row=number, problem=f"can't be kept as JSON: {error}") from None
    if not isinstance(raw.get(columns.prompt), str):
        raise DataError(file=file, row=number, field=columns.prompt, problem=_absent(raw, columns.prompt, "text"))
    if not raw[columns.prompt].strip():
        raise DataError(file=file, row=number, field=columns.prompt, problem="is empty")
    answer = _answer_text(raw, columns.answer, file=file, number=number)
    return Row(prompt=fields[columns.prompt], answer=answer, fields=fields)


def as_json(raw: Mapping[Any, Any]) -> dict[str, Any]:
    """The row as plain JSON data, the way that it will be stored: tuples become lists, NaN null, dates and decimals text.

    Raises:
        TypeError, ValueError: a value that has no such form.
    """
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dict(raw), enc_hook=_plain))
    return fields


def _answer_text(raw: Mapping[str, Any], column: str, *, file: str, number: int) -> str:
    value = raw.get(column)
    if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    if not isinstance(value, str):
        raise DataError(file=file, row=number, field=column, problem=_absent(raw, column, "text or a finite number"))
    final = _FINAL_ANSWER.search(value)
    answer = final["final"].strip() if final else value
    if not answer.strip():
        raise DataError(file=file, row=number, field=column, problem="has nothing after ####" if final else "is empty")
    return answer


def _absent(raw: Mapping[str, Any], column: str, expected: str) -> str:
    if column not in raw:
        return f"is missing; the row has {', '.join(map(str, raw)) or 'no fields'}"
    return f"{expected} is expected, not {'null' if raw[column] is None else type(raw[column]).__name__}"


def _plain(value: Any) -> Any:
    """Plain data for numpy's scalars and arrays, which reasoning-gym leaves in its metadata.

    Raises:
        TypeError: anything else that isn't plain data already.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")
