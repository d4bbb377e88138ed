"""Where a job's trainer gets what it starts from: datasets that were uploaded, and the prompts in them."""

from pathlib import Path

import anyio
import msgspec

from libs.common import messages as m
from libs.common.blobs import download
from libs.common.job import Job
from libs.common.models import context_length
from libs.common.sections import DataSection
from libs.common.service import Context
from libs.environments.registry import make_environment
from services.trainer.job_data import JobData


async def local_job(context: Context, record: m.JobRecord) -> Job:
    """The job with its uploaded datasets fetched onto this machine."""

    async def local(section: DataSection) -> DataSection:
        digest = record.blobs.get(section.path or "")
        if digest is None:
            return section
        path = await download(context.bus, digest, Path(context.settings.home) / "blobs")
        return msgspec.structs.replace(section, path=str(path))

    job = record.job
    data = await local(job.data)
    evaluation = job.eval and msgspec.structs.replace(job.eval, data=await local(job.eval.data))
    return msgspec.structs.replace(job, data=data, eval=evaluation)


async def load_data(context: Context, job: Job, *, job_uid: str, model: Path) -> JobData:
    """The prompts of a job whose datasets are here, rendered.

    Raises:
        DataError: a dataset can't be used, or a prompt doesn't fit.
    """
    environment = make_environment(job.environment, allow=context.settings.plugins.allow)
    max_context = job.model.max_context or context_length(model)

    def load() -> JobData:
        return JobData(job, job_uid=job_uid, model=model, environment=environment, max_context=max_context)

    return await anyio.to_thread.run_sync(load)
