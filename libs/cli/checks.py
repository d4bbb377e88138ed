"""What can be found wrong with a job before anything is queued: rows, scorer, environment, model, prompt lengths."""

import sys
from pathlib import Path

from libs.common.chat import ChatTokenizer
from libs.common.errors import JigsawError, JobFileError, ModelError
from libs.common.job import Job
from libs.common.models import check_model, context_length, find_model, kv_bytes_per_token, parameter_count
from libs.common.sections import DataSection
from libs.common.settings import NodeSettings, PluginSettings
from libs.datasets.load import check, load
from libs.datasets.prompts import render_all
from libs.environments.protocol import Environment
from libs.environments.registry import make_environment
from libs.node.space import require_space
from libs.rewards.loading import problem_of
from libs.rewards.resolve import resolve

CHECKPOINT_BYTES = 12
"""A parameter in a checkpoint: fp32 master and two moments."""
POLICY_VERSIONS = 4
"""Versions on disk at a time: the current one, the one before, the one being written, and a mirrored copy."""


def check_job(job: Job, *, file: str, settings: NodeSettings | None) -> None:
    """Check everything that can be checked here.

    Args:
        job: with its paths resolved. file: the job file, for errors.
        settings: of the node it is for; None if that isn't known here, which allows no user functions to be checked, so
            that only their form is.

    Raises:
        JigsawError: what is wrong first: job file, dataset, or model.
    """
    _check_model(job, file)
    for section in data_sections(job):
        _check_rows(section)
    environment = _check_functions(job, file, settings)
    directory = find_model(job.model.path)
    if directory is not None and environment is not None:
        _check_prompts(job, file, directory, environment)
    if directory is not None:
        _check_kv_cache(job, file, directory)
    if directory is not None and settings is not None:
        home, needed_mb = Path(settings.home), disk_needed(job, parameter_count(directory)) >> 20
        require_space(home, needed_mb, purpose=f"{job.name} (checkpoints, policy versions, model)")


def disk_needed(job: Job, parameters: int) -> int:
    """Bytes that a job's files take at most: checkpoints (kept, and one in the making), policy versions, trained model."""
    checkpoints = (job.train.keep_last + job.train.keep_best + 1) * CHECKPOINT_BYTES
    versions = (POLICY_VERSIONS + 1) * (2 if job.model.dtype == "bfloat16" else 4)
    return parameters * (checkpoints + versions)


def data_sections(job: Job) -> list[DataSection]:
    """The job's datasets: for training, and for evaluation if it has one."""
    return [job.data, *([job.eval.data] if job.eval else [])]


def _check_model(job: Job, file: str) -> None:
    try:
        check_model(job.model.path)
    except ModelError as error:
        raise JobFileError(file=file, key="model.path", expected=str(error)) from None


def _check_rows(section: DataSection) -> None:
    checked = check(section)
    if checked.problems:
        more = len(checked.problems) + checked.unlisted - 1
        raise JigsawError(f"{checked.problems[0]}" + (f" (and {more} more bad rows)" if more else ""))


def _check_functions(job: Job, file: str, settings: NodeSettings | None) -> Environment | None:
    """Scorer and environment against the node's allow-list; without one, user functions pass."""
    node = settings.plugins if settings else PluginSettings(allow=[job.reward.function])
    scorer = resolve(job.reward, allow=node.allow, folders=node.folders, file=file)
    if settings is not None and scorer.target == job.reward.function and (problem := problem_of(scorer)):
        raise JobFileError(file=file, key="reward.function", expected=f"{scorer.name!r} can't be loaded: {problem}")
    if settings is None and ":" in job.environment.name:
        return None
    for folder in node.folders:
        if folder not in sys.path:
            sys.path.append(folder)
    return make_environment(job.environment, allow=node.allow, file=file)


def _check_kv_cache(job: Job, file: str, directory: Path) -> None:
    """An engine must be able to hold one sequence of the longest kind, or it doesn't even load."""
    per_token = kv_bytes_per_token(directory, job.model.dtype)
    if job.rollout.engine == "replay" or per_token is None:
        return
    needed_mb = -(-_context_limit(job, file, directory) * per_token // (1 << 20)) + 1
    if job.rollout.kv_memory_mb < needed_mb:
        expected = f"one sequence of the longest kind takes {needed_mb} MB; model.max_context makes it shorter"
        raise JobFileError(file=file, key="rollout.kv_memory_mb", expected=expected)


def _context_limit(job: Job, file: str, directory: Path) -> int:
    """Tokens of prompt and response together: what the job says, which a model that says it too must be able to do."""
    asked = job.model.max_context
    try:
        able = context_length(directory)
    except ModelError:
        if asked is None:
            raise
        return asked
    if asked is not None and asked > able:
        raise JobFileError(file=file, key="model.max_context", expected=f"the model attends to {able} tokens at most")
    return asked or able


def _check_prompts(job: Job, file: str, directory: Path, environment: Environment) -> None:
    chat = ChatTokenizer(directory)
    limit = _context_limit(job, file, directory)
    for section in data_sections(job):
        render_all(load(section), section, chat=chat, environment=environment, max_context=limit)
