"""What a person wants to know of a job, worked out from its record and its progress. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from libs.common.history import History
from libs.common.messages import JobProgress, JobRecord, JobState, Outcome

LAST_STEPS = 5


class JobSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A job in one row.

    Attributes:
        status: queued, running, or how it ended.
        steps: finished. steps_total: of the job.
        reward: mean of the last finished step. reward_first, reward_last: means of the first 3 and the last 5 steps.
        tokens_per_s: prompt and completion tokens by the time of all finished steps.
        mismatch_kl: nats per token between engine and trainer, last step.
    """

    uid: str
    name: str
    status: str
    phase: str
    steps: int
    steps_total: int
    settled: int
    expected: int
    trajectories_trained: int
    reward: float | None
    reward_first: float | None
    reward_last: float | None
    tokens_per_s: float | None
    mismatch_kl: float | None
    evaluations: list[tuple[int, float]]
    submitted_at: float
    ended_at: float | None
    reason: str
    warnings: list[str]
    model_dir: str | None
    tensorboard_dir: str | None


def summarise(record: JobRecord, progress: JobProgress | None) -> JobSummary:
    """One job, whether its trainer has said anything yet or not."""
    history = progress.history if progress else History()
    ended = record.state is JobState.ENDED
    return JobSummary(
        uid=record.job_uid,
        name=record.job.name,
        status=record.outcome.value if ended and record.outcome else record.state.value,
        phase="" if ended or progress is None else progress.phase.value,
        steps=history.steps,
        steps_total=record.job.train.steps,
        settled=progress.settled if progress else 0,
        expected=progress.expected if progress else 0,
        trajectories_trained=history.trained,
        reward=history.rewards[-1] if history.rewards else None,
        reward_first=_mean(history.first_rewards),
        reward_last=_mean(history.rewards[-LAST_STEPS:]),
        tokens_per_s=history.tokens / history.seconds if history.seconds > 0 else None,
        mismatch_kl=history.mismatch_kl if history.rewards else None,
        evaluations=history.evaluations,
        submitted_at=record.submitted_at,
        ended_at=record.ended_at,
        reason=record.reason,
        warnings=list(history.warnings.values()),
        model_dir=progress.artifacts.get("model") if progress and record.outcome is Outcome.SUCCEEDED else None,
        tensorboard_dir=progress.artifacts.get("tensorboard") if progress else None,
    )


def summaries(records: Mapping[str, JobRecord], progress: Mapping[str, JobProgress]) -> list[JobSummary]:
    """All jobs, in order of submission."""
    ordered = sorted(records.values(), key=lambda record: (record.submitted_at, record.job_uid))
    return [summarise(record, progress.get(record.job_uid)) for record in ordered]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
