"""Half-written things: those of dead writers go, those of whoever may still write stay."""

from pathlib import Path

import pytest

from services.trainer.leftovers import delete_leftovers

KEPT = ("model", "checkpoints/step-000002.1", "metrics.jsonl")
HALF_WRITTEN = (".model.1.partial", "checkpoints/.step-000004.1.partial", "checkpoints/.step-000004.2.partial")
ASIDE = ".metrics.jsonl.partial"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (*KEPT[:2], *HALF_WRITTEN):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "weights").write_text("x")
    for name in (KEPT[2], ASIDE):
        (tmp_path / name).write_text("x")
    return tmp_path


def there(folder: Path) -> set[str]:
    return {name for name in (*KEPT, *HALF_WRITTEN, ASIDE) if (folder / name).exists()}


def test_those_of_earlier_trainers_and_of_nobody_else(folder: Path) -> None:
    delete_leftovers(folder, up_to=1)
    assert there(folder) == {*KEPT, HALF_WRITTEN[2], ASIDE}


def test_all_of_a_job_that_has_ended(folder: Path) -> None:
    delete_leftovers(folder)
    assert there(folder) == set(KEPT)
    delete_leftovers(folder / "nothing")  # a job that never ran has no folder
