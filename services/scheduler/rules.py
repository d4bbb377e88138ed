"""The rules that every decision keeps, whoever made it; checked on each one before it takes effect.

Each rule is a function from the proposal to the ways in which it is broken, in words. Rules about migration, resizing and
latency bounds belong here too, once something decides about these.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from libs.common import messages as m
from libs.common.errors import RuleViolation
from services.scheduler.allocations import Allocations
from services.scheduler.policies.policy import Plan
from services.scheduler.view import JobView, View


class Proposal(msgspec.Struct, frozen=True):
    """A decision before it takes effect: the situation, the plan, the allocations it means, and its revision."""

    view: View
    plan: Plan
    after: Allocations
    revision: int

    def trainer_of(self, job: JobView) -> str:
        """The trainer that the job has after this decision, or ""."""
        placed = {placement.job_uid: placement.trainer for placement in self.plan.placements}
        return placed.get(job.uid, job.trainer)


def check(proposal: Proposal) -> None:
    """Check a decision.

    Raises:
        RuleViolation: it breaks a rule; all breaches are in the text.
    """
    broken = [f"{rule.__name__}: {how}" for rule in RULES for how in rule(proposal)]
    if broken:
        raise RuleViolation(f"revision {proposal.revision} ({proposal.plan.reason}): " + "; ".join(broken))


def only_announced_workers(proposal: Proposal) -> Iterator[str]:
    """Work and jobs go to workers that are there and not draining."""
    for instance, job_uid in proposal.after:
        if instance not in proposal.view.workers:
            yield f"{instance} holds {job_uid} and isn't there"
    for placement in proposal.plan.placements:
        worker = proposal.view.workers.get(placement.trainer)
        if worker is None or worker.role is not m.Role.TRAINER:
            yield f"{placement.job_uid} is placed on {placement.trainer!r}, which is no trainer that is there"


def units_of_the_device_once(proposal: Proposal) -> Iterator[str]:
    """A unit exists, and nobody else has it."""
    holders: dict[tuple[str, int], str] = {}
    for (instance, job_uid), allocation in proposal.after.items():
        if (worker := proposal.view.workers.get(instance)) is None:
            continue
        for unit in allocation.units:
            holder = f"{instance}/{job_uid}"
            if not 0 <= unit < proposal.view.devices[worker.device].units:
                yield f"{holder} has unit {unit}, which {worker.device} doesn't have"
            elif other := holders.get((worker.device, unit)):
                yield f"unit {unit} of {worker.device} is given to {other} and to {holder}"
            holders[worker.device, unit] = holder


def workers_within_limits(proposal: Proposal) -> Iterator[str]:
    """No instance has more units than it can use, over all its jobs."""
    held = Counter[str]()
    for (instance, _), allocation in proposal.after.items():
        held[instance] += len(allocation.units)
    for instance, count in held.items():
        worker = proposal.view.workers.get(instance)
        if worker is not None and count > worker.max_units:
            yield f"{instance} has {count} units and can use {worker.max_units}"


def memory_of_the_device(proposal: Proposal) -> Iterator[str]:
    """The memory handed out is there."""
    given = Counter[str]()
    for (instance, _), allocation in proposal.after.items():
        if (worker := proposal.view.workers.get(instance)) is not None:
            given[worker.device] += allocation.memory_mb
    for device, memory_mb in given.items():
        if memory_mb > proposal.view.devices[device].memory_mb:
            yield f"{memory_mb} MB of {device} are given, it has {proposal.view.devices[device].memory_mb}"


def only_running_jobs(proposal: Proposal) -> Iterator[str]:
    """Nothing is allocated to a job that has ended or hasn't been admitted."""
    placed = {placement.job_uid for placement in proposal.plan.placements}
    for instance, job_uid in proposal.after:
        job = proposal.view.jobs.get(job_uid)
        if job is None or (job.state is not m.JobState.RUNNING and job_uid not in placed):
            yield f"{instance} holds {job_uid}, which isn't running"
    for uid in placed:
        if uid not in proposal.view.jobs or proposal.view.jobs[uid].trainer:
            yield f"{uid} is placed, and isn't waiting for a trainer"


def one_trainer_each(proposal: Proposal) -> Iterator[str]:
    """A job is held by its own trainer, and by no other."""
    for job in proposal.view.jobs.values():
        trainer = proposal.trainer_of(job)
        holders = {instance for instance, uid in proposal.after if uid == job.uid} & {
            worker.instance for worker in proposal.view.with_role(m.Role.TRAINER)
        }
        if holders != ({trainer} if trainer else set()):
            yield f"{job.uid} is held by {sorted(holders)}, its trainer is {trainer!r}"


def revisions_increase(proposal: Proposal) -> Iterator[str]:
    """An allocation that changes has a revision higher than every earlier one, one that doesn't keeps its own."""
    for key, allocation in proposal.after.items():
        changed = proposal.view.allocations.get(key) != allocation
        if changed and not allocation.revision == proposal.revision > proposal.view.revision:
            yield f"{'/'.join(key)} changes with revision {allocation.revision} after {proposal.view.revision}"


def someone_progresses(proposal: Proposal) -> Iterator[str]:
    """While an admitted job could go on, one does: it has units where its phase needs them."""
    able = [job for job in proposal.view.jobs.values() if proposal.trainer_of(job) and _workers(proposal, job)]
    if able and not any(
        proposal.after[key].units for job in able for key in _workers(proposal, job) if key in proposal.after
    ):
        yield f"nobody has the units to go on, of {', '.join(job.uid for job in able)}"


def preemption_makes_room(proposal: Proposal) -> Iterator[str]:
    """A job loses units in the middle of a stage only if another starts with more units, or on another instance."""
    workers = proposal.view.workers
    before = {
        (instance, uid): held
        for (instance, uid), held in proposal.view.allocations.items()
        if instance in workers and uid not in workers[instance].broken
    }
    had, has = _units(before), _units(proposal.after)
    gains = {uid for uid in has if has[uid] > had[uid]} | {uid for _, uid in proposal.after.keys() - before.keys()}
    for job in proposal.view.jobs.values():
        same_stage = job.granted_phase is job.phase and proposal.trainer_of(job) == job.trainer
        if same_stage and has[job.uid] < had[job.uid] and not gains - {job.uid}:
            yield f"{job.uid} loses {had[job.uid] - has[job.uid]} units in {job.phase}, and nobody gets any"


RULES: tuple[Callable[[Proposal], Iterator[str]], ...] = (
    only_announced_workers,
    units_of_the_device_once,
    workers_within_limits,
    memory_of_the_device,
    only_running_jobs,
    one_trainer_each,
    revisions_increase,
    someone_progresses,
    preemption_makes_room,
)


def _workers(proposal: Proposal, job: JobView) -> list[tuple[str, str]]:
    """(instance, job) of the workers on which the job's phase could go on."""
    if job.phase is m.Phase.ROLLOUT:
        able = [worker for worker in proposal.view.with_role(m.Role.ROLLOUT) if job.uid not in worker.broken]
        return [(worker.instance, job.uid) for worker in able]
    return [(proposal.trainer_of(job), job.uid)]


def _units(allocations: Allocations) -> Counter[str]:
    units = Counter[str]()
    for (_, job_uid), allocation in allocations.items():
        units[job_uid] += len(allocation.units)
    return units
