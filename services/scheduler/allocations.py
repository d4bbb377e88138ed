"""From a plan to allocations: shares of memory and of running trajectories, revisions, and what to change in which order."""

from collections import Counter
from collections.abc import Mapping

import msgspec

from libs.common import messages as m
from services.scheduler.commands import Command, DropAllocation, PutAllocation
from services.scheduler.policies.policy import Grant, Plan
from services.scheduler.view import View

Allocations = dict[tuple[str, str], m.Allocation]


def complete(plan: Plan, view: View, *, sender: str, revision: int, since: int = 0) -> Allocations:
    """The allocations that a plan means, by (instance, job); one that stays as it is keeps its revision.

    One from before revision ``since`` gets a new one all the same: a scheduler that led then may yet have its last word, and
    it must not be the newest.
    """
    memory = _memory(plan, view)
    limits = _running_limits(plan, view)
    after: Allocations = {}
    for grant in plan.grants:
        key = grant.instance, grant.job_uid
        new = m.Allocation(
            sender=sender,
            instance=grant.instance,
            job_uid=grant.job_uid,
            units=grant.units,
            memory_mb=memory.get(key, 0),
            max_running=limits.get(key, 0),
            revision=revision,
        )
        old = view.allocations.get(key)
        kept = old is not None and old.revision >= since and _content(old) == _content(new)
        after[key] = old if old is not None and kept else new
    return after


def changes(before: Mapping[tuple[str, str], m.Allocation], after: Allocations) -> list[Command]:
    """What to do, in order: units are taken from their holders before they are given to others."""
    commands: list[Command] = [DropAllocation(*key) for key in sorted(before.keys() - after.keys())]
    changed = [(key, new) for key, new in sorted(after.items()) if before.get(key) != new]
    gaining = [new for key, new in changed if set(new.units) - set(before[key].units if key in before else ())]
    commands += [PutAllocation(new) for _, new in changed if new not in gaining]
    commands += [PutAllocation(new) for new in gaining]
    return commands


def by_device(decision: m.Decision, view: View, *, before: Allocations, after: Allocations) -> list[m.Decision]:
    """The decision as observers hear it: one for each device on which somebody's units changed, with all grants on it."""
    told = []
    for device in view.devices:
        was, now = (
            {"/".join(key): len(held.units) for key, held in sorted(some.items()) if _device(key, view) == device}
            for some in (before, after)
        )
        moved = any(after.get(key) != held for key, held in before.items() if _device(key, view) == device)
        if was != now or moved:
            told.append(msgspec.structs.replace(decision, device=device, grants=now))
    return told


def _device(key: tuple[str, str], view: View) -> str | None:
    worker = view.workers.get(key[0])
    return worker.device if worker else None


def _content(allocation: m.Allocation) -> tuple[tuple[int, ...], int, int]:
    return allocation.units, allocation.memory_mb, allocation.max_running


def _known(plan: Plan, view: View) -> list[Grant]:
    """Grants to announced workers; the rules refuse a plan with others."""
    return [grant for grant in plan.grants if grant.instance in view.workers]


def _memory(plan: Plan, view: View) -> dict[tuple[str, str], int]:
    """MB of each allocation: a device's memory in equal parts for its jobs; of a job's part, half is its trainer's."""
    grants = _known(plan, view)
    device_of = {grant.instance: view.workers[grant.instance].device for grant in grants}
    jobs = Counter(device for device, _ in {(device_of[grant.instance], grant.job_uid) for grant in grants})
    trains = {
        (device_of[grant.instance], grant.job_uid) for grant in grants if view.workers[grant.instance].role is m.Role.TRAINER
    }
    rollouts = Counter(
        (device_of[grant.instance], grant.job_uid) for grant in grants if view.workers[grant.instance].role is m.Role.ROLLOUT
    )
    memory: dict[tuple[str, str], int] = {}
    for grant in grants:
        device = device_of[grant.instance]
        part = view.devices[device].memory_mb // jobs[device]
        half = part // 2 if (device, grant.job_uid) in trains and rollouts[device, grant.job_uid] else part
        training = view.workers[grant.instance].role is m.Role.TRAINER
        memory[grant.instance, grant.job_uid] = half if training else half // rollouts[device, grant.job_uid]
    return memory


def _running_limits(plan: Plan, view: View) -> dict[tuple[str, str], int]:
    """Running trajectories of each rollout allocation: a step's worth divided by the workers that compute for the job.

    So the first worker to pull doesn't take the whole batch. While all are paused, all of them count.
    """
    rollouts = [grant for grant in _known(plan, view) if view.workers[grant.instance].role is m.Role.ROLLOUT]
    computing = Counter(grant.job_uid for grant in rollouts if grant.units)
    holding = Counter(grant.job_uid for grant in rollouts)
    limits: dict[tuple[str, str], int] = {}
    for grant in rollouts:
        if (job := view.jobs.get(grant.job_uid)) is not None:
            workers = computing[grant.job_uid] or holding[grant.job_uid]
            limits[grant.instance, grant.job_uid] = min(job.max_running, -(-job.trajectories // workers))
    return limits
