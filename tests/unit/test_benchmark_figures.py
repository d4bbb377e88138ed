"""The benchmarks' arithmetic: ratios by pairs, shares that add up, activity that never exceeds the time there was."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fixed_length import NEVER_SAMPLED, endless_model
from benchmarks.node_jobs import Finished, StepRow, policy_waits, rows_of
from benchmarks.processes import Sample, active_seconds
from benchmarks.report import Readings, Report, ratios
from benchmarks.step_shares import parts_of
from libs.common.chat import ChatTokenizer
from libs.common.errors import JigsawError
from tests.tiny_model import build_tiny_model

LINE = {
    "step": 1,
    "time": 1_000_010.0,
    "time/rollout": 4.0,
    "time/train": 5.0,
    "time/publish": 0.5,
    "time/checkpoint": 0.0,
    "time/step": 9.6,
    "time/compute": 4.9,
    "throughput/tokens": 4500.0,
    "response_length/min": 32.0,
    "response_length/max": 32.0,
    "response_length/mean": 32.0,
}


def row(step: int, ended: float) -> StepRow:
    return rows_of(json.dumps({**LINE, "step": step, "time": ended}).encode())[0]


def test_a_ratio_is_taken_pair_by_pair() -> None:
    drifting = ratios([20.0, 40.0, 80.0], [10.0, 20.0, 40.0])
    assert (drifting.low, drifting.median, drifting.high) == (2.0, 2.0, 2.0)
    with pytest.raises(JigsawError, match="compared"):
        ratios([1.0], [1.0, 2.0])
    with pytest.raises(JigsawError, match="no reading"):
        Readings.of([])


def test_the_report_file_names_command_machine_and_figures(tmp_path: Path) -> None:
    report = Report("step", ["--quick", "--json", "my file"])
    report.add("a.b", Readings.of([3.0, 1.0, 2.0]), "s")
    report.add("a.c", 5, "%")
    report.write(tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["command"] == "python -m benchmarks.step --quick --json 'my file'"
    assert written["machine"]["cores"] >= 1
    assert written["figures"] == {"a.b": 2.0, "a.b.low": 1.0, "a.b.high": 3.0, "a.c": 5.0}
    with pytest.raises(JigsawError, match="can't be written"):
        report.write(tmp_path / "missing" / "out.json")


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=20))
def test_activity_is_at_most_the_time_and_at_least_each_process(increments: list[tuple[float, float]]) -> None:
    samples, totals = [], [0.0, 0.0]
    for index, used in enumerate(increments):
        totals = [total + value for total, value in zip(totals, used, strict=True)] if index else [0.0, 0.0]
        cpu = {"engine/1": totals[0], "engine/2": totals[1], "training/3": 50.0 * index}
        samples.append(Sample(float(index), cpu))
    active = active_seconds(samples, "engine")
    assert max(totals) - 1e-9 <= active <= len(increments) - 1 + 1e-9
    assert active <= sum(totals) + 1e-9


def test_a_process_that_begins_counts_from_its_start() -> None:
    samples = [Sample(0.0, {}), Sample(1.0, {"engine/7": 0.25}), Sample(2.0, {"engine/7": 1.0})]
    assert active_seconds(samples, "engine") == 1.0


def test_the_parts_of_a_step_add_up() -> None:
    parts = parts_of(row(1, 10.0), wall=10.0, policy_wait=0.4, engine_active=3.5)
    assert (parts.policy, parts.training, parts.rollout) == (0.9, 4.9, 3.5)
    assert parts.waiting == pytest.approx(10.0 - 0.9 - 4.9 - 3.5)


def test_steps_last_from_end_to_end_and_evaluations_are_no_steps() -> None:
    log = b"\n".join(json.dumps({**LINE, "step": step, "time": 100.0 + 7 * step}).encode() for step in range(3))
    rows = rows_of(log + b'\n{"step": 3, "time": 130.0, "eval/reward_mean": 0.5}\n')
    intervals = Finished(rows, Path(), [], []).intervals(after=1)
    assert [(one.step, seconds) for one, seconds in intervals] == [(1, 7.0), (2, 7.0)]
    with pytest.raises(JigsawError, match=r"metrics\.jsonl"):
        rows_of(b'{"step": "one"}')


def test_a_policy_is_in_force_when_the_last_engine_has_it(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for instance, second in (("rollout-0", "10.200"), ("rollout-1", "10.500")):
        event = {"event": "policy_switched", "policy": "1.3", "timestamp": f"1970-01-01T00:00:{second}Z"}
        lines = [{"event": "service_started"}, event]
        (tmp_path / "logs" / f"{instance}.log").write_text("\n".join(map(json.dumps, lines)) + "\nnot JSON\n")
    assert policy_waits(Finished([row(0, 10.0), row(1, 20.0)], tmp_path, [], [])) == {1: pytest.approx(0.5)}


def test_the_endless_model_differs_in_its_end_token_alone(tmp_path: Path) -> None:
    source = build_tiny_model(tmp_path / "source")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    with pytest.raises(JigsawError, match="has no"):
        endless_model(tmp_path / "none", source=source)
    end = tokenizer["added_tokens"][-1]
    end["content"] = NEVER_SAMPLED
    tokenizer["model"]["vocab"] = {
        (NEVER_SAMPLED if id == end["id"] else token): id for token, id in tokenizer["model"]["vocab"].items()
    }
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    endless = endless_model(tmp_path / "copy", source=source)
    assert end["id"] in ChatTokenizer(endless).eos_ids
    assert len(ChatTokenizer(endless).eos_ids) == 1
    assert (endless / "model.safetensors").samefile(source / "model.safetensors")
