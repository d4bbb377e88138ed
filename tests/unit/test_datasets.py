"""Reading, checking and selecting rows."""

import json
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.errors import DataError
from libs.common.sections import DataSection
from libs.datasets.load import check, load, selection


def written(path: Path, rows: list[Any]) -> DataSection:
    """A dataset file of the kind that the path's ending says."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return DataSection(path=str(path))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    raw = [{"prompt": f"{n} + 1?", "answer": str(n + 1), "level": n} for n in range(3)]
    rows = load(written(tmp_path / name, raw))
    assert [(row.prompt, row.answer) for row in rows] == [("0 + 1?", "1"), ("1 + 1?", "2"), ("2 + 1?", "3")]
    assert [row.fields for row in rows] == raw


def test_gsm8k_rows_keep_the_solution_and_answer_with_the_number(tmp_path: Path) -> None:
    section = written(tmp_path / "a.jsonl", [{"question": "6 * 7?", "answer": "6 * 7 = 42\n#### 1,042\n"}])
    (row,) = load(section)
    assert (row.prompt, row.answer) == ("6 * 7?", "1,042")
    assert row.fields["answer"] == "6 * 7 = 42\n#### 1,042\n"


def test_a_heading_inside_an_answer_is_not_a_gsm8k_answer(tmp_path: Path) -> None:
    section = written(tmp_path / "a.jsonl", [{"prompt": "p", "answer": "#### Title\ntext"}])
    assert load(section)[0].answer == "#### Title\ntext"


def test_default_columns_fall_back_and_named_ones_do_not(tmp_path: Path) -> None:
    section = written(tmp_path / "a.jsonl", [{"problem": "p", "answer": "1", "other": "o"}])
    assert load(section)[0].prompt == "p"
    assert load(DataSection(path=section.path, prompt="other", answer="problem"))[0].answer == "p"
    (problem,) = check(DataSection(path=section.path, prompt="text")).problems
    assert (problem.row, problem.field) == (1, "text")
    assert problem.problem == "is missing; the row has problem, answer, other"


def test_a_prompt_column_is_preferred_to_its_fallbacks(tmp_path: Path) -> None:
    section = written(tmp_path / "a.jsonl", [{"question": "q", "prompt": "p", "answer": "1"}])
    assert load(section)[0].prompt == "p"


def test_every_bad_row_is_reported_with_file_row_and_field(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        b'\xef\xbb\xbf{"prompt": "p", "answer": "1"}',
        b'{"prompt": "p"}',
        b"",
        b'{"prompt": "p", "answer": ',
        b"[1, 2]",
        b'{"prompt": " ", "answer": "1"}',
        b'{"prompt": "p", "answer": null}',
        b'{"prompt": ["p"], "answer": "1"}',
        b'{"prompt": "p", "answer": "x\\n####"}',
        b'{"prompt": "p\xff", "answer": "1"}',
        b'{"prompt": "p", "answer": 2.5}',
        b'{"prompt": "p", "answer": true}',
    ]
    path.write_bytes(b"\n".join(lines))
    checked = check(DataSection(path=str(path)))
    found = [(problem.row, problem.field, problem.problem.split(":")[0]) for problem in checked.problems]
    assert found == [
        (2, "answer", "is missing; the row has prompt"),
        (4, "", "not valid JSON"),
        (5, "", "an object is expected, not list"),
        (6, "prompt", "is empty"),
        (7, "answer", "text or a finite number is expected, not null"),
        (8, "prompt", "text is expected, not list"),
        (9, "answer", "has nothing after ####"),
        (10, "", "not valid JSON"),
        (12, "answer", "text or a finite number is expected, not bool"),
    ]
    assert {problem.file for problem in checked.problems} == {str(path)}
    assert (checked.rows, checked.unlisted) == (2, 0)
    with pytest.raises(DataError, match=r"a\.jsonl: row 2: answer: is missing"):
        load(DataSection(path=str(path)))


def test_long_lists_of_bad_rows_are_cut(tmp_path: Path) -> None:
    checked = check(written(tmp_path / "a.jsonl", [{"prompt": "p"}] * 7), limit=3)
    assert (len(checked.problems), checked.unlisted) == (3, 4)


def test_numeric_answers_are_text(tmp_path: Path) -> None:
    section = written(tmp_path / "a.jsonl", [{"prompt": "p", "answer": 4}, {"prompt": "p", "answer": -0.5}])
    assert [row.answer for row in load(section)] == ["4", "-0.5"]


def test_parquet_columns_become_plain_data(tmp_path: Path) -> None:
    raw = [{"prompt": "p", "answer": Decimal("1.50"), "day": date(2024, 2, 29), "raw": b"\x00", "list": [1, 2]}]
    (row,) = load(written(tmp_path / "a.parquet", raw))
    assert row.answer == "1.50"
    assert json.loads(json.dumps(row.fields)) == row.fields
    assert (row.fields["day"], row.fields["list"]) == ("2024-02-29", [1, 2])


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b"", "has no rows"),
        ("a.jsonl", b"\n\n", "has no rows"),
        ("a.json", b"[]", "has no rows"),
        ("a.json", b'{"a": 1}', "a list of objects is expected, not dict"),
        ("a.json", b'{"a": 1}\n{"a": 2}', r"not valid JSON \(one object a line is called .jsonl\)"),
        ("a.parquet", b"nothing", "not a readable Parquet file"),
        ("a.csv", b"", "a .jsonl, .json or .parquet file is expected"),
    ],
)
def test_unusable_files(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    for use in (check, load):
        with pytest.raises(DataError, match=problem) as caught:
            use(DataSection(path=str(tmp_path / name)))
        assert caught.value.row is None


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\.jsonl: no such file"):
        check(DataSection(path=str(tmp_path / "no.jsonl")))


@pytest.mark.parametrize(
    ("module", "section", "problem"),
    [
        ("datasets", DataSection(dataset="org/name"), "org/name: a Hugging Face dataset needs the package `datasets`"),
        ("reasoning_gym", DataSection(task="products"), "task products: a task needs the package `reasoning-gym`"),
    ],
)
def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, module: str, section: DataSection, problem: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=problem):
        check(section)


@given(
    rows=st.integers(1, 60),
    cut=st.integers(0, 60),
    held_out=st.integers(1, 60),
    seed=st.none() | st.integers(0, 9),
)
def test_ranges_that_do_not_overlap_are_disjoint(rows: int, cut: int, held_out: int, seed: int | None) -> None:
    if cut == 0 or cut + held_out > rows:
        return
    train = selection(DataSection(path="a.jsonl", take=cut, split_seed=seed), rows=rows)
    test = selection(DataSection(path="a.jsonl", skip=cut, take=held_out, split_seed=seed), rows=rows)
    rest = selection(DataSection(path="a.jsonl", skip=cut, split_seed=seed), rows=rows)
    assert (len(train), len(test), len(rest)) == (cut, held_out, rows - cut)
    assert sorted(train + rest) == list(range(rows))
    assert set(test) <= set(rest)


def test_a_split_seed_draws_the_parts_and_without_one_they_are_in_order() -> None:
    assert selection(DataSection(path="a.jsonl", skip=2, take=3), rows=9) == [2, 3, 4]
    drawn = [selection(DataSection(path="a.jsonl", split_seed=seed), rows=50) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] != list(range(50))


def test_selected_rows_are_the_ones_loaded_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{"prompt": f"p{n}", "answer": "1"} for n in range(9)]).path
    section = DataSection(path=path, skip=2, take=3)
    assert [row.prompt for row in load(section)] == ["p2", "p3", "p4"]
    assert (check(section).rows, check(section).selected) == (9, 3)


@pytest.mark.parametrize("part", [{"skip": 9}, {"take": 10}, {"skip": 5, "take": 5}])
def test_more_rows_than_there_are_is_an_error(part: dict[str, int]) -> None:
    with pytest.raises(DataError, match="has 9 rows: can't skip"):
        selection(DataSection(path="a.jsonl", **part), rows=9)  # type: ignore[arg-type]
