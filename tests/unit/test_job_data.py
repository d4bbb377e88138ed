"""A job's prompts: taken up again from a checkpoint, they come in the order that they would have had."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libs.common.errors import JigsawError
from libs.common.job import job_from
from libs.common.trajectory import TrajectorySpec
from libs.environments.registry import make_environment
from services.trainer.job_data import JobData
from tests.tiny_model import build_tiny_model

BATCH = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def data_of(model: Path, folder: Path, *, rows: int, held_out: int = 0) -> JobData:
    """A job's data; its prompts are the numbers of its rows."""
    file = folder / f"{rows}.jsonl"
    file.write_text("".join(json.dumps({"prompt": str(row), "answer": str(row)}) + "\n" for row in range(rows)))
    raw: dict[str, Any] = {
        "name": "small",
        "model": {"path": str(model)},
        "data": {"path": str(file), "skip": held_out},
        "rollout": {"batch": BATCH, "group": 2},
        "train": {"seed": 3},
    }
    if held_out:
        raw["eval"] = {"data": {"path": str(file), "take": held_out}}
    job = job_from(raw, file="test")
    return JobData(
        job, job_uid="job", model=model, environment=make_environment(job.environment, allow=[]), max_context=1024
    )


def steps(data: JobData, *numbers: int) -> list[list[list[TrajectorySpec]]]:
    return [data.training_groups(BATCH, step=step) for step in numbers]


def stored(data: JobData) -> Any:
    """The position as a checkpoint gives it back."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(data.position))


def test_four_rows_in_twos_resumed_at_step_two_of_four_are_the_right_two_more_steps(model: Path, tmp_path: Path) -> None:
    whole = data_of(model, tmp_path, rows=4)
    all_steps = steps(whole, 0, 1, 2, 3)
    first = data_of(model, tmp_path, rows=4)
    steps(first, 0, 1)
    resumed = data_of(model, tmp_path, rows=4)
    resumed.resume(stored(first))
    assert resumed.epoch == 1
    assert steps(resumed, 2, 3) == all_steps[2:]  # rows, group numbers, seeds
    assert resumed.epoch == whole.epoch == 2
    for epoch in (all_steps[:2], all_steps[2:]):
        assert sorted(group[0].answer for step in epoch for group in step) == ["0", "1", "2", "3"]


def test_a_resume_in_the_middle_of_a_late_epoch_restores_its_order(model: Path, tmp_path: Path) -> None:
    whole, first = (data_of(model, tmp_path, rows=7) for _ in range(2))
    all_steps = steps(whole, *range(12))
    steps(first, *range(9))
    resumed = data_of(model, tmp_path, rows=7)
    resumed.resume(stored(first))
    assert resumed.epoch == 2
    assert steps(resumed, *range(9, 12)) == all_steps[9:]


def test_evaluation_takes_group_numbers_and_no_training_rows(model: Path, tmp_path: Path) -> None:
    data = data_of(model, tmp_path, rows=4, held_out=2)
    groups = [*data.training_groups(1, step=0), *data.evaluation_groups(step=0), *data.training_groups(1, step=1)]
    assert [group[0].id.group for group in groups] == [0, 1, 2, 3]
    assert [group[0].answer for group in groups[1:3]] == ["0", "1"]
    assert {groups[0][0].answer, groups[3][0].answer} == {"2", "3"}


def test_a_dataset_that_has_changed_is_refused(model: Path, tmp_path: Path) -> None:
    first = data_of(model, tmp_path, rows=4)
    steps(first, 0)
    with pytest.raises(JigsawError, match="had 4 rows when the checkpoint was made and has 5 now"):
        data_of(model, tmp_path, rows=5).resume(stored(first))
