"""Policies by name."""

from collections.abc import Callable

from libs.common.errors import NodeError
from services.scheduler.policies.policy import Policy
from services.scheduler.policies.sequential import Sequential
from services.scheduler.policies.static_split import StaticSplit

POLICIES: dict[str, Callable[[], Policy]] = {policy.name: policy for policy in (Sequential, StaticSplit)}


def policy_named(name: str) -> Policy:
    """A new policy.

    Raises:
        NodeError: there is none of that name.
    """
    if name not in POLICIES:
        raise NodeError(f"scheduler.policy: {name!r} is not a policy; there are {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
