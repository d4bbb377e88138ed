"""The step loop of one job: prompts out, scored groups in, policy updated, published, checkpointed.

The loop keeps nothing that a checkpoint and the store don't have: started over after any death, it goes on from the newest
checkpoint and finds in the store the records that it had retained, so nothing is generated twice and nothing trained twice
in the surviving lineage. What it publishes carries its incarnation and moves by compare-and-set, so one that was replaced
can't do harm.
"""

import contextlib
import time
from typing import Any

import anyio
import msgspec

from libs.common import messages as m
from libs.common import subjects
from libs.common.errors import QueueGone
from libs.common.history import History
from libs.common.job import Job
from libs.common.messages import Phase
from libs.common.models import resolve_model
from libs.common.pulling import Puller
from libs.common.service import Context
from libs.common.tokens import PolicyVersion
from services.trainer import wire
from services.trainer.compute_link import ComputeLink
from services.trainer.gather import Gatherer, Waits
from services.trainer.hold import Superseded
from services.trainer.job_data import JobData
from services.trainer.job_source import load_data, local_job
from services.trainer.progress import Progress
from services.trainer.publication import Publication
from services.trainer.run_log import RunLog
from services.trainer.step_rollout import StepRollout
from services.trainer.step_training import StepTraining
from services.trainer.steps import is_evaluation_step
from services.trainer.summary import token_count

TELL_S = 0.5


class JobTrainer:
    """One life of a job's step loop: from a checkpoint (or the start) to the job's end, or to a death that starts it over.

    Args:
        compute: a running training process that hasn't loaded anything yet.
        publication, progress: of this life, with its incarnation.
    """

    def __init__(
        self,
        context: Context,
        record: m.JobRecord,
        *,
        compute: ComputeLink,
        publication: Publication,
        progress: Progress,
    ) -> None:
        self._context, self._record, self._compute, self._publication = context, record, compute, publication
        self._progress = progress
        self._uid, self._log = record.job_uid, context.log.bind(job=record.job_uid)
        self._folder = context.settings.job_folder(self._uid)
        self._history = History()
        self._rollout: StepRollout | None = None
        self._phase, self._step = Phase.STARTING, 0
        self._job: Job = record.job
        self._told_at, self._tell_wanted = 0.0, anyio.Event()
        self._checkpoint_s = 0.0

    @property
    def step(self) -> int:
        """The current step, 0-based."""
        return self._step

    async def run(self) -> None:
        """Until the job has succeeded.

        Raises:
            Superseded: another trainer took the job.
            JigsawError: the job can't go on, for the reason given.
        """
        self._history = await self._progress.history()  # to be told until it is known where this life begins
        await self._tell()
        await self._publication.tidy()
        self._job = await local_job(self._context, self._record)
        model = await anyio.to_thread.run_sync(resolve_model, self._job.model.path)
        data = await load_data(self._context, self._job, job_uid=self._uid, model=model)
        ready = await self._load(str(model), data)
        rollout = self._rollout = await self._new_rollout(data)
        run_log = await anyio.to_thread.run_sync(RunLog, self._folder, ready.step)
        try:
            training = StepTraining(self._job, compute=self._compute, history=self._history, run_log=run_log, log=self._log)
            policy = await self._publication.policy(ready.step)
            for step in range(ready.step, self._job.train.steps):
                policy = await self._do_step(step, policy, rollout=rollout, training=training)
            await self._final_evaluation(policy, rollout=rollout, training=training)
            await self._publication.model()
            await self._enter(Phase.DONE, self._step)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(run_log.close)

    # --- start -------------------------------------------------------------------------------------------------------

    async def _load(self, model: str, data: JobData) -> wire.Ready:
        """Load the compute side, from the newest checkpoint that is whole if there is one."""
        checkpoints = await anyio.to_thread.run_sync(self._publication.checkpoints.newest_first)
        ready = await self._compute.load(
            self._job,
            model=model,
            resume=[str(path) for path in checkpoints],
            cores=self._context.settings.device.cores,
        )
        for reason in ready.passed_over:
            self._log.warning("checkpoint_passed_over", reason=reason)
        self._history = History()
        if ready.resumed:
            data.resume(ready.extra["position"])
            self._history = msgspec.convert(ready.extra["history"], History)
            self._log.info("resumed", step=ready.step, checkpoint=ready.resumed)
        self._step = ready.step
        self._log.info("trainer_ready", seconds=round(ready.seconds, 1), step=ready.step)
        return ready

    async def _new_rollout(self, data: JobData) -> StepRollout:
        gatherer = Gatherer(
            bus=self._context.bus,
            store=self._context.store,
            job_uid=self._uid,
            instance=self._context.instance,
            waits=Waits.of(self._job.rollout.lease_s),
            log=self._log,
        )
        settled = await self._settled()
        return StepRollout(self._job, data=data, gatherer=gatherer, settled=settled, on_progress=self._tell_soon)

    async def _settled(self) -> Puller:
        while True:
            try:
                return await self._context.bus.pull(m.TrajectorySettled, subjects.settled_consumer(self._uid))
            except QueueGone:
                await anyio.sleep(0.1)  # the scheduler makes it before it allocates; gone again if the job has ended

    # --- a step ------------------------------------------------------------------------------------------------------

    async def _do_step(
        self, step: int, policy: PolicyVersion, *, rollout: StepRollout, training: StepTraining
    ) -> PolicyVersion:
        """Roll out, train, publish; returns the new policy version."""
        started = time.monotonic()
        await self._enter(Phase.ROLLOUT, step)
        gathered = await rollout.gather(step, policy, train=True, evaluate=self._is_evaluated(step))
        rolled_out = time.monotonic()
        await self._enter(Phase.TRAIN, step)
        metrics = await training.train(step, gathered)
        trained = time.monotonic()
        policy = await self._publication.policy(step + 1)
        published = time.monotonic()
        seconds, tokens = published - started + self._checkpoint_s, token_count(gathered.trained)
        metrics |= {
            "time/rollout": rolled_out - started,
            "time/train": trained - rolled_out,
            "time/publish": published - trained,
            "time/checkpoint": self._checkpoint_s,
            "time/step": seconds,
            "progress/epoch": float(rollout.data.epoch),
            "throughput/tokens": float(tokens),
            "throughput/tokens_per_s": tokens / seconds,
        }
        self._log.info("step", step=step, reward=self._history.rewards[-1], seconds=round(seconds, 2))
        # Before the checkpoint: once that is there, the step isn't done again, and what wasn't written would be missing.
        await training.write(step, gathered, metrics)
        self._publication.retain(gathered.ids)
        self._history.rollout_s += rolled_out - started
        self._history.train_s += trained - rolled_out
        self._history.other_s += time.monotonic() - trained
        await self._checkpoint_if_due(step + 1, rollout.data)
        return policy

    async def _final_evaluation(self, policy: PolicyVersion, *, rollout: StepRollout, training: StepTraining) -> None:
        """Evaluate the last policy."""
        steps = self._job.train.steps
        if not self._is_evaluated(steps) or any(step == steps for step, _ in self._history.evaluations):
            return
        await self._enter(Phase.ROLLOUT, steps)
        gathered = await rollout.gather(steps, policy, train=False, evaluate=True)
        await training.write(steps, gathered, training.evaluated(steps, gathered))

    def _is_evaluated(self, step: int) -> bool:
        section = self._job.eval
        return section is not None and is_evaluation_step(step, every=section.every, steps=self._job.train.steps)

    async def _checkpoint_if_due(self, step: int, data: JobData) -> None:
        """Checkpoint after the steps that ask for one; its time counts with the step that follows."""
        started = time.monotonic()
        train = self._job.train
        if step % train.checkpoint_every == 0 or step == train.steps:
            extra: dict[str, Any] = {"position": data.position, "history": msgspec.to_builtins(self._history)}
            # Without evaluation, the policy after n updates is judged by the step that it sampled: the n-th, from 0.
            rewards = dict(self._history.evaluations) or dict(enumerate(self._history.rewards))
            await self._publication.checkpoint(step, extra=extra, rewards=rewards, train=train)
            self._log.info("checkpoint", step=step, seconds=round(time.monotonic() - started, 1))
        self._checkpoint_s = time.monotonic() - started
        self._history.other_s += self._checkpoint_s

    # --- telling -----------------------------------------------------------------------------------------------------

    async def _enter(self, phase: Phase, step: int) -> None:
        self._phase, self._step = phase, step
        await self._tell()

    def _tell_soon(self) -> None:
        """Progress within a step, at most twice a second; told by the next task switch, nothing waits for it."""
        if time.monotonic() - self._told_at >= TELL_S:
            self._tell_wanted.set()

    async def keep_telling(self) -> None:
        """Publish progress whenever something asked for it, until cancelled."""
        with contextlib.suppress(Superseded):  # the step loop finds out when it has to say something itself
            while True:
                await self._tell_wanted.wait()
                self._tell_wanted = anyio.Event()
                await self._tell()

    async def _tell(self) -> None:
        self._told_at = time.monotonic()
        await self._progress.tell(self._current_progress)

    def _current_progress(self) -> m.JobProgress:
        settled, expected = self._rollout.counts(self._step) if self._rollout else (0, 0)
        return m.JobProgress(
            sender=self._context.instance,
            job_uid=self._uid,
            phase=self._phase,
            step=self._step,
            steps=self._job.train.steps,
            settled=settled,
            expected=expected,
            history=self._history.abridged(),
            artifacts={
                "model": str(self._folder / "model"),
                "tensorboard": str(self._folder / "tensorboard"),
                "samples": str(self._folder / "samples"),
                "checkpoints": str(self._folder / "checkpoints"),
            },
        )
