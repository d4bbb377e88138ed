"""A job on this trainer: its step loop, over as many training processes as it takes, and how it ended."""

import anyio

from libs.common import messages as m
from libs.common.errors import JigsawError, Unreachable
from libs.common.policy_store import PolicyStore
from libs.common.service import Context
from services.trainer import wire
from services.trainer.compute_link import ComputeLink, ComputeLost
from services.trainer.hold import Hold, Superseded
from services.trainer.job_trainer import JobTrainer
from services.trainer.progress import Progress
from services.trainer.publication import Publication

LIVES = 5
"""Training processes that may die in a row, none getting further than those before it, before the job fails."""


class HeldJob:
    """Runs a job until it has ended, which it reports, or until it is stopped, which leaves the job to others."""

    broken = ""

    def __init__(self, context: Context, record: m.JobRecord, policies: PolicyStore) -> None:
        self._context, self._record, self._policies = context, record, policies
        self._log = context.log.bind(job=record.job_uid)
        self._scope = anyio.CancelScope()
        self._compute: ComputeLink | None = None
        self._allocation: m.Allocation | None = None
        self._step = 0

    @property
    def revision(self) -> int:
        """Revision of the allocation in force."""
        return self._compute.revision if self._compute else 0

    async def allocate(self, allocation: m.Allocation) -> None:
        """Apply a newer allocation at the next micro-batch boundary."""
        if self._allocation is None or allocation.revision > self._allocation.revision:
            self._allocation = allocation
            await self._apply()

    async def stop(self) -> None:
        """Cut the step loop short."""
        self._scope.cancel()

    async def run(self) -> bool:
        """Until the job has ended, or :meth:`stop`; whether it may have to be begun anew.

        Raises:
            Unreachable: bus or store are away for too long.
        """
        superseded = False
        with self._scope:
            try:
                await self._context.bus.publish(await self._ended())
            except Superseded as reason:
                superseded = True
                self._log.warning("superseded", reason=str(reason))
                # If it is still allocated here after this, the store had lost its holder: it is begun anew.
                await anyio.sleep(self._record.job.rollout.lease_s)
        if self._scope.cancelled_caught:
            self._log.info("job_given_up")
        return superseded

    async def _apply(self) -> None:
        if self._compute is not None and self._allocation is not None:
            await self._compute.set_units(self._allocation.units, revision=self._allocation.revision)

    def _cores(self) -> list[int]:
        """Where a new process loads: on what is allocated, so that it disturbs nobody; on one core while that is nothing."""
        cores = self._context.settings.device.cores
        units = self._allocation.units if self._allocation else ()
        return [cores[unit] for unit in units] or cores[:1]

    async def _ended(self) -> m.TrainingEnded:
        """How the job ended, after as many lives as that took.

        Raises:
            Superseded: another trainer holds the job.
        """
        outcome, reason = m.Outcome.FAILED, ""
        deaths, furthest = 0, -1
        hold = await Hold.take(self._context, self._record.job_uid, before=None)
        while True:
            try:
                await self._live(hold)
                outcome, reason = m.Outcome.SUCCEEDED, ""
                break
            except ComputeLost as lost:
                deaths = 1 if self._step > furthest else deaths + 1
                furthest, reason = max(furthest, self._step), str(lost)
                self._log.warning("training_process_lost", reason=reason, deaths=deaths)
                if deaths == LIVES:
                    break
            except (Superseded, Unreachable):  # no fault of the job's: it goes on elsewhere, or after a restart
                raise
            except JigsawError as failed:
                reason = str(failed)
                break
            hold = await Hold.take(self._context, self._record.job_uid, before=hold)  # before there is a process to end
        await hold.require()
        return m.TrainingEnded(
            sender=self._context.instance,
            job_uid=self._record.job_uid,
            incarnation=hold.incarnation,
            outcome=outcome,
            reason=reason,
        )

    async def _live(self, hold: Hold) -> None:
        """One training process, from start to end."""

        def report(done: wire.MicroBatchDone) -> None:
            tasks.start_soon(self._report, trainer.step, done)

        async def end_with_the_process() -> None:
            await compute.until_lost()
            scope.cancel()

        failure: JigsawError | None = None
        async with anyio.create_task_group() as tasks:
            compute = await ComputeLink.start(
                engine=self._record.job.train.engine, cores=self._cores(), on_micro_batch=report, log=self._context.log
            )
            tasks.start_soon(compute.run)
            self._compute = compute
            publication = Publication(self._context, hold, compute=compute, policies=self._policies)
            progress = Progress(self._context, hold)
            trainer = JobTrainer(self._context, self._record, compute=compute, publication=publication, progress=progress)
            try:
                with anyio.CancelScope() as scope:  # whatever the step loop waits for: a new process can load meanwhile
                    tasks.start_soon(end_with_the_process)
                    await self._apply()
                    tasks.start_soon(trainer.keep_telling)
                    await trainer.run()
                if scope.cancelled_caught:
                    raise ComputeLost(compute.gone)
            except JigsawError as error:
                failure = error  # raised outside the group, which would wrap it
            finally:
                self._compute, self._step = None, trainer.step
                with anyio.CancelScope(shield=True):
                    await compute.stop()
                    await publication.tidy(own=True)
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _report(self, step: int, done: wire.MicroBatchDone) -> None:
        await self._context.bus.publish(
            m.TrainerWindow(
                sender=self._context.instance,
                job_uid=self._record.job_uid,
                step=step,
                done=done.done,
                total=done.total,
                tokens=done.tokens,
                seconds=done.seconds,
                units=len(self._allocation.units) if self._allocation else 0,
                revision=self.revision,
            )
        )
