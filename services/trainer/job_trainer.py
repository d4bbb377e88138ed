"""The step loop of one job: prompts out, scored groups in, policy updated, published, checkpointed.

The loop keeps nothing that a checkpoint and the store don't have: started over after any death, it goes on from the newest
checkpoint and finds in the store the records that it had retained, so nothing is generated twice and nothing trained twice
in the surviving lineage. What it publishes carries its incarnation and moves by compare-and-set, so one that was replaced
can't do harm.
"""

import contextlib
import time
from pathlib import Path
from typing import Any

import anyio
import msgspec

from libs.common import messages as m
from libs.common import subjects
from libs.common.blobs import download
from libs.common.errors import JigsawError, QueueGone
from libs.common.history import History
from libs.common.job import Job
from libs.common.messages import Phase
from libs.common.models import context_length, resolve_model
from libs.common.pulling import Puller
from libs.common.sections import DataSection
from libs.common.service import Context
from libs.common.tokens import PolicyVersion
from libs.common.trajectory import Record
from libs.environments.registry import make_environment
from services.trainer import wire
from services.trainer.compute_link import ComputeLink
from services.trainer.gather import Gatherer, Waits
from services.trainer.hold import Superseded
from services.trainer.job_data import JobData
from services.trainer.progress import Progress
from services.trainer.publication import Publication
from services.trainer.run_log import RunLog
from services.trainer.steps import StepLedger, is_evaluation_step
from services.trainer.summary import account, token_count, warnings_of

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
        self._ledger = StepLedger(step=0, replacements=0)
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
        self._job = await self._with_local_data(self._record.job)
        model = await anyio.to_thread.run_sync(resolve_model, self._job.model.path)
        data = await self._load_data(model)
        ready = await self._load(model, data)
        log = await anyio.to_thread.run_sync(RunLog, self._folder, ready.step)
        gatherer = Gatherer(
            bus=self._context.bus,
            store=self._context.store,
            job_uid=self._uid,
            instance=self._context.instance,
            waits=Waits.of(self._job.rollout.lease_s),
            log=self._log,
        )
        settled = await self._settled()
        try:
            policy = await self._publication.policy(ready.step)
            for step in range(ready.step, self._job.train.steps):
                policy = await self._do_step(step, policy, data=data, gatherer=gatherer, settled=settled, log=log)
            await self._final_evaluation(policy, data=data, gatherer=gatherer, settled=settled, log=log)
            await self._publication.model()
            self._phase = Phase.DONE
            await self._tell()
        finally:
            await anyio.to_thread.run_sync(log.close)

    # --- start -------------------------------------------------------------------------------------------------------

    async def _with_local_data(self, job: Job) -> Job:
        """The job with its uploaded datasets fetched onto this machine."""

        async def local(section: DataSection) -> DataSection:
            digest = self._record.blobs.get(section.path or "")
            if digest is None:
                return section
            path = await download(self._context.bus, digest, Path(self._context.settings.home) / "blobs")
            return msgspec.structs.replace(section, path=str(path))

        data = await local(job.data)
        evaluation = job.eval and msgspec.structs.replace(job.eval, data=await local(job.eval.data))
        return msgspec.structs.replace(job, data=data, eval=evaluation)

    async def _load_data(self, model: Path) -> JobData:
        environment = make_environment(self._job.environment, allow=self._context.settings.plugins.allow)
        max_context = self._job.model.max_context or context_length(model)

        def load() -> JobData:
            return JobData(self._job, job_uid=self._uid, model=model, environment=environment, max_context=max_context)

        return await anyio.to_thread.run_sync(load)

    async def _load(self, model: Path, data: JobData) -> wire.Ready:
        """Load the compute side, from the newest checkpoint that is whole if there is one."""
        checkpoints = await anyio.to_thread.run_sync(self._publication.checkpoints.newest_first)
        ready = await self._compute.load(
            self._job,
            model=str(model),
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

    async def _settled(self) -> Puller:
        while True:
            try:
                return await self._context.bus.pull(m.TrajectorySettled, subjects.settled_consumer(self._uid))
            except QueueGone:
                await anyio.sleep(0.1)  # the scheduler makes it before it allocates; gone again if the job has ended

    # --- a step ------------------------------------------------------------------------------------------------------

    async def _do_step(
        self,
        step: int,
        policy: PolicyVersion,
        *,
        data: JobData,
        gatherer: Gatherer,
        settled: Puller,
        log: RunLog,
    ) -> PolicyVersion:
        """Roll out, train, publish; returns the new policy version."""
        started = time.monotonic()
        groups = data.training_groups(self._job.rollout.batch, step=step)
        if self._is_evaluated(step):
            groups += data.evaluation_groups(step=step)
        self._begin(step, Phase.ROLLOUT)
        await self._tell()
        records = await gatherer.gather(
            self._ledger, groups, data=data, policy=policy, settled=settled, on_progress=self._tell_soon
        )
        gathered = time.monotonic()
        self._phase = Phase.TRAIN
        await self._tell()
        training = [record for record in records if record.spec.purpose == "train"]
        evaluated = [record for record in records if record.spec.purpose == "eval"]
        summary = account(self._history, self._by_group(training))
        metrics = await self._train(step, training)
        trained = time.monotonic()
        self._account_evaluation(step, evaluated, metrics)
        metrics |= summary.metrics()
        for warning in self._history.warn(warnings_of(summary, metrics)):
            self._log.warning("attention", step=step, message=warning)
        policy = await self._publication.policy(step + 1)
        published = time.monotonic()
        tokens = token_count(training)
        metrics |= {
            "time/rollout": gathered - started,
            "time/train": trained - gathered,
            "time/publish": published - trained,
            "time/checkpoint": self._checkpoint_s,
            "time/step": published - started + self._checkpoint_s,
            "progress/epoch": float(data.epoch),
            "throughput/tokens": float(tokens),
            "throughput/tokens_per_s": tokens / (published - started + self._checkpoint_s),
        }
        self._log.info("step", step=step, reward=self._history.rewards[-1], seconds=round(metrics["time/step"], 2))
        # Before the checkpoint: once that is there, the step isn't done again, and what wasn't written would be missing.
        await anyio.to_thread.run_sync(lambda: log.samples(step, training + evaluated, shown=self._job.train.log_samples))
        await anyio.to_thread.run_sync(lambda: log.scalars(step, metrics))
        self._publication.retain([record.spec.id for record in training])
        self._history.rollout_s += gathered - started
        self._history.train_s += trained - gathered
        self._history.other_s += time.monotonic() - trained
        await self._checkpoint_if_due(step + 1, data)
        return policy

    def _begin(self, step: int, phase: Phase) -> None:
        self._step, self._phase = step, phase
        self._ledger = StepLedger(step=step, replacements=self._job.rollout.batch)

    async def _train(self, step: int, training: list[Record]) -> dict[str, float]:
        """Train on the valid groups, if any of them is left to learn from."""
        valid = set(self._ledger.valid_groups())
        if not valid:
            errors = [record.error for record in training if record.error]
            raise JigsawError(f"step {step}: no group has two scored samples; first error: {(errors or ['none'])[0]}")
        groups = [
            _to_wire([record for record in group if record.state == "scored"])
            for group in self._by_group(training)
            if group[0].spec.id.group in valid
        ]
        if self._job.algorithm.drop_zero_variance:
            groups = [group for group in groups if len({sample.reward for sample in group.samples}) > 1]
        if not groups:
            return {"loss/policy": 0.0, "grad_norm": 0.0}
        metrics = await self._compute.train(step, groups)
        self._history.trained += sum(len(group.samples) for group in groups)
        self._history.mismatch_kl = metrics.get("mismatch/kl", 0.0)
        return metrics

    # --- evaluation --------------------------------------------------------------------------------------------------

    def _is_evaluated(self, step: int) -> bool:
        section = self._job.eval
        return section is not None and is_evaluation_step(step, every=section.every, steps=self._job.train.steps)

    def _account_evaluation(self, step: int, records: list[Record], metrics: dict[str, float]) -> None:
        """Add a step's held-out samples, if it has any, to the history and to its metrics."""
        rewards = [record.reward for record in records if record.reward is not None]
        if rewards:
            mean = sum(rewards) / len(rewards)
            self._history.evaluations.append((step, mean))
            metrics["eval/reward_mean"] = mean
        self._publication.retain([record.spec.id for record in records])

    async def _final_evaluation(
        self, policy: PolicyVersion, *, data: JobData, gatherer: Gatherer, settled: Puller, log: RunLog
    ) -> None:
        """Evaluate the last policy."""
        steps = self._job.train.steps
        if not self._is_evaluated(steps) or any(step == steps for step, _ in self._history.evaluations):
            return
        self._begin(steps, Phase.ROLLOUT)
        await self._tell()
        groups = data.evaluation_groups(step=steps)
        evaluated = await gatherer.gather(
            self._ledger, groups, data=data, policy=policy, settled=settled, on_progress=self._tell_soon
        )
        metrics: dict[str, float] = {}
        self._account_evaluation(steps, evaluated, metrics)
        await anyio.to_thread.run_sync(lambda: log.samples(steps, evaluated, shown=0))
        await anyio.to_thread.run_sync(lambda: log.scalars(steps, metrics))

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

    def _by_group(self, records: list[Record]) -> list[list[Record]]:
        groups: dict[int, list[Record]] = {}
        for record in records:
            groups.setdefault(record.spec.id.group, []).append(record)
        return list(groups.values())

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
        settled, expected = self._ledger.counts
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


def _to_wire(group: list[Record]) -> wire.SampleGroup:
    """A group's scored samples as the training process takes them."""
    samples = [wire.Sample(record.tokens.tobytes(), record.reward or 0.0) for record in group]
    return wire.SampleGroup(group[0].spec.prompt_ids, samples)
