"""The servers that the store's tests run on: the bundled one, and those that ``JIGSAW_TEST_STORES`` names.

That variable is a list of ``redis-server`` or ``valkey-server`` binaries, separated like ``PATH``.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from libs.node import binaries

VARIABLE = "JIGSAW_TEST_STORES"


def store_binaries() -> list[Any]:
    """One parameter for each server, named after its version."""
    more = [Path(name) for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    return [pytest.param(binaries.valkey_server(), id="bundled"), *(pytest.param(path, id=_version(path)) for path in more)]


def _version(binary: Path) -> str:
    """As it names itself: ``Valkey server v=8.1.8 …`` is ``valkey-8.1.8``."""
    words = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout.split()
    return f"{words[0].lower()}-{words[2].removeprefix('v=')}"
