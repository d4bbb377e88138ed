"""From a job's ``[reward]`` section to a scorer that can run, checked up front without importing anything heavy.

Built-in scorers have a plain name; a user's function is ``package.module:function`` and must be on the node's allow-list.
User modules are only ever imported in worker processes, never by the service.
"""

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_type_hints

import msgspec

from libs.common.errors import JobFileError
from libs.common.plugins import require_allowed
from libs.common.sections import RewardSection


class Scorer(msgspec.Struct, frozen=True):
    """A scorer, ready to be loaded by a worker process.

    Attributes:
        name: as in the job file.
        target: ``module:function``.
        args: keyword arguments of every call.
        needs: modules imported ahead of the first call, outside its time limit.
        folders: put at the front of the worker's ``sys.path``.
    """

    name: str
    target: str
    args: dict[str, Any] = {}
    needs: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


_NEEDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "exact": (),
        "gsm8k": (),
        "last_number": (),
        "math_verify": ("math_verify",),
        "reasoning_gym": ("reasoning_gym",),
    }
)
"""Built-in scorers, each ``libs.rewards.scorers.<name>:score``, and the heavy modules that they import lazily."""


def resolve(section: RewardSection, *, allow: Sequence[str] = (), folders: Sequence[str] = (), file: str = "job") -> Scorer:
    """The scorer that the section names.

    Args:
        section: what the job asks for.
        allow: user functions that the node allows: ``package.module:function``, or ``package.*`` for everything in a
            package and below.
        folders: plug-in folders that user modules may come from.
        file: the job file, for errors.

    Raises:
        JobFileError: at ``reward.function``: unknown, not allowed, or its library isn't installed; at ``reward.args…``: not
            what a built-in scorer takes. A user function's arguments are checked when a worker loads it.
    """
    name = section.function
    if name in _NEEDS:
        return _built_in(section, file)
    if ":" not in name:
        raise JobFileError(file=file, key="reward.function", expected=f"unknown scorer {name!r}{_hint(name)}")
    require_allowed(name, allow, file=file, key="reward.function")
    return Scorer(name=name, target=name, args=section.args, folders=tuple(folders))


def _hint(name: str) -> str:
    close = difflib.get_close_matches(name, _NEEDS, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else "."
    return f"{meant} Built in: {', '.join(_NEEDS)}; or package.module:function from the node's allow-list"


def _built_in(section: RewardSection, file: str) -> Scorer:
    name = section.function
    for module in _NEEDS[name]:
        if importlib.util.find_spec(module) is None:
            raise JobFileError(
                file=file,
                key="reward.function",
                expected=f"{name!r} needs the package {module.replace('_', '-')}: install it",
            )
    module_name = f"libs.rewards.scorers.{name}"
    function: Callable[..., object] = importlib.import_module(module_name).score
    args = _checked_args(function, section=section, file=file)
    return Scorer(name=name, target=f"{module_name}:score", args=args, needs=_NEEDS[name])


def _checked_args(function: Callable[..., object], *, section: RewardSection, file: str) -> dict[str, Any]:
    """The section's arguments, converted to what the function's keyword-only parameters are annotated with."""
    hints = get_type_hints(function, include_extras=True)
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    args: dict[str, Any] = {}
    for key, value in section.args.items():
        if key not in known:
            takes = ", ".join(known) or "no arguments"
            raise JobFileError(
                file=file, key=f"reward.args.{key}", expected=f"unknown argument; {section.function} takes {takes}"
            )
        try:
            args[key] = msgspec.convert(value, hints[key])
        except msgspec.ValidationError as error:
            raise JobFileError(file=file, key=f"reward.args.{key}", expected=str(error)) from None
    return args
