"""The training process: owns model and optimiser.

``python -m services.trainer.training_process``, started by the trainer service only.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libs.common.job import Job
from libs.common.tokens import from_bytes
from services.trainer import checkpoint, wire
from services.trainer.batches import Completion, Group
from services.trainer.grpo import advantages
from services.trainer.learner import Learner
from services.trainer.request_loop import OnMicroBatch, serve
from services.trainer.resume import Found, load_first


class GrpoLearner:
    """A :class:`~services.trainer.learner.Learner` that takes samples as they come off the wire."""

    def __init__(self, learner: Learner, job: Job) -> None:
        self._learner, self._job = learner, job

    @property
    def step(self) -> int:
        """Steps of the job so far."""
        return self._learner.step

    @property
    def extra(self) -> dict[str, Any]:
        """What was saved with the checkpoint."""
        return self._learner.extra

    def set_threads(self, count: int) -> None:
        """Compute with this many threads."""
        self._learner.set_threads(count)

    def train(self, step: int, groups: Sequence[wire.SampleGroup], *, on_micro_batch: OnMicroBatch) -> dict[str, float]:
        """One step, with each group's advantages."""
        return self._learner.train(step, [self._group(group) for group in groups], on_micro_batch=on_micro_batch)

    def write_policy(self, directory: Path) -> None:
        """The policy in Hugging Face format."""
        self._learner.write_policy(directory)

    def write_checkpoint(self, directory: Path, *, step: int, extra: dict[str, Any]) -> None:
        """Everything that resuming needs."""
        self._learner.step = step  # a step without anything to learn from wasn't sent here, and counts all the same
        self._learner.save_checkpoint(directory, extra=extra)

    def _group(self, group: wire.SampleGroup) -> Group:
        rewards = [sample.reward for sample in group.samples]
        return Group(
            prompt_ids=group.prompt_ids,
            completions=[Completion(from_bytes(sample.tokens)) for sample in group.samples],
            advantages_G=advantages(rewards, normalise=self._job.algorithm.normalise).tolist(),
        )


def load(told: wire.Load) -> tuple[GrpoLearner, Found[checkpoint.Checkpoint]]:
    """The learner, continuing from the newest checkpoint that is whole."""
    found = load_first([Path(path) for path in told.resume], checkpoint.load)
    learner = Learner(Path(told.model), told.job, seed=told.job.train.seed, resume=found.checkpoint)
    return GrpoLearner(learner, told.job), found


if __name__ == "__main__":
    serve(load)
