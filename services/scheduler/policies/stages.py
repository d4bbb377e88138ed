"""How a job uses the units that it has, stage by stage, and which trainer a job goes to: common to stage-level policies.

A synchronous job's stages exclude each other, so whatever units the job has go to its trainer or to its rollout workers,
as its phase says; the others keep their state, paused.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from libs.common.messages import Phase, Role
from services.scheduler.policies.policy import Grant
from services.scheduler.view import View, WorkerView


def by_phase(
    job_uid: str,
    phase: Phase,
    *,
    units: Mapping[str, Sequence[int]],
    trainer: WorkerView | None,
    rollouts: Sequence[WorkerView],
) -> list[Grant]:
    """A job's grants in one phase.

    Args:
        units: what the job may use of each device.
        trainer: its trainer, None while it waits for one (nothing can go on then).
        rollouts: its rollout workers; those that can't compute it hold it and get nothing.
    """
    rolling = trainer is not None and phase is Phase.ROLLOUT
    able = [worker for worker in rollouts if job_uid not in worker.broken]
    dealt = _deal(units, able) if rolling else {}
    grants = [Grant(worker.instance, job_uid, dealt.get(worker.instance, ())) for worker in rollouts]
    if trainer is not None:
        training = () if rolling else tuple(units.get(trainer.device, ()))[: trainer.max_units]
        grants.append(Grant(trainer.instance, job_uid, training))
    return grants


def paused(job_uid: str, view: View, trainer: str) -> list[Grant]:
    """A job's grants when it may use nothing: whoever holds it goes on holding it."""
    holders = sorted(instance for instance, held in view.allocations if held == job_uid and instance in view.workers)
    return [
        Grant(instance, job_uid, ())
        for instance in holders
        if view.workers[instance].role is Role.ROLLOUT or instance == trainer
    ] + ([Grant(trainer, job_uid, ())] if trainer and trainer not in holders else [])


def pick_trainer(view: View, load: Counter[str]) -> str:
    """The trainer instance with the fewest jobs (``load``), or "" without any."""
    trainers = view.with_role(Role.TRAINER)
    return min(trainers, key=lambda worker: (load[worker.instance], worker.instance)).instance if trainers else ""


def _deal(units: Mapping[str, Sequence[int]], rollouts: Sequence[WorkerView]) -> dict[str, tuple[int, ...]]:
    """Each device's units over its workers as evenly as their limits allow, neighbouring units together."""
    dealt: dict[str, tuple[int, ...]] = {}
    for device, mine in units.items():
        workers = [worker for worker in rollouts if worker.device == device]
        counts = Counter[str]()
        while counts.total() < len(mine) and (able := [w for w in workers if counts[w.instance] < w.max_units]):
            counts.update(worker.instance for worker in able[: len(mine) - counts.total()])
        start = 0
        for worker in workers:
            dealt[worker.instance] = tuple(mine[start : start + counts[worker.instance]])
            start += counts[worker.instance]
    return dealt
