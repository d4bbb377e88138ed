"""Whole jobs on a real node: four services, real NATS and Valkey, vLLM, a tiny real model."""

import json
import time
from pathlib import Path

import msgspec
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from libs.common.samples import read_samples, sampled_steps
from tests.e2e.conftest import NodeUnderTest

pytestmark = pytest.mark.timeout(180)


def test_a_tiny_model_learns_a_synthetic_reward(node: NodeUnderTest, tmp_path: Path) -> None:
    uid = node.submit(
        tmp_path,
        name="learns",
        rollout={"batch": 8, "group": 8, "max_new_tokens": 16},
        train={"steps": 20, "learning_rate": 3e-3, "checkpoint_every": 100},
    )
    ended = node.wait(uid)
    assert ended["status"] == "succeeded", ended
    rewards = ended["rewards"]
    assert len(rewards) == 20
    assert sum(rewards[-3:]) / 3 > 2 * sum(rewards[:3]) / 3 + 0.05
    assert ended["trajectories_trained"] == 20 * 64
    log = (node.home / "jobs" / uid / "metrics.jsonl").read_text().splitlines()
    mismatches = [json.loads(line)["mismatch/max"] for line in log]
    assert len(mismatches) == 20
    assert max(mismatches) < 1e-4  # nats: engine and trainer agree on every single token, after every weight sync


def test_what_a_job_leaves_behind(node: NodeUnderTest, tmp_path: Path) -> None:
    held_out = {"data": {"path": str(tmp_path / "data.jsonl"), "take": 4}, "every": 2}
    uid = node.submit(tmp_path, name="leaves", data={"skip": 4}, eval=held_out)
    ended = node.wait(uid)
    assert ended["status"] == "succeeded", ended
    AutoModelForCausalLM.from_pretrained(ended["model_dir"])
    AutoTokenizer.from_pretrained(ended["model_dir"])
    folder = node.home / "jobs" / uid
    assert sampled_steps(folder) == [0, 1, 2, 3]  # the last one is of the last policy's evaluation alone
    assert len([line for line in read_samples(folder, 1) if line.purpose == "train"]) == 16
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in steps for name in line}
    assert {"reward/mean", "reward/std", "loss/policy", "clip_fraction", "entropy", "response_length/mean"} <= names
    assert {"mismatch/kl", "throughput/tokens_per_s", "time/step", "time/rollout", "time/train"} <= names
    assert next((folder / "tensorboard").glob("events.out.tfevents.*")).stat().st_size > 0
    assert [step for step, _ in ended["evaluations"]] == [0, 2, 3]
    assert (folder / "checkpoints" / "step-000003.1").is_dir()


def test_two_jobs_in_turn_each_end_once(node: NodeUnderTest, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = node.submit(tmp_path / "a", replayed=True, name="first")
    second = node.submit(
        tmp_path / "b",
        name="second",
        environment={"name": "scripted", "args": {"replies": ["more"]}},
        rollout={"max_turns": 2, "max_new_tokens": 24},
    )
    assert node.wait(first)["status"] == "succeeded"
    assert node.wait(second)["status"] == "succeeded"
    listed = {job["uid"]: job["status"] for job in json.loads(node.jigsaw("jobs", "--json").stdout)["jobs"]}
    assert listed[first] == listed[second] == "succeeded"


@pytest.mark.parametrize("function", ["broken", "endless"])
def test_a_scorer_that_fails_fails_the_job_with_its_reason(node: NodeUnderTest, tmp_path: Path, function: str) -> None:
    reward = {"function": f"jigsaw_test_rewards:{function}", "timeout_s": 0.2}
    rollout = {"batch": 1, "group": 2}
    uid = node.submit(tmp_path, replayed=True, name=f"bad-{function}", reward=reward, rollout=rollout)
    ended = node.wait(uid)
    assert ended["status"] == "failed"
    assert "no group has two scored samples" in ended["reason"]
    assert ("this scorer is broken" if function == "broken" else "0.2") in ended["reason"]


def test_a_job_whose_engine_cannot_be_loaded_fails_with_its_reason(node: NodeUnderTest, tmp_path: Path) -> None:
    uid = node.submit_unchecked(tmp_path, name="broken-engine", rollout={"kv_memory_mb": 1})
    ended = node.wait(uid)
    assert ended["status"] == "failed", ended
    assert "no worker can run it: the engine can't be loaded" in ended["reason"]
    assert "memory" in ended["reason"]


def test_a_constant_reward_is_warned_of_once(node: NodeUnderTest, tmp_path: Path) -> None:
    uid = node.submit(tmp_path, replayed=True, name="constant", reward={"function": "jigsaw_test_rewards:constant"})
    ended = node.wait(uid)
    assert ended["status"] == "succeeded"
    warnings = [text for text in ended["warnings"] if "same reward (0.5)" in text]
    assert len(warnings) == 1


def test_cancel_ends_a_running_job_within_seconds(node: NodeUnderTest, tmp_path: Path) -> None:
    uid = node.submit(tmp_path, replayed=True, name="endless-job", train={"steps": 10_000})
    deadline = time.monotonic() + 60
    while not node.show(uid)["rewards"]:
        assert time.monotonic() < deadline
        time.sleep(0.3)
    started = time.monotonic()
    node.jigsaw("cancel", uid)
    ended = node.wait(uid, timeout_s=10)
    assert ended["status"] == "cancelled"
    assert time.monotonic() - started < 10


def test_a_job_without_its_model_is_refused_and_nothing_is_queued(node: NodeUnderTest, tmp_path: Path) -> None:
    before = node.jigsaw("jobs", "--json").stdout
    file = tmp_path / "job.json"
    job = {"name": "x", "model": {"path": str(tmp_path / "nowhere")}, "data": {"path": "data.jsonl"}}
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    file.write_bytes(msgspec.json.encode(job))
    refused = node.jigsaw("submit", str(file), check=False)
    assert refused.returncode == 1
    assert len(refused.stderr.strip().splitlines()) == 1
    assert "nowhere" in refused.stderr
    assert node.jigsaw("jobs", "--json").stdout == before
