"""Trajectories for tests that care about something else than what is in them."""

from typing import Any

from libs.common.trajectory import TrajectoryId, TrajectorySpec


def spec_of(id: TrajectoryId, **changes: Any) -> TrajectorySpec:
    """A small trajectory of step 0; ``changes`` are fields that the test cares about."""
    fields: dict[str, Any] = {
        "id": id,
        "step": 0,
        "prompt": "?",
        "prompt_ids": [1],
        "answer": "1",
        "row": {},
        "seed": 0,
        "temperature": 1.0,
        "max_new_tokens": 8,
        "max_turns": 1,
        "max_attempts": 2,
    }
    return TrajectorySpec(**(fields | changes))
