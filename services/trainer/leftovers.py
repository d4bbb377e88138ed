"""What dead writers left half-written in a job's folder: models, checkpoints and logs that never became visible."""

import shutil
from pathlib import Path

from libs.common import manifest


def delete_leftovers(folder: Path, *, up_to: int | None = None) -> None:
    """Delete them; blocks.

    Args:
        up_to: the newest incarnation whose leftovers go; None for all, where nobody writes any more.
    """
    for partial in [*manifest.partials(folder), *manifest.partials(folder / "checkpoints")]:
        *_, writer, _ = partial.name.split(".")  # an incarnation, for the model as for checkpoints
        if up_to is not None and not (writer.isdigit() and int(writer) <= up_to):
            continue
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)
