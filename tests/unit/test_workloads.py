"""The benchmark's workloads: every file is one, and its jobs are what it says, token for token."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.multiplex.workloads import NAMES, Pipeline, job_of, load_workload
from libs.common.chat import ChatMessage, ChatTokenizer
from tests.tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def small(pipeline: Pipeline) -> Pipeline:
    """The same with few prompts."""
    return msgspec.structs.replace(pipeline, batch=2)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_observations_have_the_tokens_that_a_workload_says(name: str, model: Path, tmp_path: Path) -> None:
    chat = ChatTokenizer(model)
    for pipeline in load_workload(name).pipelines:
        job = job_of(small(pipeline), model=model, folder=tmp_path)
        assert job.data.path is not None
        rows = [msgspec.json.decode(line) for line in Path(job.data.path).read_bytes().splitlines()]
        sizes = {len(chat.opening_ids([ChatMessage("user", row["prompt"])])) for row in rows}
        assert sizes == {pipeline.prompt_tokens}
        assert len({row["prompt"] for row in rows}) == len(rows) == 2 * job.train.steps
        replies = job.environment.args.get("replies", [])
        assert len(replies) == pipeline.turns - 1
        for reply in replies:
            told = chat.observation_ids([ChatMessage("user", reply)], turn_closed=False)
            assert len(told) == pipeline.observation_tokens
