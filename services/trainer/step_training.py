"""A step's training: the update on what its rollout has brought, and the account of both in numbers, text and history.

However the samples were come by: it asks for settled groups and nothing else.
"""

from collections.abc import Mapping, Sequence

import anyio
from structlog.typing import FilteringBoundLogger

from libs.common.errors import JigsawError
from libs.common.history import History
from libs.common.job import Job
from libs.common.trajectory import Record
from services.trainer import wire
from services.trainer.compute_link import ComputeLink
from services.trainer.run_log import RunLog
from services.trainer.step_rollout import Gathered
from services.trainer.summary import account, warnings_of


class StepTraining:
    """The updates of one life of a job's step loop.

    Args:
        history: is added to. run_log: what people look at. log: told of what they must know at once.
    """

    def __init__(
        self, job: Job, *, compute: ComputeLink, history: History, run_log: RunLog, log: FilteringBoundLogger
    ) -> None:
        self._job, self._compute, self._history, self._run_log, self._log = job, compute, history, run_log, log

    async def train(self, step: int, gathered: Gathered) -> dict[str, float]:
        """Update the policy; returns the step's metrics.

        Raises:
            JigsawError: nothing can be learned from any group.
        """
        summary = account(self._history, gathered.training)
        metrics = await self._update(step, gathered)
        metrics |= self.evaluated(step, gathered) | summary.metrics()
        for warning in self._history.warn(warnings_of(summary, metrics)):
            self._log.warning("attention", step=step, message=warning)
        return metrics

    def evaluated(self, step: int, gathered: Gathered) -> dict[str, float]:
        """Add a step's held-out samples, if it has any, to the history; returns their metrics."""
        rewards = [record.reward for record in gathered.evaluated if record.reward is not None]
        if not rewards:
            return {}
        mean = sum(rewards) / len(rewards)
        self._history.evaluations.append((step, mean))
        return {"eval/reward_mean": mean}

    async def write(self, step: int, gathered: Gathered, metrics: Mapping[str, float]) -> None:
        """Write down what people look at: every sample, and the numbers.

        Raises:
            JigsawError: the log can't be written.
        """
        records = [*gathered.trained, *gathered.evaluated]
        shown = self._job.train.log_samples if gathered.training else 0
        await anyio.to_thread.run_sync(lambda: self._run_log.samples(step, records, shown=shown))
        await anyio.to_thread.run_sync(lambda: self._run_log.scalars(step, metrics))

    async def _update(self, step: int, gathered: Gathered) -> dict[str, float]:
        """Train on the valid groups, if any of them is left to learn from."""
        if not gathered.valid:
            errors = [record.error for record in gathered.trained if record.error]
            raise JigsawError(f"step {step}: no group has two scored samples; first error: {(errors or ['none'])[0]}")
        groups = [_to_wire(group) for group in gathered.training if group[0].spec.id.group in gathered.valid]
        if self._job.algorithm.drop_zero_variance:
            groups = [group for group in groups if len({sample.reward for sample in group.samples}) > 1]
        if not groups:
            return {"loss/policy": 0.0, "grad_norm": 0.0}
        metrics = await self._compute.train(step, groups)
        self._history.trained += sum(len(group.samples) for group in groups)
        self._history.mismatch_kl = metrics.get("mismatch/kl", 0.0)
        return metrics


def _to_wire(group: Sequence[Record]) -> wire.SampleGroup:
    """A group's scored samples as the training process takes them."""
    scored = [record for record in group if record.state == "scored"]
    samples = [wire.Sample(record.tokens.tobytes(), record.reward or 0.0) for record in scored]
    return wire.SampleGroup(group[0].spec.prompt_ids, samples)
