"""``sequential``: one pipeline at a time has every unit of every device, until it ends.

Models a stage-level system on a dedicated cluster (verl): the highest priority first, then the order of submission; a
running job is never interrupted. Whatever its current stage can't use stays idle, which is what the other policies are
measured against.
"""

from collections import Counter

from libs.common.messages import Role
from services.scheduler.policies.policy import Placement, Plan
from services.scheduler.policies.stages import by_phase, paused, pick_trainer
from services.scheduler.view import JobView, View


class Sequential:
    """One job at a time."""

    name = "sequential"
    watches_sub_stages = False

    def decide(self, view: View) -> Plan:
        """Everything to the running job; without one, to the queued job whose turn it is.

        More than one job runs only if another policy had admitted them before: they wait, paused, in turn.
        """
        rollouts = view.with_role(Role.ROLLOUT)
        running = view.running()
        turn = self._turn(view, running)
        if turn is None:
            return Plan(reason="no job can run")
        trainer = turn.trainer or pick_trainer(view, Counter(job.trainer for job in running))
        placements = (Placement(turn.uid, trainer),) if trainer and trainer != turn.trainer else ()
        units = {device.id: range(device.units) for device in view.devices.values()}
        grants = by_phase(turn.uid, turn.phase, units=units, trainer=view.workers.get(trainer), rollouts=rollouts)
        for job in running:
            if job is not turn:
                grants += paused(job.uid, view, job.trainer)
        return Plan(placements=placements, grants=tuple(grants), reason=f"{turn.uid} has everything ({turn.phase})")

    @staticmethod
    def _turn(view: View, running: list[JobView]) -> JobView | None:
        if running:
            return running[0]
        queued = view.queued()
        ready = view.with_role(Role.ROLLOUT) and view.with_role(Role.TRAINER)
        return queued[0] if queued and ready else None
