"""The engine process: owns one engine, steps it, and does everything else at step boundaries.

``python -m services.rollout.engine_process``, started by the rollout service only. It knows nothing of the bus, the store
or leases; the service knows nothing of torch.
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence

from libs.common.child import Parent, ParentGone, die_with_parent
from libs.common.errors import JigsawError
from libs.common.messages import LENGTH_BIN, SubStage
from libs.common.partition import CpuPartition
from libs.common.tokens import PolicyVersion
from services.rollout import wire
from services.rollout.bands import Bands, label
from services.rollout.engine import Engine, NewToken, StepReport, StopReason

WINDOW_S = 0.2


def make_engine(load: wire.Load) -> tuple[Engine, int]:
    """The engine that a job asks for, and the context window (tokens) that it really has."""
    if load.kind == "replay":
        from services.rollout.replay_engine import ReplayEngine

        return ReplayEngine(load.replay, max_running=load.max_running, max_context=load.max_context), (
            load.max_context or sys.maxsize
        )
    from services.rollout.vllm_engine import VllmEngine

    engine = VllmEngine(
        load.directory,
        max_running=load.max_running,
        kv_memory_mb=load.kv_memory_mb,
        dtype=load.dtype,
        max_context=load.max_context,
        compile=load.compile,
    )
    return engine, engine.max_context


class Outbox:
    """New tokens on their way to the service: handed over together, at once for turns that ended.

    Args:
        flush_tokens, flush_s: no token is kept back for longer than so many tokens of its trajectory or so many seconds.
            What would be when the next step ends, if that takes as long as the last one, goes out before it.
    """

    def __init__(self, parent: Parent[wire.ToEngine], *, flush_tokens: int, flush_s: float, version: PolicyVersion) -> None:
        self._parent, self._flush_tokens, self._flush_s = parent, flush_tokens, flush_s
        self.version = version
        self._ids: dict[str, list[int]] = defaultdict(list)
        self._logprobs: dict[str, list[float]] = defaultdict(list)
        self._longest = 0
        self._flushed_at = self._took_at = time.monotonic()

    def take(self, new: list[NewToken]) -> None:
        """Add a step's tokens; hand over those of turns that ended, and all when it is time."""
        ended: list[tuple[str, StopReason]] = []
        for token in new:
            ids = self._ids[token.key]
            ids.append(token.token_id)
            self._logprobs[token.key].append(token.logprob)
            self._longest = max(self._longest, len(ids))
            if token.stopped is not None:
                ended.append((token.key, token.stopped))
        now = time.monotonic()
        step_s, self._took_at = now - self._took_at, now
        if self._longest >= self._flush_tokens or now - self._flushed_at + step_s >= self._flush_s:
            self.flush(dict(ended))
        elif ended:
            self._send([self._segment(key, stopped) for key, stopped in ended])

    def flush(self, ended: dict[str, StopReason] | None = None) -> None:
        """Hand over everything."""
        stops = ended or {}
        self._send([self._segment(key, stops.get(key)) for key in list(self._ids)])
        self._longest, self._flushed_at = 0, time.monotonic()

    def _segment(self, key: str, stopped: StopReason | None) -> wire.Segment:
        return wire.Segment(key, self._ids.pop(key), self._logprobs.pop(key), stopped)

    def _send(self, segments: list[wire.Segment]) -> None:
        if segments:
            self._parent.send(wire.Progress(self.version, segments))


class Telemetry:
    """Windows of what the engine did, and word of every change of its sub-stage."""

    def __init__(self, parent: Parent[wire.ToEngine], bands: Bands) -> None:
        self._parent, self._bands = parent, bands
        self._sub_stage = SubStage.IDLE
        self._lengths: dict[str, int] = {}
        self._last: StepReport | None = None
        self._reset()

    def began(self, key: str, length: int) -> None:
        """A turn of a trajectory that already has ``length`` tokens joins."""
        self._lengths[key] = length

    def forget(self, key: str) -> None:
        """A trajectory left."""
        self._lengths.pop(key, None)

    def take(self, report: StepReport) -> None:
        """Account for one step."""
        self._enter(label(report, self._bands))
        self._prefill += report.prefill_tokens
        self._decode += report.decode_tokens
        for token in report.new:
            if token.stopped is None:
                self._lengths[token.key] += 1
            else:
                self.forget(token.key)
        self._last = report
        if time.monotonic() - self._since >= WINDOW_S:
            self._send()

    def rest(self) -> None:
        """Nothing to do: close the window."""
        if self._sub_stage is not SubStage.IDLE:
            self._send()
            self._enter(SubStage.IDLE)
        self._reset()

    def wake(self) -> None:
        """Something came in: the time spent waiting for it belongs to no window."""
        self._reset()

    def _enter(self, sub_stage: SubStage) -> None:
        if sub_stage is not self._sub_stage:
            self._sub_stage = sub_stage
            self._parent.send(wire.Entered(sub_stage))

    def _send(self) -> None:
        if self._last is None:
            return
        bins = [0] * (max(self._lengths.values(), default=0) // LENGTH_BIN + 1)
        for length in self._lengths.values():
            bins[length // LENGTH_BIN] += 1
        self._parent.send(
            wire.Window(
                window_s=time.monotonic() - self._since,
                tokens_prefill=self._prefill,
                tokens_decode=self._decode,
                running=self._last.running,
                waiting=self._last.waiting,
                lengths=bins,
                kv_used=self._last.kv_used,
            )
        )
        self._reset()

    def _reset(self) -> None:
        self._since, self._prefill, self._decode = time.monotonic(), 0, 0
        self._last = None


class EngineProcess:
    """The loop: messages at the boundary, one step, tokens and telemetry out."""

    def __init__(self, parent: Parent[wire.ToEngine], engine: Engine, load: wire.Load) -> None:
        self._parent, self._engine = parent, engine
        self._partition = CpuPartition(load.cores, set_threads=engine.set_threads)
        self._outbox = Outbox(parent, flush_tokens=load.flush_tokens, flush_s=load.flush_ms / 1000, version=load.version)
        self._telemetry = Telemetry(parent, Bands())
        self._paused = True

    def run(self, early: Sequence[wire.ToEngine]) -> None:
        """Obey what came while the engine loaded, then go on until the service closes the socket."""
        for message in early:
            self._obey(message)
        while True:
            working = not self._paused and self._engine.busy()
            if not working:
                self._outbox.flush()
                self._telemetry.rest()
            for message in self._parent.receive(wait_s=0 if working else None):
                self._obey(message)
            if not working:
                self._telemetry.wake()
            if not self._paused and self._engine.busy():
                report = self._engine.step()
                self._outbox.take(report.new)
                self._telemetry.take(report)

    def _obey(self, message: wire.ToEngine) -> None:
        match message:
            case wire.Begin(requests=requests):
                for request in requests:
                    self._telemetry.began(request.key, len(request.token_ids))
                self._engine.add(requests)
            case wire.Drop(number=number, keys=keys):
                self._engine.drop(keys)
                self._outbox.flush()
                for key in keys:
                    self._telemetry.forget(key)
                self._parent.send(wire.Dropped(number))
            case wire.SwitchPolicy(version=version, directory=directory):
                self._outbox.flush()
                started = time.monotonic()
                self._engine.load_policy(version, directory)
                self._outbox.version = version
                self._parent.send(wire.PolicySwitched(version, time.monotonic() - started))
            case wire.SetUnits(units=units, revision=revision):
                if units:
                    self._partition.apply(units)
                self._paused = not units
                self._parent.send(wire.UnitsApplied(units, revision))
            case wire.Load():
                raise JigsawError("an engine process loads once")


def main() -> None:
    """Entry point; the argument names the kind of engine, so that its imports are done by the time it is told to load."""
    die_with_parent()
    parent = Parent(wire.TO_ENGINE)
    if sys.argv[1] == "vllm":
        import vllm.v1.engine.core  # noqa: F401
    try:
        parent.send(wire.Started())
        load, *early = parent.receive(wait_s=None)
        if not isinstance(load, wire.Load):
            raise JigsawError("an engine process is told to load first")
        started = time.monotonic()
        try:
            engine, max_context = make_engine(load)
        except (JigsawError, ValueError, RuntimeError, OSError, TypeError) as error:
            # The boundary to a foreign engine: whatever it raises while loading is the reason that the job needs to show.
            parent.send(wire.Loaded(load.version, time.monotonic() - started, 0, error=f"{type(error).__name__}: {error}"))
            return
        parent.send(wire.Loaded(load.version, time.monotonic() - started, max_context))
        try:
            EngineProcess(parent, engine, load).run(early)
        except ParentGone:
            raise
        except (JigsawError, ValueError, RuntimeError, KeyError) as error:
            parent.send(wire.StepFailed(f"{type(error).__name__}: {error}"))
            raise
    except ParentGone:
        # Nothing of an engine outlives its process; taking it apart in order would only keep the memory for longer.
        os._exit(0)


if __name__ == "__main__":
    main()
