"""Where the time of a demo step goes, on an embedded node.

A step lasts from the end of the one before to its own end. Its parts, in seconds of wall clock:

- *policy*: written, hashed and published after training, then fetched and loaded by the engines before the first token;
- *rollout*: an engine computes (its main thread is on a core or waits for one), with the step's policy in force;
- *training*: the training process works on the step's batch;
- *checkpoint*, where one is made between two steps (here none is: the demo makes one, after its last step);
- *waiting*: the rest, in which none of the above happens: everything waits for bus, store, scheduling, leases or scores.

The *overhead* of bus, store, scheduling and reward is that waiting, and the CPU seconds of all services and servers as a
share of what the cores offer, because those were taken from the engines or the trainer. Where a service works while
everything waits for it, it counts twice; so the sum is an upper bound.
"""

from functools import partial
from pathlib import Path

import anyio
import msgspec

from benchmarks.fixed_length import MODEL
from benchmarks.node_jobs import Finished, StepRow, demo_job, fresh_home, on_node, policy_waits, run_job
from benchmarks.processes import COMPUTE, Activity, cpu_seconds, members, resident_mb
from benchmarks.report import Readings, Report
from libs.node.supervisor import Node
from services.trainer.process import usable_cores

SETTLE_S = 5.0
WARM_UP = 2
SERVICES = ("scheduler", "trainer", "rollout", "reward")
SERVERS = ("nats", "valkey")


class Parts(msgspec.Struct, frozen=True):
    """A step's parts in seconds; they add up to ``wall``."""

    wall: float
    policy: float
    rollout: float
    training: float
    checkpoint: float

    @property
    def waiting(self) -> float:
        """What is left of the step."""
        return self.wall - self.policy - self.rollout - self.training - self.checkpoint


def parts_of(row: StepRow, *, wall: float, policy_wait: float, engine_active: float) -> Parts:
    """A step's parts.

    Args:
        wall: seconds since the end of the step before. policy_wait: of them, until the step's policy was in force.
        engine_active: seconds after that in which an engine computed.
    """
    return Parts(
        wall=wall,
        policy=row.publish + policy_wait,
        rollout=engine_active,
        training=row.compute,
        checkpoint=row.checkpoint,
    )


def measure_step(report: Report, folder: Path, *, steps: int) -> None:
    """Run the demo's job and report the parts of its steps without the first two."""
    with Activity() as activity:
        job = demo_job(MODEL, steps=WARM_UP + steps)
        finished = on_node(fresh_home(folder, "step"), partial(run_job, job=job), log_level="debug")
    waits = policy_waits(finished)
    parts: list[Parts] = []
    for row, wall in finished.intervals(after=WARM_UP):
        start = row.time - wall
        active = activity.active_s("engine", start + waits[row.step], row.time)
        parts.append(parts_of(row, wall=wall, policy_wait=waits[row.step], engine_active=active))
    report.add("step.seconds", Readings.of([part.wall for part in parts]), "s", "16 prompts x 4, up to 32 new tokens")
    for name in ("rollout", "training", "policy", "waiting"):
        share = Readings.of([100 * getattr(part, name) / part.wall for part in parts])
        report.add(f"step.{name}_percent", share, "% of step")
    services = _report_cpu(report, activity, finished, seconds=sum(part.wall for part in parts))
    overhead = Readings.of([100 * part.waiting / part.wall + services for part in parts])
    report.add("step.overhead_percent", overhead, "% of step", "waiting + all services' CPU; under 5")


def _report_cpu(report: Report, activity: Activity, finished: Finished, *, seconds: float) -> float:
    """Report the CPU of services and servers over the measured steps; returns their share of what the cores offer, in %."""
    end = finished.rows[-1].time
    used = activity.cpu_s(end - seconds, end)
    capacity = seconds * usable_cores()
    for role in (*SERVICES, *SERVERS):
        report.add(f"step.cpu.{role}_percent", 100 * used.get(role, 0.0) / capacity, "% of cores")
    together = sum(value for role, value in used.items() if role not in COMPUTE.values())
    report.add("step.cpu.all_services_percent", 100 * together / capacity, "% of cores", "servers included")
    return 100 * together / capacity


def measure_idle(report: Report, folder: Path, *, seconds: float) -> None:
    """Start a node, give it nothing to do, and see what it uses."""

    async def watch(_node: Node) -> None:
        await anyio.sleep(SETTLE_S)
        before = {member: cpu_seconds(member.pid) for member in members()}
        await anyio.sleep(seconds)
        shares: dict[str, float] = {}
        for member, used in before.items():
            shares[member.role] = shares.get(member.role, 0.0) + 100 * (cpu_seconds(member.pid) - used) / seconds
        services = sum(shares.get(role, 0.0) for role in SERVICES)
        report.add("idle.services_percent", services, "% of a core", f"together, over {seconds:g} s; under 2")
        report.add("idle.servers_percent", sum(shares.get(role, 0.0) for role in SERVERS), "% of a core", "NATS, Valkey")
        for role in (*SERVICES, *SERVERS):
            sizes = [resident_mb([member.pid]) for member in before if member.role == role]
            note = "under 150 each" if role in SERVICES else ""
            report.add(f"idle.{role}_mb", Readings.of(sizes), "MiB", note)

    on_node(fresh_home(folder, "idle"), watch)
