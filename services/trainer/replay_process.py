"""A replay of training: takes the time that training would take, and changes nothing.

``python -m services.trainer.replay_process``, started by the trainer service for a job with ``train.engine = "replay"``: for
tests, chaos runs and benchmarks of everything around training. It speaks the training process's protocol, but needs neither
torch nor numpy, so that it starts in a fraction of a second.

Invariant: in place of weights it has a digest of all that it was trained on, in order. So two runs of a job end alike if and
only if both trained the same ids with the same rewards in the same steps.
"""

import hashlib
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from libs.common import manifest
from libs.common.errors import ModelError
from libs.common.job import Job
from libs.common.replay import speed_of
from services.trainer import model_files, wire
from services.trainer.request_loop import OnMicroBatch, serve
from services.trainer.resume import STATE, Found, load_first, read_state

POLICY = "replay.json"
"""Tells in a policy's directory which policy it is."""

TOKEN = struct.Struct("<IfIHH")
"""``libs.common.tokens.TOKEN`` without numpy, whose import would take longer than all others here together."""


class ReplayedPolicy(msgspec.Struct, frozen=True):
    """What a policy is: ``step`` updates, made from what has the digest ``trained`` (sha256 in hex, or "")."""

    step: int
    trained: str


class Saved(msgspec.Struct, frozen=True):
    """A checkpoint of a replay."""

    step: int
    trained: str
    extra: dict[str, Any]


class ReplayLearner:
    """A :class:`~services.trainer.request_loop.Learner` without a model.

    Args:
        model: directory that policies take their tokenizer and config from.
        sleep: spends a micro-batch's seconds (it blocks: the learner has its process to itself).
    """

    def __init__(self, model: Path, job: Job, *, resume: Saved | None, sleep: Callable[[float], None] = time.sleep) -> None:
        saved = resume or Saved(0, "", {})
        self.step, self.trained, self.extra = saved.step, saved.trained, saved.extra
        self._model, self._job, self._settings, self._sleep = model, job, job.train.engine_args, sleep
        self.set_threads(1)

    def set_threads(self, count: int) -> None:
        """Take the time of this many threads, at most the cores that this process may run on."""
        self._speed = speed_of(self._settings.thread_speedup, count)

    def train(self, step: int, groups: Sequence[wire.SampleGroup], *, on_micro_batch: OnMicroBatch) -> dict[str, float]:
        """Spend a step's time, micro-batch by micro-batch. Losses and norms are made up: constants that nothing warns of."""
        started = time.perf_counter()
        tokens = sum(map(_tokens, groups))
        sizes = list(_cut(tokens, self._job.train.micro_batch_tokens))
        for done, size in enumerate(sizes, start=1):
            began = time.perf_counter()
            self._spend(size)
            on_micro_batch(wire.MicroBatchDone(done, len(sizes), size, time.perf_counter() - began))
        self.step, self.trained = step + 1, _digest(self.trained, step, groups)
        return {
            "loss/policy": 0.01,
            "grad_norm": 1.0,
            "mismatch/kl": 1e-4,
            "throughput/tokens_computed": float(tokens),
            "time/compute": time.perf_counter() - started,
        }

    def write_policy(self, directory: Path) -> None:
        """The initial model's files; of its weights, only where an engine reads them.

        Raises:
            ModelError: it can't be written.
        """
        files = model_files.companions(self._model)
        if self._job.rollout.engine != "replay":
            files += model_files.weights(self._model)
        try:
            for path in files:
                shutil.copyfile(path, directory / path.name)
            (directory / POLICY).write_bytes(msgspec.json.encode(ReplayedPolicy(self.step, self.trained)))
        except OSError as error:
            raise ModelError(f"the policy can't be written to {directory}: {error}") from error

    def write_checkpoint(self, directory: Path, *, step: int, extra: dict[str, Any]) -> None:
        """Steps, digest and the service's own data, durably.

        Raises:
            JigsawError: it can't be written; an earlier checkpoint is intact.
        """
        self.step, self.extra = step, extra
        with manifest.complete_or_invisible(directory, durable=True) as partial:
            (partial / STATE).write_bytes(msgspec.msgpack.encode(Saved(step, self.trained, extra)))

    def _spend(self, tokens: int) -> None:
        if self._settings.tokens_per_s > 0:
            self._sleep(tokens / self._settings.tokens_per_s / self._speed)


def load(told: wire.Load, *, sleep: Callable[[float], None] = time.sleep) -> tuple[ReplayLearner, Found[Saved]]:
    """The learner, continuing from the newest checkpoint that is whole."""
    found = load_first([Path(path) for path in told.resume], _read)
    return ReplayLearner(Path(told.model), told.job, resume=found.checkpoint, sleep=sleep), found


def _read(directory: Path) -> Saved:
    return msgspec.convert(read_state(directory), Saved)


def _tokens(group: wire.SampleGroup) -> int:
    """What training computes of a group: its prompt once, and every response."""
    return len(group.prompt_ids) + sum(len(sample.tokens) // TOKEN.size for sample in group.samples)


def _cut(tokens: int, budget: int) -> Iterator[int]:
    """Sizes of micro-batches, all full but the last."""
    for start in range(0, tokens, budget):
        yield min(budget, tokens - start)


def _digest(before: str, step: int, groups: Sequence[wire.SampleGroup]) -> str:
    """Digest of what was trained up to and including these groups; which incarnation sampled a token makes no difference."""
    content = [
        (
            group.prompt_ids,
            [(sample.reward, [token[0] for token in TOKEN.iter_unpack(sample.tokens)]) for sample in group.samples],
        )
        for group in groups
    ]
    return hashlib.sha256(msgspec.msgpack.encode((before, step, content))).hexdigest()


if __name__ == "__main__":
    serve(load)
