"""What a job has done so far: counts and curves over the finished steps of its surviving lineage.

A checkpoint keeps it, so that a resumed job goes on counting, and the trainer tells it with every word of progress.
"""

import msgspec


class History(msgspec.Struct, kw_only=True):
    """Everything that has been finished.

    Attributes:
        rewards: mean training reward of every finished step. evaluations: (step, mean held-out reward).
        tokens: prompt and completion tokens of all finished steps; rollout_s, train_s, other_s: where their time went.
        mismatch_kl: mean engine-trainer KL (nats per token) of the last step.
        trained: trajectories trained so far. failed: samples that ended as failed. truncated: trained at the length limit.
        retries: attempts beyond the first, over all trained samples.
        warnings: things a user must know, each once, by a key.
    """

    rewards: list[float] = []
    evaluations: list[tuple[int, float]] = []
    tokens: int = 0
    rollout_s: float = 0.0
    train_s: float = 0.0
    other_s: float = 0.0
    mismatch_kl: float = 0.0
    trained: int = 0
    failed: int = 0
    truncated: int = 0
    retries: int = 0
    warnings: dict[str, str] = {}

    @property
    def seconds(self) -> float:
        """Wall-clock time of all finished steps."""
        return self.rollout_s + self.train_s + self.other_s

    def warn(self, found: dict[str, str]) -> list[str]:
        """Remember warnings; returns the texts of those that are new."""
        new = {key: text for key, text in found.items() if key not in self.warnings}
        self.warnings.update(new)
        return list(new.values())
