"""What a job has done so far: counts and curves over the finished steps of its surviving lineage.

A checkpoint keeps it, so that a resumed job goes on counting, and the trainer tells it with every word of progress.
"""

import msgspec

FIRST_STEPS = 3
TOLD = 256


class History(msgspec.Struct, kw_only=True):
    """Everything that has been finished.

    Attributes:
        steps: finished so far. first_rewards: mean training rewards of the first ``FIRST_STEPS`` of them.
        rewards: the same of every finished step, or, abridged, of the last. evaluations: (step, mean held-out reward),
            likewise.
        tokens: prompt and completion tokens of all finished steps; rollout_s, train_s, other_s: where their time went.
        mismatch_kl: mean engine-trainer KL (nats per token) of the last step.
        trained: trajectories trained so far. failed: samples that ended as failed. truncated: trained at the length limit.
        retries: attempts that failed in an ordinary way (environment, tool, deadline).
        deaths: of workers and engines under a trajectory. resumes: claims of one that had tokens. moves: planned transfers.
        recomputed_tokens: prompt and response tokens whose KV resumes and moves had to compute again. These five are over
            all training samples of finished steps, those that ended as failed included.
        warnings: things a user must know, each once, by a key.
    """

    steps: int = 0
    first_rewards: list[float] = []
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
    deaths: int = 0
    resumes: int = 0
    moves: int = 0
    recomputed_tokens: int = 0
    warnings: dict[str, str] = {}

    @property
    def seconds(self) -> float:
        """Wall-clock time of all finished steps."""
        return self.rollout_s + self.train_s + self.other_s

    def rewarded(self, reward: float) -> None:
        """Another step is finished."""
        self.steps += 1
        self.rewards.append(reward)
        if len(self.first_rewards) < FIRST_STEPS:
            self.first_rewards.append(reward)

    def abridged(self) -> "History":
        """With the end of the curves alone: a message stays small however long the job is."""
        return msgspec.structs.replace(self, rewards=self.rewards[-TOLD:], evaluations=self.evaluations[-TOLD:])

    def warn(self, found: dict[str, str]) -> list[str]:
        """Remember warnings; returns the texts of those that are new."""
        new = {key: text for key, text in found.items() if key not in self.warnings}
        self.warnings.update(new)
        return list(new.values())
