"""The trainer service: follows its allocations, and runs the step loop of each job that it holds one for."""

from functools import partial
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from libs.common import messages as m
from libs.common import subjects
from libs.common.errors import JigsawError
from libs.common.policy_store import PolicyStore
from libs.common.service import Context, heartbeat, now
from services.trainer import wire
from services.trainer.compute_link import ComputeFailed, ComputeLink, ComputeLost
from services.trainer.job_trainer import JobTrainer
from services.trainer.publication import Publication, Superseded

LIVES = 3
"""Training processes that may die in a row without a step between them before the job fails."""


async def serve(context: Context) -> None:
    """Run until told to stop; a job that is cut short goes on elsewhere, or here after a restart."""
    service = TrainerService(context)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(heartbeat, context, service.presence)
        tasks.start_soon(service.follow_allocations, tasks)
        tasks.start_soon(service.tidy)
        await context.stopping.wait()
        tasks.cancel_scope.cancel()


class HeldJob:
    """A job on this trainer: its newest allocation, its running life, the way to end it."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.compute: ComputeLink | None = None
        self.step = 0
        self._allocation: m.Allocation | None = None

    @property
    def revision(self) -> int:
        """Revision of the allocation in force."""
        return self.compute.revision if self.compute else 0

    async def allocate(self, allocation: m.Allocation) -> None:
        """Apply a newer allocation at the next micro-batch boundary."""
        if self._allocation is None or allocation.revision > self._allocation.revision:
            self._allocation = allocation
            await self.apply()

    async def apply(self) -> None:
        """Tell the training process the newest allocation."""
        if self.compute is not None and self._allocation is not None:
            await self.compute.set_units(self._allocation.units, revision=self._allocation.revision)

    @property
    def units(self) -> int:
        """Units of the newest allocation."""
        return len(self._allocation.units) if self._allocation else 0


class TrainerService:
    """The jobs of one trainer instance."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._policies = PolicyStore(context.settings.policies, mirror=Path(context.settings.home) / "mirror")
        self._jobs: dict[str, HeldJob] = {}
        self._started_at = now()

    def presence(self) -> m.Worker:
        """What this instance is and what it holds."""
        device = self._context.settings.device
        return m.Worker(
            sender=self._context.instance,
            role=m.Role.TRAINER,
            device=device.id,
            units=len(device.cores),
            max_units=len(device.cores),
            memory_mb=device.memory_mb,
            started_at=self._started_at,
            draining=self._context.stopping.is_set(),
            revisions={job_uid: job.revision for job_uid, job in self._jobs.items()},
        )

    async def follow_allocations(self, tasks: TaskGroup) -> None:
        """Start, adjust and end jobs as allocations come, change and go."""
        table = await self._context.bus.table(m.Allocation)
        async for change in table.watch(subjects.allocation_key(self._context.instance, "*")):
            await self._follow(change.key.removeprefix(f"{self._context.instance}."), change.value, tasks)

    async def _follow(self, job_uid: str, allocation: m.Allocation | None, tasks: TaskGroup) -> None:
        job = self._jobs.get(job_uid)
        if allocation is None:
            if job is not None:
                job.scope.cancel()
            return
        if job is None:
            record = await (await self._context.bus.table(m.JobRecord)).get(job_uid)
            if record is None or record.state is m.JobState.ENDED:
                return
            job = self._jobs[job_uid] = HeldJob()
            tasks.start_soon(self._hold, record, job, tasks)
        await job.allocate(allocation)

    async def _hold(self, record: m.JobRecord, job: HeldJob, tasks: TaskGroup) -> None:
        """Run a job to its end, over as many training processes as it takes, and report how it ended."""
        log = self._context.log.bind(job=record.job_uid)
        given_up = False
        try:
            with job.scope:
                await self._context.bus.publish(await self._outcome(record, job))
            given_up = job.scope.cancelled_caught
        except Superseded as reason:
            log.warning("superseded", reason=str(reason))
        finally:
            del self._jobs[record.job_uid]
        if given_up:
            log.info("job_given_up")
            # An allocation that came back while this life was ending went to a life that no longer listened.
            table = await self._context.bus.table(m.Allocation)
            again = await table.get(subjects.allocation_key(self._context.instance, record.job_uid))
            await self._follow(record.job_uid, again, tasks)

    async def tidy(self) -> None:
        """Delete the policy versions of jobs that have ended; their checkpoints and models stay."""
        table = await self._context.bus.table(m.JobRecord)
        async for change in table.watch():
            if change.value is None or change.value.state is m.JobState.ENDED:
                await anyio.to_thread.run_sync(partial(self._policies.prune, change.key, keep=()))

    async def _outcome(self, record: m.JobRecord, job: HeldJob) -> m.TrainingEnded:
        deaths, reached = 0, 0
        outcome, reason = m.Outcome.FAILED, ""
        while deaths < LIVES:
            try:
                await self._live(record, job)
                outcome, reason = m.Outcome.SUCCEEDED, ""
                break
            except ComputeLost as lost:
                deaths = deaths + 1 if job.step == reached else 1
                reached, reason = job.step, str(lost)
                self._context.log.warning("training_process_lost", job=record.job_uid, reason=reason, deaths=deaths)
            except Superseded:
                raise
            except (ComputeFailed, JigsawError) as failed:
                reason = str(failed)
                break
        return m.TrainingEnded(sender=self._context.instance, job_uid=record.job_uid, outcome=outcome, reason=reason)

    async def _live(self, record: m.JobRecord, job: HeldJob) -> None:
        """One training process, from start to end."""

        def report(done: wire.MicroBatchDone) -> None:
            tasks.start_soon(self._report, record.job_uid, trainer, done, job)

        cores = self._context.settings.device.cores
        failure: JigsawError | None = None
        async with anyio.create_task_group() as tasks:
            compute = await ComputeLink.start(cores=cores, on_micro_batch=report, log=self._context.log)
            job.compute = compute
            publication = Publication(
                self._context,
                record.job_uid,
                incarnation=await self._context.store.hold_job(record.job_uid, owner=self._context.instance),
                compute=compute,
                policies=self._policies,
            )
            trainer = JobTrainer(self._context, record, compute=compute, publication=publication)
            try:
                await job.apply()
                tasks.start_soon(trainer.keep_telling)
                await trainer.run()
            except JigsawError as error:
                failure = error  # raised outside the group, which would wrap it
            finally:
                job.compute, job.step = None, trainer.step
                with anyio.CancelScope(shield=True):
                    await compute.stop()
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _report(self, job_uid: str, trainer: JobTrainer, done: wire.MicroBatchDone, job: HeldJob) -> None:
        await self._context.bus.publish(
            m.TrainerWindow(
                sender=self._context.instance,
                job_uid=job_uid,
                step=trainer.step,
                done=done.done,
                total=done.total,
                tokens=done.tokens,
                seconds=done.seconds,
                units=job.units,
                revision=job.revision,
            )
        )
