"""Every error that JigsawRL raises on purpose.

One root, so that an edge (CLI, service shell) can tell "we know what went wrong" from a bug. The message of each is one
line that a user can act on; fields carry what a program needs.
"""

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class JigsawError(Exception):
    """Root of all expected errors; its text is one line for the user."""


class JobFileError(JigsawError):
    """A job file that can't be accepted.

    Args:
        file: the job file as the user named it.
        key: dotted key inside it, or "" for the whole file.
        expected: what was expected there.
    """

    def __init__(self, *, file: str, key: str, expected: str) -> None:
        self.file, self.key, self.expected = file, key, expected
        super().__init__(f"{file}: {key}: {expected}" if key else f"{file}: {expected}")


class DataError(JigsawError):
    """A dataset, or one row of it, that can't be used.

    Args:
        file: the dataset.
        row: 1-based row number, or None when the whole dataset is at fault.
        field: the column at fault, or "".
        problem: what is wrong.
    """

    def __init__(self, *, file: str, problem: str, row: int | None = None, field: str = "") -> None:
        self.file, self.row, self.field, self.problem = file, row, field, problem
        where = file if row is None else f"{file}: row {row}"
        super().__init__(f"{where}: {field}: {problem}" if field else f"{where}: {problem}")


class ModelError(JigsawError):
    """A model that can't be found, read or used for what a job asks of it."""


class RewardError(JigsawError):
    """A reward function that can't be loaded, so that nothing can be scored."""


class NodeError(JigsawError):
    """The node can't start, isn't running, or lacks something that it needs."""


class Unreachable(JigsawError):
    """Bus or store have been away for longer than patience: a trouble of the infrastructure, never of a job or a sample."""


class MessageError(JigsawError):
    """A message off the wire that this version can't decode."""


class QueueGone(JigsawError):
    """A durable consumer doesn't exist: not yet, or no longer because its job has ended."""


class StaleEpochError(JigsawError):
    """A write refused by the store: someone with a newer fencing epoch owns the record."""


class TokensLost(StaleEpochError):
    """Tokens that don't follow what the store has: it lost some in a crash, and its owner can't go on from what it knows."""


class TransitionError(JigsawError):
    """The scheduler was asked for a transition that its state doesn't allow."""


class RuleViolation(JigsawError):
    """A scheduling decision breaks a rule that every decision must keep."""


def leaves(error: E | BaseExceptionGroup[E]) -> list[E]:
    """The single errors in a nested group, what was raised first first; of a single error itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for part in error.exceptions for leaf in leaves(part)]
