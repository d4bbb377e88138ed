"""A job's dataset: checked row by row, and the part of it that the job uses.

One pass reads and checks; :func:`check` keeps nothing but counts and complaints, :func:`load` keeps the selected rows.
"""

import itertools
import random
from collections.abc import Iterator

import msgspec

from libs.common.errors import DataError
from libs.common.sections import DataSection
from libs.datasets.rows import Row, columns_of, row_from
from libs.datasets.sources import raw_rows, source_name


class Checked(msgspec.Struct, frozen=True):
    """What checking a dataset found.

    Attributes:
        rows: good rows in the dataset, before selection.
        selected: how many of them the job uses.
        problems: one per bad row, the first few.
        unlisted: further bad rows.
    """

    rows: int
    selected: int
    problems: list[DataError]
    unlisted: int = 0


def check(section: DataSection, *, limit: int = 20) -> Checked:
    """Check every row without keeping any; bad rows are collected, at most ``limit`` of them with their reasons.

    Raises:
        DataError: the dataset as a whole can't be used: unreadable, empty, or the selection leaves nothing.
    """
    rows, bad = 0, 0
    problems: list[DataError] = []
    for row in scan(section):
        if isinstance(row, Row):
            rows += 1
            continue
        bad += 1
        if len(problems) < limit:
            problems.append(row)
    # Bad rows count here: their own complaints come first, the selection's would only confuse.
    selected = len(selection(section, rows=rows + bad))
    return Checked(rows=rows, selected=selected, problems=problems, unlisted=bad - len(problems))


def load(section: DataSection) -> list[Row]:
    """The rows that the section selects, in the dataset's order (or ``split_seed``'s).

    Raises:
        DataError: the first bad row, or the dataset as a whole.
    """
    rows: list[Row] = []
    for row in scan(section):
        if isinstance(row, DataError):
            raise row
        rows.append(row)
    return [rows[index] for index in selection(section, rows=len(rows))]


def scan(section: DataSection) -> Iterator[Row | DataError]:
    """Every row of the dataset, checked, in order; a bad one comes out as the error that it is.

    Raises:
        DataError: the dataset as a whole can't be read.
    """
    file = source_name(section)
    raws = iter(raw_rows(section))
    first = next(raws, None)
    if first is None:
        return
    columns = columns_of(first[1], prompt=section.prompt, answer=section.answer)
    for number, raw in itertools.chain([first], raws):
        if isinstance(raw, DataError):
            yield raw
            continue
        try:
            yield row_from(raw, columns=columns, file=file, number=number)
        except DataError as error:
            yield error


def selection(section: DataSection, *, rows: int) -> list[int]:
    """Indexes of the rows that the section uses out of ``rows``: ``take`` after the first ``skip``.

    With ``split_seed``, of the order that it draws, which depends on nothing but the seed and the number of rows. Sections
    of the same dataset with the same ``split_seed`` and ranges that don't overlap are therefore disjoint.

    Raises:
        DataError: the dataset is empty, or has fewer rows than asked for.
    """
    file = source_name(section)
    if rows == 0:
        raise DataError(file=file, problem="has no rows")
    order = list(range(rows))
    if section.split_seed is not None:
        random.Random(section.split_seed).shuffle(order)
    left = max(0, rows - section.skip)
    if left == 0 or (section.take is not None and section.take > left):
        wanted = "" if section.take is None else f" and take {section.take}"
        raise DataError(file=file, problem=f"has {rows} rows: can't skip {section.skip}{wanted}")
    return order[section.skip :][: section.take]
