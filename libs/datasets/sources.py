"""Raw rows from where a job says they are: a file, a Hugging Face dataset, or a reasoning-gym task.

Rows are yielded as read, one at a time where the format allows, each with its 1-based number (a line's number in jsonl).
A row that can't even be parsed comes out as a :class:`DataError` in its place, so that the next ones can be checked too.
"""

import codecs
from collections.abc import Iterator
from pathlib import Path

import msgspec

from libs.common.errors import DataError
from libs.common.sections import DataSection
from libs.datasets.tasks import task_rows

RawRow = tuple[int, object]
"""(row number, the row as read or the DataError that it is)."""


def source_name(section: DataSection) -> str:
    """How the dataset is called in errors."""
    if section.path is not None:
        return section.path
    return section.dataset if section.dataset is not None else f"task {section.task}"


def raw_rows(section: DataSection) -> Iterator[RawRow]:
    """Rows of the section's source, before columns, checks and selection.

    Raises:
        DataError: the source as a whole can't be read.
    """
    if section.task is not None:
        return enumerate(task_rows(section.task, args=section.args, size=section.size, seed=section.seed), start=1)
    if section.dataset is not None:
        return _hub_rows(section.dataset, section.split)
    path = Path(section.path or "")
    readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise DataError(file=str(path), problem="a .jsonl, .json or .parquet file is expected")
    if not path.is_file():
        raise DataError(file=str(path), problem="no such file")
    return readers[path.suffix](path)


def _jsonl_rows(path: Path) -> Iterator[RawRow]:
    """One object a line; blank lines are skipped but counted."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text.strip():
                    yield number, _decoded(text, file=str(path), number=number)
    except OSError as error:
        raise DataError(file=str(path), problem=f"can't be read: {error.strerror}") from None


def _decoded(text: bytes, *, file: str, number: int) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        return DataError(file=file, row=number, problem=f"not valid JSON: {error}")


def _json_rows(path: Path) -> Iterator[RawRow]:
    try:
        rows = msgspec.json.decode(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except OSError as error:
        raise DataError(file=str(path), problem=f"can't be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise DataError(file=str(path), problem=f"not valid JSON (one object a line is called .jsonl): {error}") from None
    if not isinstance(rows, list):
        raise DataError(file=str(path), problem=f"a list of objects is expected, not {type(rows).__name__}")
    yield from enumerate(rows, start=1)


def _parquet_rows(path: Path) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(file=str(path), problem=f"not a readable Parquet file: {error}") from None


def _hub_rows(dataset: str, split: str) -> Iterator[RawRow]:
    try:
        import datasets
    except ModuleNotFoundError:
        raise DataError(file=dataset, problem="a Hugging Face dataset needs the package `datasets`: install it") from None
    try:
        rows = datasets.load_dataset(dataset, split=split)
    except (OSError, ValueError) as error:  # the library's own errors derive from these
        raise DataError(file=dataset, problem=f"split {split!r} can't be loaded: {error}") from None
    return enumerate(rows, start=1)
