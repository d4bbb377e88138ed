"""The learning rate as a pure function of the step, so that resuming needs no state of its own."""

import math

from libs.common.sections import TrainSection


def learning_rate(step: int, train: TrainSection) -> float:
    """Learning rate of the update that ``step`` (0-based) makes.

    Linear warm-up over ``warmup_steps`` updates, the first of which already moves; then constant, or a linear or cosine
    fall over the remaining steps that reaches 0 only after the last one.
    """
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    share = min(1.0, (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps))
    match train.schedule:
        case "constant":
            return train.learning_rate
        case "linear":
            return train.learning_rate * (1.0 - share)
        case "cosine":
            return train.learning_rate * 0.5 * (1.0 + math.cos(math.pi * share))
