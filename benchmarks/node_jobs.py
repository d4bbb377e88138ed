"""Jobs on an embedded node, run from a benchmark: the same node and the same services as ``jigsaw demo``'s."""

import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec

from libs.cli.follow import connected, follow
from libs.cli.options import Target
from libs.cli.submit import queue
from libs.common.errors import JigsawError
from libs.common.job import Job, load_job
from libs.common.logging import configure
from libs.common.messages import JobProgress, Outcome
from libs.common.settings import default_settings
from libs.node.supervisor import Node, Ports, run_node

DEMO = Path(__file__).parents[1] / "examples" / "demo-products.toml"

Result = TypeVar("Result")


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """A step as the job's own log has it; times in seconds, tokens of prompts and completions.

    Attributes:
        time: since 1970, when the step ended.
        compute: the training process's own time.
    """

    step: int
    time: float
    rollout: float = msgspec.field(name="time/rollout")
    train: float = msgspec.field(name="time/train")
    publish: float = msgspec.field(name="time/publish")
    checkpoint: float = msgspec.field(name="time/checkpoint")
    compute: float = msgspec.field(name="time/compute")
    tokens: float = msgspec.field(name="throughput/tokens")
    length_min: float = msgspec.field(name="response_length/min")
    length_max: float = msgspec.field(name="response_length/max")
    length_mean: float = msgspec.field(name="response_length/mean")


class PolicySwitched(msgspec.Struct, frozen=True):
    """A line of a rollout service's log."""

    policy: str
    timestamp: datetime


class Finished(msgspec.Struct, frozen=True):
    """A job that succeeded: its steps, the node's folder with logs and samples, and its curves.

    Attributes:
        rewards: mean training reward of each step. evaluations: (steps trained, mean held-out reward).
    """

    rows: list[StepRow]
    home: Path
    rewards: list[float]
    evaluations: list[tuple[int, float]]

    def intervals(self, *, after: int) -> list[tuple[StepRow, float]]:
        """Steps after the first ``after`` ones, each with its seconds from the end of the one before to its own end."""
        pairs = zip(self.rows, self.rows[1:], strict=False)
        return [(row, row.time - before.time) for before, row in pairs if row.step >= after]


def on_node(home: Path, body: Callable[[Node], Awaitable[Result]], *, log_level: str = "info") -> Result:
    """Run ``body`` on a node of its own; call it from the main thread."""
    settings = msgspec.structs.replace(default_settings(home.absolute()), log_level=log_level)
    log = configure(instance="node", level="warning")
    return anyio.run(lambda: run_node(settings, body, ports=Ports(), log=log))


async def run_job(node: Node, job: Job) -> Finished:
    """Queue a job and wait for its end.

    Raises:
        JigsawError: it didn't succeed.
    """
    target = Target(node.addresses.nats_url, node.addresses.redis_url, node.settings)
    async with connected(target) as bus:
        uid = await queue(bus, job)
        (summary,) = await follow(bus, {uid}, lambda _: None)
        progress = await (await bus.table(JobProgress)).get(uid)
    if summary.status != Outcome.SUCCEEDED or progress is None:
        raise JigsawError(f"{uid} {summary.status}: {summary.reason}; logs: {node.home / 'logs'}")
    metrics = node.settings.job_folder(uid) / "metrics.jsonl"
    rows = rows_of(metrics.read_bytes())
    return Finished(rows, node.home, rewards=progress.history.rewards, evaluations=progress.history.evaluations)


def rows_of(metrics: bytes) -> list[StepRow]:
    """The trained steps of a job's ``metrics.jsonl``; lines of evaluations alone are left out.

    Raises:
        JigsawError: a line isn't what the trainer writes.
    """
    try:
        lines = [msgspec.json.decode(line, type=dict[str, int | float]) for line in metrics.splitlines()]
        return [msgspec.convert(line, StepRow) for line in lines if "time/step" in line]
    except msgspec.MsgspecError as error:
        raise JigsawError(f"metrics.jsonl isn't what this benchmark reads: {error}") from None


def demo_job(model: str, *, steps: int) -> Job:
    """The demo's ``products`` job on this model, without evaluation, with a checkpoint at the end only."""
    job = load_job(DEMO)
    train = msgspec.structs.replace(job.train, steps=steps, checkpoint_every=steps)
    return msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, path=model), train=train, eval=None)


def policy_waits(finished: Finished) -> dict[int, float]:
    """By step, seconds from the end of the step before until every engine that took part had the step's policy in force.

    From the rollout services' logs at level debug; the first step, whose policy is loaded with the engine, isn't there.
    """
    ended = {row.step: row.time for row in finished.rows}
    waits: dict[int, float] = {}
    for log in sorted((finished.home / "logs").glob("rollout-*.log")):
        for line in log.read_text(encoding="utf-8").splitlines():
            if '"policy_switched"' not in line:
                continue
            event = msgspec.json.decode(line, type=PolicySwitched)
            step = int(event.policy.partition(".")[0])
            if step - 1 in ended:
                waits[step] = max(waits.get(step, 0.0), event.timestamp.timestamp() - ended[step - 1])
    return waits


def fresh_home(folder: Path, name: str) -> Path:
    """A new folder for a node below ``folder``."""
    home = folder / f"{name}-{time.monotonic_ns()}"
    home.mkdir(parents=True)
    return home
