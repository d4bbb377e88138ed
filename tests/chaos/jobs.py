"""The jobs that are run under attack: short steps, so that every phase comes often, and long enough to be hit in each."""

import json
import time
from pathlib import Path
from typing import Any

from libs.common import messages as m
from libs.common.job import Job, job_from

BATCH, GROUP = 4, 4
LEASE_S = 0.6

_LENGTHS = {"kind": "lognormal", "median": 20, "sigma": 0.7}
_REPLAY: dict[str, Any] = {
    "rollout": {
        "engine": "replay",
        "engine_args": {"lengths": _LENGTHS, "decode_ms": 6.0, "vocab_size": 512},
        "checkpoint_tokens": 4,
        "checkpoint_ms": 50,
        "max_new_tokens": 48,
    },
    "train": {"engine": "replay", "engine_args": {"tokens_per_s": 4000}, "steps": 8},
}
_TOOLS: dict[str, Any] = {
    "rollout": {"max_new_tokens": 64, "max_turns": 3},
    "environment": {"name": "scripted", "args": {"replies": ["and then", "and now"], "latency_s": [0.0, 0.05]}},
}
_MODEL: dict[str, Any] = {
    "rollout": {"max_new_tokens": 64, "kv_memory_mb": 64, "checkpoint_tokens": 8, "checkpoint_ms": 50},
    "train": {"learning_rate": 1e-3, "steps": 10},
}


def replayed_jobs(folder: Path, model: Path) -> list[Job]:
    """A single-turn job and one of several turns with a tool, without a model; two of the same end alike.

    Args:
        folder: for their dataset. model: whose tokenizer they use.
    """
    return [_job(folder, model, "single", _REPLAY), _job(folder, model, "turns", _REPLAY, _TOOLS)]


def poisoned_jobs(folder: Path, model: Path, *, deadly_seed: int) -> list[Job]:
    """A job without a model; one of its trajectories kills every engine that runs it."""
    poison = {"rollout": {"engine_args": _REPLAY["rollout"]["engine_args"] | {"deadly_seeds": [deadly_seed]}}}
    return [_job(folder, model, "poisoned", _REPLAY, poison, {"train": {"steps": 4}})]


def model_jobs(folder: Path, model: Path) -> list[Job]:
    """A job that generates with vLLM and trains with torch, in fp32."""
    return [_job(folder, model, "model", _MODEL)]


def submission(job: Job, uid: str) -> m.SubmitJob:
    """What hands a job in."""
    return m.SubmitJob(sender="chaos", job_uid=uid, job=job, submitted_at=time.time())


def _job(folder: Path, model: Path, name: str, *layers: dict[str, Any]) -> Job:
    """A job of short steps; each layer of sections lies over those before it."""
    raw: dict[str, Any] = {
        "name": f"chaos-{name}",
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(_dataset(folder))},
        "rollout": {"batch": BATCH, "group": GROUP, "lease_s": LEASE_S},
        "reward": {"function": "jigsaw_test_rewards:unhurried"},
        "train": {"checkpoint_every": 3, "seed": 5},
    }
    for layer in layers:
        for section, values in layer.items():
            raw[section] = raw.get(section, {}) | values
    return job_from(raw, file="chaos")


def _dataset(folder: Path) -> Path:
    path = folder / "data.jsonl"
    rows = [{"prompt": f"What is {number} plus 1?", "answer": str(number + 1)} for number in range(64)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
