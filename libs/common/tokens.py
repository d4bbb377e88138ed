"""The tokens of a trajectory as they are stored: one fixed-size record per token, appended and never rewritten.

Fixed size makes the length of the stored string the length of the trajectory, so an append can state the length that it
expects, and makes reading a trajectory one ``numpy.frombuffer`` without parsing.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

TOKEN = np.dtype([("id", "<u4"), ("logprob", "<f4"), ("step", "<u4"), ("incarnation", "<u2"), ("flags", "<u2")])
"""One token: its id, the log-prob (nats) it was sampled with, the policy version it came from, and flags."""

TRAINED = 1
"""Flag of a token that the policy sampled; a token without it was observed and is masked out of the loss."""

TokenArray = npt.NDArray[np.void]


class PolicyVersion(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A version of a job's policy: the optimiser step that made it and the trainer incarnation that made that step."""

    step: int
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.step}.{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> "PolicyVersion | None":
        """The version that was written as ``text``, or None."""
        step, dot, incarnation = text.partition(".")
        return cls(int(step), int(incarnation)) if dot and step.isdigit() and incarnation.isdigit() else None

    @property
    def age(self) -> tuple[int, int]:
        """Sorts a job's versions by when they were published: a trainer that starts over may go back in steps."""
        return self.incarnation, self.step


def sampled(ids: Sequence[int], logprobs: Sequence[float], version: PolicyVersion) -> TokenArray:
    """Token records for ids that the policy ``version`` sampled with the given log-probs (nats)."""
    tokens = np.zeros(len(ids), TOKEN)
    tokens["id"], tokens["logprob"] = ids, logprobs
    tokens["step"], tokens["incarnation"], tokens["flags"] = version.step, version.incarnation, TRAINED
    return tokens


def observed(ids: Sequence[int], version: PolicyVersion) -> TokenArray:
    """Token records for ids that an environment put in: never trained, log-prob 0."""
    tokens = np.zeros(len(ids), TOKEN)
    tokens["id"] = ids
    tokens["step"], tokens["incarnation"] = version.step, version.incarnation
    return tokens


def from_bytes(data: bytes) -> TokenArray:
    """Read-only view of stored tokens.

    Raises:
        ValueError: the length isn't a whole number of records.
    """
    return np.frombuffer(data, TOKEN)


def join(*parts: TokenArray) -> TokenArray:
    """The parts as one array, in order."""
    return np.concatenate(parts) if parts else np.zeros(0, TOKEN)
