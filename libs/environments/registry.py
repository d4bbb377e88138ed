"""Finds the environment that a job names: a built-in one, or a class from the node's allow-list."""

import importlib
import inspect
from collections.abc import Sequence

from libs.common.errors import JobFileError
from libs.common.plugins import require_allowed
from libs.common.sections import EnvironmentSection
from libs.environments.protocol import Environment
from libs.environments.scripted import Scripted
from libs.environments.single_turn import SingleTurn

BUILT_IN: dict[str, type[Environment]] = {"single_turn": SingleTurn, "scripted": Scripted}


def make_environment(section: EnvironmentSection, *, allow: Sequence[str], file: str = "job") -> Environment:
    """The environment of a job.

    Raises:
        JobFileError: unknown, not allowed on this node, or arguments that it doesn't take.
    """
    kind = BUILT_IN.get(section.name) or _imported(section.name, allow, file)
    try:
        inspect.signature(kind).bind(**section.args)
        return kind(**section.args)
    except Exception as error:  # it may be a user's: whatever its constructor raises is what's wrong with the arguments
        raise JobFileError(file=file, key="environment.args", expected=f"{section.name}: {error}") from None


def _imported(name: str, allow: Sequence[str], file: str) -> type[Environment]:
    if ":" not in name:
        known = ", ".join(sorted(BUILT_IN))
        expected = f"unknown environment {name!r}; built in: {known}; your own: package.module:Class"
        raise JobFileError(file=file, key="environment.name", expected=expected)
    require_allowed(name, allow, file=file, key="environment.name")
    module, attribute = name.split(":")
    try:
        kind: type[Environment] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise JobFileError(file=file, key="environment.name", expected=f"{name!r} can't be imported: {error}") from None
    return kind
