"""The command line without a node: help that teaches, errors of one line, and nothing left behind by them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from libs.cli import checks, demo, main, options, summary
from libs.cli.doctor import examine
from libs.cli.node import node_settings
from libs.cli.samples import ordered
from libs.cli.submit import prepared
from libs.common import messages as m
from libs.common.errors import DataError, JigsawError, JobFileError, NodeError
from libs.common.history import History
from libs.common.job import Job, job_from
from libs.common.samples import SampleLine, read_samples, sampled_steps, samples_file, write_samples
from libs.common.settings import PluginSettings
from tests.tiny_model import CONTEXT, build_tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMANDS = (
    *("up", "down", "demo", "doctor", "submit", "jobs", "show", "watch", "cancel", "samples"),
    *("workers", "drain", "migrate", "dead-letters"),
)


def run(arguments: Sequence[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Exit code and stderr of the command as a user runs it."""
    monkeypatch.setattr("sys.argv", ["jigsaw", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    code = ended.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().err


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that passes for a model."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    header = b'{"weight": {"dtype": "BF16", "shape": [1000, 2000], "data_offsets": [0, 0]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def plain_job(model: Path, data: Path) -> dict[str, Any]:
    return {"name": "small", "model": {"path": str(model)}, "data": {"path": str(data)}}


def write_job(folder: Path, job: dict[str, Any]) -> Path:
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_teaches_with_an_example(command: str) -> None:
    result = CliRunner().invoke(main.make_app(), [command, "--help"])
    assert result.exit_code == 0
    assert f"Example: jigsaw {command}" in " ".join(result.output.split())


@pytest.mark.parametrize(
    "arguments",
    [["jobs"], ["show", "x"], ["watch"], ["cancel", "x"], ["workers"], ["dead-letters"], ["down"]],
)
def test_without_a_node_there_is_one_line_that_helps(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JIGSAW_NATS_URL", raising=False)
    code, err = run([*arguments, "--home", str(tmp_path)], capsys, monkeypatch)
    assert code == 1
    assert err == f"jigsaw: no node is up in {tmp_path}" + (
        "\n" if arguments == ["down"] else ": start one with `jigsaw up`, or name another with --home or --url\n"
    )


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, err = run(["jobs", "--url", "nats://127.0.0.1:1"], capsys, monkeypatch)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("jigsaw: no NATS server answers at nats://127.0.0.1:1")


def test_settings_with_a_mistake_are_one_line_and_start_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "node.toml"
    file.write_text("[scheduler]\npolicies = 'x'\n")
    home = tmp_path / "home"
    code, err = run(["up", "--settings", str(file), "--home", str(home)], capsys, monkeypatch)
    assert (code, err.count("\n")) == (1, 1)
    assert "policies" in err
    assert not home.exists()


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"rollout": {"batches": 3}}, "rollout.batches: unknown key"),
        ({"rollout": {"batch": "3"}}, "rollout.batch: expected `int`"),
        ({"rollout": {"group": 1}}, "rollout.group"),
        ({"rollout": {"batch": 10**30}}, "rollout.batch: expected `int` <= 65536"),
        ({"rollout": {"stop": [""]}}, "rollout.stop"),
        ({"name": "small\n"}, "name"),
        ({"train": {"learning_rate": 1e300}}, "train.learning_rate"),
        ({"train": {"beta1": 1.0}}, "train.beta1"),
        ({"train": {"max_grad_norm": float("inf")}}, "train.max_grad_norm: a finite number is expected, not inf"),
        ({"rollout": {"engine": "replay", "engine_args": {"decode_ms": -1}}}, "rollout.engine_args.decode_ms: expected"),
        (
            {"rollout": {"engine": "replay", "engine_args": {"lengths": {"kind": "uniform", "low": 9, "high": 3}}}},
            "rollout.engine_args.lengths: low must not be above high",
        ),
        (
            {"rollout": {"forced_lengths": {"kind": "uniform"}, "stop": ["x"]}},
            "rollout.forced_lengths: goes neither with rollout.stop nor with",
        ),
        ({"rollout": {"engine_args": {"decode_ms": 1}}}, 'rollout.engine_args: only engine = "replay" has settings'),
        ({"train": {"engine": "replay", "engine_args": {"speed": 3}}}, "train.engine_args.speed: unknown key"),
        (
            {"train": {"engine": "replay", "engine_args": {"thread_speedup": []}}},
            "train.engine_args.thread_speedup: expected `array` of length >= 1",
        ),
        ({"train": {"engine_args": {"tokens_per_s": 1}}}, 'train.engine_args: only engine = "replay" has settings'),
        ({"reward": {"function": "lastnumber"}}, "reward.function: unknown scorer 'lastnumber'; did you mean 'last_number'"),
        ({"reward": {"function": "mine:score"}}, "reward.function: 'mine:score' isn't on this node's allow-list"),
        ({"environment": {"name": "mine:World"}}, "environment.name: 'mine:World' isn't on this node's allow-list"),
        ({"environment": {"name": "scripted", "args": {"x": 1}}}, "environment.args: scripted"),
        ({"model": {"path": "/no/such/model"}}, "model.path: /no/such/model: no such model file or directory"),
        ({"model": {"path": "neither this nor that"}}, "model.path: 'neither this nor that' is neither"),
    ],
)
def test_a_job_with_a_mistake_is_refused_with_its_place(
    sections: dict[str, Any], expected: str, model: Path, rows: Path, tmp_path: Path
) -> None:
    file = write_job(tmp_path, plain_job(model, rows) | sections)
    settings = node_settings(None, tmp_path / "home")
    with pytest.raises(JobFileError) as refused:
        prepared(file, steps=None, settings=settings)
    assert str(refused.value).startswith(f"{file}: {expected}")
    assert "\n" not in str(refused.value)


def test_a_file_that_only_calls_itself_gguf_is_refused(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    file = write_job(tmp_path, plain_job(tmp_path / "x.gguf", rows))
    with pytest.raises(JobFileError, match=r"model.path: .*x.gguf is not a GGUF file"):
        prepared(file, steps=None, settings=node_settings(None, tmp_path / "home"))


def test_a_mistake_in_the_file_is_told_where_no_node_is_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "job.toml"
    file.write_bytes(b"\xef\xbb\xbfname = 'small'\n")
    code, err = run(["submit", str(file), "--home", str(tmp_path / "home")], capsys, monkeypatch)
    assert code == 1
    assert err == f"jigsaw: {file}: model: required, but missing\n"


def test_bad_rows_are_refused_with_file_row_and_field(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b"}\n{"prompt": "", "answer": "2"}\n')
    file = write_job(tmp_path, plain_job(model, data))
    with pytest.raises(JigsawError, match=rf"^{data}: row 2: answer: is missing.* \(and 1 more bad rows\)$"):
        prepared(file, steps=None, settings=node_settings(None, tmp_path))


def test_a_dataset_that_is_not_there_is_refused(model: Path, tmp_path: Path) -> None:
    file = write_job(tmp_path, plain_job(model, tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match="no such file"):
        prepared(file, steps=None, settings=node_settings(None, tmp_path))


@pytest.mark.parametrize(
    ("function", "problem"),
    [("mine:scores", "has no attribute 'scores'"), ("yours:score", "No module named 'yours'"), ("mine:score", None)],
)
def test_a_users_function_that_cannot_be_loaded_is_refused(
    function: str, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    (tmp_path / "mine.py").write_text("print('hello')\ndef score(completion, answer, row): return 1.0\n")
    file = write_job(tmp_path, plain_job(tmp_path, data) | {"reward": {"function": function}})
    plugins = PluginSettings(allow=["mine.*", "yours.*"], folders=[str(tmp_path)])
    settings = msgspec.structs.replace(node_settings(None, tmp_path / "home"), plugins=plugins)
    monkeypatch.setattr("libs.cli.checks.check_model", lambda path: None)  # this test is about something else
    monkeypatch.setattr("libs.cli.checks.find_model", lambda path: None)
    if problem is None:
        prepared(file, steps=None, settings=settings)
        return
    with pytest.raises(JobFileError, match=f"reward.function: '{function}' can't be loaded: .*{problem}"):
        prepared(file, steps=None, settings=settings)


def usage(*, free_mb: int) -> Any:
    return lambda path: SimpleNamespace(free=free_mb << 20)


def test_a_job_that_the_disk_has_no_room_for_is_refused(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_job(tmp_path, plain_job(build_tiny_model(tmp_path / "tiny"), rows))
    settings = node_settings(None, tmp_path / "home")
    prepared(file, steps=None, settings=settings)
    monkeypatch.setattr(shutil, "disk_usage", usage(free_mb=3))
    with pytest.raises(
        NodeError, match=r"small \(checkpoints, policy versions, model\) needs \d+ MB of disk, 3 MB are free"
    ):
        prepared(file, steps=None, settings=settings)


def test_a_context_longer_than_the_models_own_is_refused(rows: Path, tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "tiny")
    longer = plain_job(model, rows) | {"model": {"path": str(model), "max_context": CONTEXT + 1}}
    with pytest.raises(JobFileError, match=rf"model.max_context: the model attends to {CONTEXT} tokens at most"):
        prepared(write_job(tmp_path, longer), steps=None, settings=node_settings(None, tmp_path / "home"))


def test_a_kv_cache_that_holds_no_whole_sequence_is_refused(rows: Path, tmp_path: Path) -> None:
    small = plain_job(build_tiny_model(tmp_path / "tiny"), rows) | {"rollout": {"kv_memory_mb": 1}}
    with pytest.raises(JobFileError, match=r"rollout.kv_memory_mb: one sequence of the longest kind takes 2 MB"):
        prepared(write_job(tmp_path, small), steps=None, settings=node_settings(None, tmp_path / "home"))


def test_what_a_jobs_files_take_grows_with_what_is_kept() -> None:
    once = checks.disk_needed(job(), 1_000)
    more = msgspec.structs.replace(job(), train=msgspec.structs.replace(job().train, keep_last=3))
    assert checks.disk_needed(more, 1_000) - once == 2 * 12 * 1_000


def test_a_node_does_not_start_on_a_full_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", usage(free_mb=7))
    home = tmp_path / "home"
    code, err = run(["up", "--home", str(home)], capsys, monkeypatch)
    assert code == 1
    assert err == f"jigsaw: {home}: a node needs 256 MB of disk, 7 MB are free\n"
    assert not home.exists()


def example_files() -> list[Path]:
    return sorted(path for path in EXAMPLES.glob("*.toml") if path.name != "node.toml")


@pytest.mark.parametrize("file", example_files(), ids=lambda path: path.stem)
def test_every_example_is_accepted(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # the model isn't here: prompts aren't rendered
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    if '"products"' in file.read_text() or '"chain_sum"' in file.read_text():
        pytest.importorskip("reasoning_gym", reason="reasoning-gym isn't installed")
    job = prepared(file, steps=2, settings=node_settings(EXAMPLES / "node.toml", tmp_path))
    assert job.name == file.stem
    assert job.train.steps == 2


def test_the_demos_held_out_questions_are_never_trained_on() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym isn't installed")
    from libs.common.job import load_job
    from libs.datasets.load import load

    for name in demo.JOB_FILES:
        job = load_job(EXAMPLES / name)
        assert job.eval is not None
        trained, held_out = ({row.prompt for row in load(section)} for section in (job.data, job.eval.data))
        assert (len(trained), len(held_out)) == (job.data.take, job.eval.data.take)
        assert not trained & held_out


def test_settings_come_from_the_file_and_the_home_from_the_option(tmp_path: Path) -> None:
    settings = node_settings(EXAMPLES / "node.toml", tmp_path)
    assert settings.home == str(tmp_path)
    assert settings.plugins.allow == ["brevity:score"]
    assert settings.plugins.folders == [str(EXAMPLES / "plugins")]


@pytest.mark.parametrize(
    ("reference", "uid"),
    [
        ("a-00000001", "a-00000001"),
        ("a", "a-0000ffff"),
        ("a-0000", None),
        ("a-b", "a-b-00000002"),
        ("a-b-0", "a-b-00000002"),
    ],
)
def test_a_job_is_found_by_uid_name_or_unique_beginning(reference: str, uid: str | None) -> None:
    uids = ["a-00000001", "a-b-00000002", "a-0000ffff"]
    if uid is None:
        with pytest.raises(JigsawError, match="fits several jobs"):
            options.latest_uid(reference, uids)
    else:
        assert options.latest_uid(reference, uids) == uid


def test_an_unknown_job_is_refused_with_what_there_is() -> None:
    with pytest.raises(JigsawError, match=r"there is no job 'x'; there are: a-00000001"):
        options.latest_uid("x", ["a-00000001"])


def job() -> Job:
    return job_from({"name": "small", "model": {"path": "m"}, "data": {"task": "t"}, "train": {"steps": 9}}, file="job")


def record(**changes: Any) -> m.JobRecord:
    fields = {"sender": "s", "job_uid": "small-0", "job": job(), "state": m.JobState.RUNNING, "submitted_at": 1.0}
    return m.JobRecord(**(fields | changes))


def test_first_and_last_rewards_are_means_of_three_and_of_five_steps() -> None:
    progress = m.JobProgress(
        sender="t",
        job_uid="small-0",
        phase=m.Phase.DONE,
        step=7,
        steps=9,
        settled=0,
        expected=0,
        history=History(
            steps=8,
            first_rewards=[0.0, 0.25, 0.5],
            rewards=[0.0, 0.25, 0.5, 1.0, 1.0, 0.5, 0.5, 0.5],
            tokens=900,
            rollout_s=1.0,
            train_s=1.5,
            other_s=0.5,
            mismatch_kl=0.125,
            trained=64,
        ),
        artifacts={"model": "/m", "tensorboard": "/t"},
    )
    ended = record(state=m.JobState.ENDED, outcome=m.Outcome.SUCCEEDED, ended_at=2.0)
    found = summary.summarise(ended, progress)
    assert (found.reward_first, found.reward_last, found.tokens_per_s) == (0.25, 0.7, 300.0)
    assert demo.as_json([found]) == {
        "jobs": [
            {
                "name": "small",
                "status": "succeeded",
                "steps": 8,
                "trajectories_trained": 64,
                "reward_first": 0.25,
                "reward_last": 0.7,
                "tokens_per_s": 300.0,
                "mismatch_kl": 0.125,
                "model_dir": "/m",
            }
        ]
    }


def test_a_job_without_progress_has_no_numbers() -> None:
    found = summary.summarise(record(state=m.JobState.QUEUED), None)
    assert (found.status, found.reward_first, found.tokens_per_s, found.steps) == ("queued", None, None, 0)


def line(sample: int, reward: float | None) -> SampleLine:
    return SampleLine(
        step=3,
        group=0,
        sample=sample,
        purpose="train",
        prompt="2 × 3?",
        completion=f"answer\n{sample}",
        reward=reward,
        reason="because",
        state="failed" if reward is None else "scored",
        stop_reason="stop",
        tokens=4,
    )


def test_samples_come_back_and_are_ordered_by_reward(tmp_path: Path) -> None:
    lines = [line(0, 0.5), line(1, None), line(2, 1.0), line(3, 0.0)]
    write_samples(tmp_path, 3, lines)
    assert sampled_steps(tmp_path) == [3]
    assert read_samples(tmp_path, 3) == lines
    assert [one.sample for one in ordered(lines, best=True, worst=False)] == [2, 0, 3, 1]
    assert [one.sample for one in ordered(lines, best=False, worst=True)] == [3, 0, 2, 1]
    first = json.loads(samples_file(tmp_path, 3).read_text().splitlines()[0])
    assert set(first) == set(SampleLine.__struct_fields__)


def test_a_damaged_samples_file_is_named_with_its_line(tmp_path: Path) -> None:
    write_samples(tmp_path, 0, [line(0, 1.0)])
    with samples_file(tmp_path, 0).open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(JigsawError, match=r"step-000000.jsonl: line 2: "):
        read_samples(tmp_path, 0)


def test_samples_shows_the_best_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(tmp_path / "jobs" / "small-00000000", 3, [line(0, 0.5), line(1, 1.0)])
    arguments = ["samples", "small", "--best", "--limit", "1", "--json", "--home", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["jigsaw", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0
    shown = json.loads(capsys.readouterr().out)
    assert [one["sample"] for one in shown["samples"]] == [1]
    code, err = run(["samples", "small", "--step", "9", "--home", str(tmp_path)], capsys, monkeypatch)
    assert (code, err) == (1, "jigsaw: small-00000000 has samples of steps 3 to 3, not of 9\n")


def test_doctor_fails_when_something_essential_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = {finding.what: finding for finding in examine(tmp_path)}
    assert {"nats-server", "valkey-server", "rollout engine", "torch", "demo model", "memory", "disk"} <= set(findings)
    assert findings["home"].ok
    monkeypatch.setattr("libs.cli.doctor._version", lambda package: None)
    monkeypatch.setattr("sys.argv", ["jigsaw", "doctor", "--json", "--home", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    found = {one["what"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert not found["rollout engine"]["ok"]
    assert "rollout-cpu" in found["rollout engine"]["hint"]


def test_summaries_are_plain_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(summary.summaries({"small-0": record()}, {})))[0]["uid"] == "small-0"
