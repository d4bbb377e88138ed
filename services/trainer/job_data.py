"""The prompts of one job: which come next for training, and which are held out for evaluation.

Everything that decides the next prompt is in :class:`Position`, which a checkpoint keeps: so a resumed job issues the same
groups with the same numbers, and finds the ones in the store that it had issued before.
"""

from pathlib import Path
from typing import Any

import msgspec

from libs.common.chat import ChatTokenizer
from libs.common.job import Job
from libs.common.sections import DataSection
from libs.common.trajectory import TrajectoryId, TrajectorySpec
from libs.datasets.cursor import Cursor, CursorState
from libs.datasets.load import load
from libs.datasets.prompts import Prompt, render_all
from libs.environments.protocol import Environment
from services.trainer.steps import Purpose


class Position(msgspec.Struct, frozen=True):
    """Where a job stands in its data: the cursor, and the number that the next group gets."""

    cursor: CursorState
    next_group: int


class JobData:
    """Prompts of a job, rendered once. Its constructor reads files and renders: call it in a thread.

    Args:
        job: with dataset paths as they are on this machine.
        model: directory with the tokenizer. max_context: tokens that the model can attend to.

    Raises:
        DataError: a dataset can't be used, or a prompt doesn't fit.
    """

    def __init__(self, job: Job, *, job_uid: str, model: Path, environment: Environment, max_context: int) -> None:
        self._job, self._uid = job, job_uid
        chat = ChatTokenizer(model)

        def rendered(section: DataSection) -> list[Prompt]:
            return render_all(load(section), section, chat=chat, environment=environment, max_context=max_context)

        self._train = rendered(job.data)
        self._eval = rendered(job.eval.data)[: job.eval.prompts] if job.eval else []
        self._cursor = Cursor(rows=len(self._train), seed=job.train.seed, shuffle=job.data.shuffle)
        self._next_group = 0

    @property
    def epoch(self) -> int:
        """Whole passes over the training rows so far."""
        return self._cursor.state().epoch

    @property
    def position(self) -> dict[str, Any]:
        """Where the job stands, for a checkpoint."""
        built: dict[str, Any] = msgspec.to_builtins(Position(self._cursor.state(), self._next_group))
        return built

    def resume(self, position: dict[str, Any]) -> None:
        """Go on where a checkpoint stood.

        Raises:
            JigsawError: the dataset has changed.
        """
        stored = msgspec.convert(position, Position)
        self._cursor = Cursor.resume(stored.cursor, rows=len(self._train))
        self._next_group = stored.next_group

    def training_groups(self, count: int, *, step: int) -> list[list[TrajectorySpec]]:
        """The next ``count`` groups to train on."""
        rollout = self._job.rollout
        return [
            self._group(self._train[row], step=step, purpose="train", samples=rollout.group, temperature=rollout.temperature)
            for row in self._cursor.take(count)
        ]

    def evaluation_groups(self, *, step: int) -> list[list[TrajectorySpec]]:
        """Every held-out prompt once."""
        section = self._job.eval
        if section is None:
            return []
        return [
            self._group(prompt, step=step, purpose="eval", samples=section.samples, temperature=section.temperature)
            for prompt in self._eval
        ]

    def _group(
        self, prompt: Prompt, *, step: int, purpose: Purpose, samples: int, temperature: float
    ) -> list[TrajectorySpec]:
        group, self._next_group = self._next_group, self._next_group + 1
        rollout = self._job.rollout
        return [
            TrajectorySpec(
                id=TrajectoryId(self._uid, group, sample),
                step=step,
                purpose=purpose,
                prompt=prompt.text,
                prompt_ids=prompt.ids,
                answer=prompt.row.answer,
                row=prompt.row.fields,
                seed=seed_of(self._job.train.seed, group, sample),
                temperature=temperature,
                max_new_tokens=rollout.max_new_tokens,
                max_turns=rollout.max_turns,
                max_attempts=rollout.max_attempts,
            )
            for sample in range(samples)
        ]


def seed_of(job_seed: int, group: int, sample: int) -> int:
    """The seed of a trajectory: distinct for every (group, sample) of a job, the same whenever it is drawn again."""
    return ((job_seed * 0x9E3779B97F4A7C15 + group) * 0xBF58476D1CE4E5B9 + sample) % (1 << 63)
