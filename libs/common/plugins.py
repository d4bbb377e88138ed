"""Which code of a user a node runs: only what its allow-list names."""

from collections.abc import Sequence

from libs.common.errors import JobFileError


def require_allowed(name: str, allow: Sequence[str], *, file: str, key: str) -> None:
    """Check a user's ``package.module:attribute`` against the node's allow-list.

    Args:
        allow: exact names, or ``package.*`` for everything in a package and below.

    Raises:
        JobFileError: at ``key``, saying what the list has.
    """
    if not any(_allows(entry, name) for entry in allow):
        expected = f"{name!r} isn't on this node's allow-list, which has {', '.join(allow) or 'nothing'}"
        raise JobFileError(file=file, key=key, expected=expected)


def _allows(entry: str, name: str) -> bool:
    if not entry.endswith(".*"):
        return entry == name
    package, module = entry.removesuffix(".*"), name.partition(":")[0]
    return module == package or module.startswith(f"{package}.")
