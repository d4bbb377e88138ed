"""A job: what a user writes in TOML, read strictly, with errors that name file, key and what was expected.

Its settings are in :mod:`libs.common.sections`; what they must be to each other is decided here.
"""

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from libs.common.errors import JobFileError
from libs.common.replay import ReplayedRollout, ReplayedTraining
from libs.common.sections import (
    AlgorithmSection,
    DataSection,
    EnvironmentSection,
    EvalSection,
    JobName,
    ModelSection,
    RewardSection,
    RolloutSection,
    ScheduleSection,
    Section,
    TrainSection,
)
from libs.common.strictness import first_unknown_key


class Job(Section, frozen=True, kw_only=True):
    """A whole job, as accepted."""

    name: JobName
    model: ModelSection
    data: DataSection
    rollout: RolloutSection = RolloutSection()
    environment: EnvironmentSection = EnvironmentSection()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    train: TrainSection = TrainSection()
    eval: EvalSection | None = None
    schedule: ScheduleSection = ScheduleSection()


_AT = re.compile(r" - at `\$\.?(?P<key>[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]+)`")


def load_job(path: Path) -> Job:
    """Read and check a job file (TOML, or JSON by its ending).

    Relative ``model.path`` (of files that exist) and ``data.path`` are resolved against the job file's folder.

    Raises:
        JobFileError: with file, key and what was expected.
    """
    file = str(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except FileNotFoundError:
        raise JobFileError(file=file, key="", expected="no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise JobFileError(file=file, key="", expected=f"can't be read: {error}") from None
    try:
        raw = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise JobFileError(file=file, key="", expected=f"not valid {path.suffix.lstrip('.') or 'toml'}: {error}") from None
    return _anchored(job_from(raw, file=file), path.parent)


def job_from(raw: Any, *, file: str) -> Job:
    """Decode and check a job given as plain data; ``file`` names it in errors.

    Raises:
        JobFileError: with file, key and what was expected.
    """
    if (unknown := first_unknown_key(raw, Job)) is not None:
        raise JobFileError(file=file, key=unknown, expected="unknown key")
    try:
        job = msgspec.convert(raw, Job)
    except msgspec.ValidationError as error:
        key, expected = _explain(str(error))
        raise JobFileError(file=file, key=key, expected=expected) from None
    except OverflowError:
        raise JobFileError(file=file, key="", expected="has an integer that is too large for anything here") from None
    _check(job, file)
    return job


def _explain(message: str) -> tuple[str, str]:
    """Split msgspec's message into the dotted key and what was expected there."""
    at = _AT.search(message)
    key, text = (at["key"], message[: at.start()]) if at else ("", message)
    if missing := _MISSING.search(text):
        return ".".join(filter(None, [key, missing["field"]])), "required, but missing"
    return key, text[0].lower() + text[1:]


def _check(job: Job, file: str) -> None:
    """What types can't say: rules between keys."""

    def refuse(key: str, expected: str) -> None:
        raise JobFileError(file=file, key=key, expected=expected)

    for name, section in (("algorithm", job.algorithm), ("train", job.train), ("rollout", job.rollout)):
        for key in section.__struct_fields__:
            if isinstance(value := getattr(section, key), float) and not math.isfinite(value):
                refuse(f"{name}.{key}", f"a finite number is expected, not {value}")
    sections = {"data": job.data} | ({"eval.data": job.eval.data} if job.eval else {})
    for key, data in sections.items():
        if sum(source is not None for source in (data.path, data.dataset, data.task)) != 1:
            refuse(key, "exactly one of `path`, `dataset` and `task` is expected")
        if data.path is not None and Path(data.path).suffix not in (".jsonl", ".json", ".parquet"):
            refuse(f"{key}.path", f"a .jsonl or .parquet file is expected, not {data.path!r}")
        if "{prompt}" not in data.template:
            refuse(f"{key}.template", "must contain {prompt}")
    if job.model.max_context is not None and job.rollout.max_new_tokens >= job.model.max_context:
        refuse("rollout.max_new_tokens", "must leave room for the prompt in model.max_context")
    if job.rollout.temperature == 0:
        refuse("rollout.temperature", "must be above 0: greedy samples of a group are all alike, and nothing can be learned")
    if job.environment.name == "single_turn" and job.rollout.max_turns != 1:
        refuse("rollout.max_turns", "the single_turn environment has exactly 1 turn")
    if job.rollout.forced_lengths is not None and (job.rollout.stop or job.rollout.engine == "replay"):
        refuse("rollout.forced_lengths", 'goes neither with rollout.stop nor with engine = "replay", which draws its own')
    if job.rollout.engine != "replay" and job.rollout.engine_args != ReplayedRollout():
        refuse("rollout.engine_args", 'only engine = "replay" has settings')
    if job.train.engine != "replay" and job.train.engine_args != ReplayedTraining():
        refuse("train.engine_args", 'only engine = "replay" has settings')


def _anchored(job: Job, folder: Path) -> Job:
    """The job with its relative paths made absolute, as seen from the job file's folder."""

    def anchor(section: DataSection) -> DataSection:
        if section.path is None:
            return section
        return msgspec.structs.replace(section, path=str((folder / section.path).resolve()))

    model = folder / job.model.path
    if model.exists():
        job = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, path=str(model.resolve())))
    evaluation = job.eval and msgspec.structs.replace(job.eval, data=anchor(job.eval.data))
    return msgspec.structs.replace(job, data=anchor(job.data), eval=evaluation)
