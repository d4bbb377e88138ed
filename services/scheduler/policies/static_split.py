"""``static-split``: each of N pipelines has a fixed part of every device's units for its whole run.

Models a cluster that is partitioned by hand. The number of parts N is fixed when the first job begins: the jobs present by
then (those that arrive while everyone is still starting are counted), at most the units of the smallest device and the
number of rollout workers. Part k of a device with U units is the range ``[k U / N, (k + 1) U / N)``. A job keeps its part
until it ends; the part then goes to the next job in turn, or stays idle: nothing is ever lent. When no part is taken the
next jobs are split anew. The split is also made anew when it can't be kept: a device with fewer than N units joins, or the
scheduler restarts; jobs beyond the new N wait, paused, for a part.

Rollout workers are dealt to the parts evenly and stay there; one moves only to a part whose job would have none.
"""

from collections import Counter
from collections.abc import Sequence

from libs.common.messages import Role
from services.scheduler.policies.policy import Grant, Placement, Plan
from services.scheduler.policies.stages import by_phase, paused, pick_trainer
from services.scheduler.view import JobView, View, WorkerView


class StaticSplit:
    """Fixed parts; remembers the split."""

    name = "static-split"
    watches_sub_stages = False

    def __init__(self) -> None:
        self._parts = 0
        self._part_of: dict[str, int] = {}
        self._dealt: dict[str, int] = {}

    def decide(self, view: View) -> Plan:
        """Free parts to the jobs whose turn it is, running ones first; then each job's stage within its part."""
        running, rollouts = view.running(), view.with_role(Role.ROLLOUT)
        self._part_of = {uid: part for uid, part in self._part_of.items() if uid in {job.uid for job in running}}
        ready = bool(rollouts) and bool(view.with_role(Role.TRAINER))
        self._split(view, len(rollouts))
        admitted = self._fill(running, view.queued() if ready else [], room=len(rollouts) - len(running))
        self._dealt = deal(rollouts, self._dealt, parts=self._parts, taken=sorted(self._part_of.values()))
        load = Counter(job.trainer for job in running if job.trainer)
        placements: list[Placement] = []
        grants: list[Grant] = []
        for job in [*running, *admitted]:
            trainer = job.trainer or pick_trainer(view, load)
            if trainer and trainer != job.trainer:
                placements.append(Placement(job.uid, trainer))
                load[trainer] += 1
            grants += self._grants(view, job, trainer=trainer, rollouts=rollouts)
        reason = f"{len(self._part_of)} of {self._parts} parts taken"
        return Plan(placements=tuple(placements), grants=tuple(grants), reason=reason)

    def _split(self, view: View, rollouts: int) -> None:
        """Fix the number of parts anew if no job has begun in its part, or if a device is too small for it."""
        smallest = min((device.units for device in view.devices.values()), default=1)
        settled = any(view.jobs[uid].begun for uid in self._part_of)
        if settled and self._parts <= smallest:
            return
        self._parts = max(1, min(len(view.jobs), smallest, rollouts))
        self._part_of, self._dealt = {}, {}

    def _fill(self, running: Sequence[JobView], queued: Sequence[JobView], *, room: int) -> list[JobView]:
        """Give free parts away; returns the queued jobs that got one, at most ``room``, so that each has a worker."""
        free = sorted(set(range(self._parts)) - set(self._part_of.values()))
        waiting = [job for job in running if job.uid not in self._part_of]
        admitted = list(queued[: max(0, min(len(free) - len(waiting), room))])
        for job, part in zip([*waiting, *admitted], free, strict=False):
            self._part_of[job.uid] = part
        return admitted

    def _grants(self, view: View, job: JobView, *, trainer: str, rollouts: Sequence[WorkerView]) -> list[Grant]:
        part = self._part_of.get(job.uid)
        if part is None:
            return paused(job.uid, view, trainer)
        units = {
            device.id: range(part * device.units // self._parts, (part + 1) * device.units // self._parts)
            for device in view.devices.values()
        }
        mine = [worker for worker in rollouts if self._dealt[worker.instance] == part]
        return by_phase(job.uid, job.phase, units=units, trainer=view.workers.get(trainer), rollouts=mine)


def deal(rollouts: Sequence[WorkerView], before: dict[str, int], *, parts: int, taken: Sequence[int]) -> dict[str, int]:
    """Which part each rollout worker serves, changing as little as possible of ``before``.

    A new worker goes to the part with the fewest on its device, then in all. Then, for each ``taken`` part without a worker,
    one moves there from a part that isn't taken, or from the part with the most if that has two.
    """
    dealt = {worker.instance: before[worker.instance] for worker in rollouts if worker.instance in before}
    device_of = {worker.instance: worker.device for worker in rollouts}
    here = Counter((device_of[instance], part) for instance, part in dealt.items())
    total = Counter(dealt.values())
    for worker in rollouts:
        if worker.instance not in dealt:
            part = min(range(parts), key=lambda p, d=worker.device: (here[d, p], total[p], p))  # type: ignore[misc]
            dealt[worker.instance] = part
            here[worker.device, part] += 1
            total[part] += 1
    for part in taken:
        if total[part] == 0 and (giver := _giver(total, taken)) is not None:
            moved = max(instance for instance, at in dealt.items() if at == giver)
            dealt[moved] = part
            total.update({giver: -1, part: 1})
    return dealt


def _giver(total: Counter[int], taken: Sequence[int]) -> int | None:
    """The part that can best spare a worker."""
    able = [part for part, count in total.items() if count > (1 if part in taken else 0)]
    return max(able, key=lambda part: (part not in taken, total[part], -part)) if able else None
