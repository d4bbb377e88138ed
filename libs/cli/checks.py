"""What can be found wrong with a job before anything is queued: rows, scorer, environment, model, prompt lengths."""

import sys
from pathlib import Path

from libs.common.chat import ChatTokenizer
from libs.common.errors import JigsawError, JobFileError, ModelError
from libs.common.job import DataSection, Job
from libs.common.models import check_model, context_length, find_model
from libs.common.settings import NodeSettings, RewardSettings
from libs.datasets.load import check, load
from libs.datasets.prompts import render_all
from libs.environments.protocol import Environment
from libs.environments.registry import make_environment
from libs.rewards.resolve import resolve


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
        _check_prompts(job, directory, environment)


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
    node = settings.reward if settings else RewardSettings(allow=[job.reward.function])
    resolve(job.reward, allow=node.allow, folders=node.plugins, file=file)
    if settings is None and ":" in job.environment.name:
        return None
    for folder in node.plugins:
        if folder not in sys.path:
            sys.path.append(folder)
    return make_environment(job.environment, allow=node.allow, file=file)


def _check_prompts(job: Job, directory: Path, environment: Environment) -> None:
    chat = ChatTokenizer(directory)
    limit = job.model.max_context or context_length(directory)
    for section in data_sections(job):
        render_all(load(section), section, chat=chat, environment=environment, max_context=limit)
