"""What a step's samples look like in numbers, and what they add to a job's history; pure.

Also the place where it is decided what a user must be warned of: conditions under which training runs and learns nothing.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from libs.common.history import History
from libs.common.trajectory import Record


class Durability(msgspec.Struct, frozen=True):
    """What it took to get a step's samples, failed ones included; fields as in :class:`~libs.common.history.History`."""

    retries: int
    deaths: int
    resumes: int
    moves: int
    recomputed_tokens: int


class StepSummary(msgspec.Struct, frozen=True):
    """What one step's scored samples look like, and what it took to get them.

    Attributes:
        rewards, lengths: per sample; lengths in sampled and observed tokens. truncated: share cut off.
        mixed: share of groups whose rewards differ.
    """

    rewards: list[float]
    lengths: list[int]
    truncated: float
    mixed: float
    durability: Durability

    def metrics(self) -> dict[str, float]:
        """By TensorBoard name."""
        durability = {f"durability/{name}": float(count) for name, count in msgspec.structs.asdict(self.durability).items()}
        if not self.rewards:
            return durability
        rewards, lengths = np.array(self.rewards), np.array(self.lengths)
        return {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "reward/mixed_groups": self.mixed,
            "response_length/mean": float(lengths.mean()),
            "response_length/max": float(lengths.max()),
            "response_length/min": float(lengths.min()),
            "response_length/truncated": self.truncated,
            **durability,
        }


TRUNCATED_BY = ("length", "context")


def summarise(groups: Sequence[Sequence[Record]]) -> StepSummary:
    """Summary of the scored samples of a step's groups."""
    valid = [[record for record in group if record.state == "scored" and record.reward is not None] for group in groups]
    flat = [record for group in valid for record in group]
    cut = [record.stop_reason in TRUNCATED_BY for record in flat]
    mixed = [len({record.reward for record in group}) > 1 for group in valid if group]
    return StepSummary(
        rewards=[record.reward for record in flat if record.reward is not None],
        lengths=[len(record.tokens) for record in flat],
        truncated=sum(cut) / len(cut) if cut else 0.0,
        mixed=sum(mixed) / len(mixed) if mixed else 0.0,
        durability=_durability([record for group in groups for record in group]),
    )


def _durability(records: Sequence[Record]) -> Durability:
    return Durability(
        retries=sum(record.failures for record in records),
        deaths=sum(record.deaths for record in records),
        resumes=sum(record.resumes for record in records),
        moves=sum(record.moves for record in records),
        recomputed_tokens=sum(record.recomputed for record in records),
    )


def account(history: History, groups: Sequence[Sequence[Record]]) -> StepSummary:
    """Add a step's training samples to the history; returns their summary."""
    summary = summarise(groups)
    flat = [record for group in groups for record in group]
    history.rewarded(sum(summary.rewards) / len(summary.rewards) if summary.rewards else 0.0)
    history.tokens += token_count(flat)
    history.failed += sum(record.state == "failed" for record in flat)
    history.truncated += sum(record.stop_reason in TRUNCATED_BY for record in flat)
    history.retries += summary.durability.retries
    history.deaths += summary.durability.deaths
    history.resumes += summary.durability.resumes
    history.moves += summary.durability.moves
    history.recomputed_tokens += summary.durability.recomputed_tokens
    return summary


def token_count(records: Sequence[Record]) -> int:
    """Prompt and completion tokens."""
    return sum(len(record.spec.prompt_ids) + len(record.tokens) for record in records)


def warnings_of(summary: StepSummary, metrics: dict[str, float]) -> dict[str, str]:
    """What a user must know about a step, by a key that makes each warning come once."""
    found: dict[str, str] = {}
    if summary.rewards and summary.truncated == 1.0:
        found["all_truncated"] = (
            "every completion was cut off at its token limit: the model never finished an answer, so rewards say little; "
            "raise rollout.max_new_tokens or check the prompt's format"
        )
    if len(summary.rewards) > 1 and len(set(summary.rewards)) == 1:
        found["constant_reward"] = (
            f"every completion of a step got the same reward ({summary.rewards[0]:g}): all advantages are 0 and nothing is "
            "learned from it; check the reward function, or the task is too hard or solved"
        )
    if metrics.get("loss/policy") == 0.0 and metrics.get("grad_norm") == 0.0:
        found["zero_loss"] = "the loss and its gradient were exactly 0: the step changed nothing"
    if metrics.get("updates_skipped"):
        found["update_skipped"] = "an update was skipped because its loss or gradient was not finite"
    return found
