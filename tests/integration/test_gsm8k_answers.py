"""All of GSM8K's test set: every row loads, and every reference answer is one number."""

import os
from pathlib import Path

import pytest

from libs.common.sections import DataSection
from libs.datasets.load import check, load
from libs.rewards.answers import parse_number
from libs.rewards.scorers import gsm8k, last_number

DATA = os.environ.get("JIGSAW_TEST_DATA")
pytestmark = pytest.mark.skipif(DATA is None, reason="JIGSAW_TEST_DATA isn't set")


def test_every_row_loads_and_every_answer_parses_and_scores() -> None:
    section = DataSection(path=str(Path(DATA or "") / "gsm8k_test.jsonl"))
    checked = check(section)
    assert (checked.rows, checked.selected, checked.problems) == (1319, 1319, [])
    for row in load(section):
        assert parse_number(row.answer) is not None, row.answer
        solution = row.fields["answer"]
        assert gsm8k.score(solution, row.answer, row.fields).reward == 1
        assert gsm8k.score(f"#### {row.answer}1", solution, row.fields).reward == 0
        assert last_number.score(solution, row.answer, row.fields).reward == 1
