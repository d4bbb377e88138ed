"""The rollout service's end of an engine process: starts it, keeps its policy and units current, restarts it when it dies.

A new process is told the newest policy and the newest units, so nothing that happened while it was down is missed. One that
can't be loaded several times in a row is *broken*, which the instance's presence tells the scheduler, with the reason. One
that isn't needed for long is unloaded, and comes back with the next units.

Turns that begin at the same moment reach the engine in one message, so that one prefill computes all of them: sent one by
one, the first would have a step to itself while the others wait.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import anyio
from structlog.typing import FilteringBoundLogger

from libs.common.changes import Changes
from libs.common.child import Child
from libs.common.job import Job
from libs.common.tokens import PolicyVersion
from services.rollout import wire
from services.rollout.engine import TurnRequest
from services.rollout.runner import EngineLost
from services.rollout.vllm_engine import engine_environment

LOAD_TRIES = 2

Receiver = Callable[[wire.FromEngine], Awaitable[None]]


class EngineLink:
    """One engine process of one job.

    Args:
        cores: the device's units, as core numbers.
        receiver: called with everything that the process says, after this link has taken note of it.
    """

    def __init__(self, job: Job, *, cores: Sequence[int], receiver: Receiver, log: FilteringBoundLogger) -> None:
        self._job, self._cores, self._receiver, self._log = job, list(cores), receiver, log
        self._child: Child[wire.FromEngine] | None = None
        self._policy: tuple[PolicyVersion, Path] | None = None
        self._policy_known = anyio.Event()
        self._units: wire.SetUnits | None = None
        self._memory_mb = job.rollout.kv_memory_mb
        self._loaded: PolicyVersion | None = None
        self._failure = ""
        self._stopping = False
        self._wanted = anyio.Event()
        self._wanted.set()
        self._changes = Changes()
        self._beginning: list[TurnRequest] = []
        self._dropping: dict[int, anyio.Event] = {}
        self._drops = 0
        self.max_context = 0
        self.revision = 0
        self.broken = ""

    @property
    def ready(self) -> bool:
        """Whether turns may begin: an engine is loaded, and the wanted policy is in force."""
        return self._loaded is not None and self._loaded == self.version

    @property
    def version(self) -> PolicyVersion:
        """The policy that is wanted: nothing begins under another."""
        return self._policy[0] if self._policy else PolicyVersion(0)

    async def run(self) -> None:
        """Keep a process running while it is wanted, until it is stopped, cancelled or found to be broken."""
        failures = 0
        while True:
            await self._wanted.wait()
            loaded = await self._live()
            if self._stopping:
                return
            if not self._wanted.is_set():
                continue
            failures = 0 if loaded else failures + 1
            if failures >= LOAD_TRIES:
                self.broken = self._failure or "the engine process keeps dying"
                self._log.error("engine_broken", reason=self.broken)
                self._changes.notify()
                return
            await anyio.sleep(0.5 * 2**failures)

    def want_policy(self, version: PolicyVersion, folder: Path) -> None:
        """From now on nothing begins until this version is in force; :meth:`switch_policy` puts it there."""
        self._policy = (version, folder)
        self._policy_known.set()

    async def switch_policy(self) -> None:
        """Put the wanted version in force at the next step boundary; a process that still loads finds it by itself."""
        if self._loaded is not None and self._policy is not None:
            await self._send(wire.SwitchPolicy(self._policy[0], str(self._policy[1])))

    async def set_units(self, units: tuple[int, ...], *, revision: int, memory_mb: int) -> None:
        """Compute on these units from the next step boundary on; none pauses.

        Args:
            memory_mb: caps the KV cache of an engine that is loaded from now on.
        """
        self._memory_mb = memory_mb
        self._units = wire.SetUnits(units, revision)
        if self._loaded is not None:
            await self._send(self._units)
        if units:
            self._wanted.set()
        elif not self._wanted.is_set():
            self.revision = revision  # nothing is loaded that it could apply to

    async def unload(self) -> None:
        """End the process and free its memory until there are units again; nothing may be running on it."""
        self._wanted = anyio.Event()
        if self._child is not None:
            await self._child.stop()
        self._log.info("engine_unloaded")

    async def available(self) -> None:
        """Wait until there is an engine: one that died is being restarted.

        Raises:
            EngineLost: none can be loaded, with the reason.
        """
        await self._changes.until(lambda: self.ready or bool(self.broken))
        if not self.ready:
            raise EngineLost(self.broken)

    async def begin(self, request: TurnRequest) -> None:
        """Start generating a turn, together with all others that begin before the loop comes round again.

        Raises:
            EngineLost: there is no engine to do it.
        """
        if not self.ready:
            raise EngineLost("it is being restarted")
        if not self._beginning:
            asyncio.get_running_loop().call_soon(self._begin_all)
        self._beginning.append(request)

    def _begin_all(self) -> None:
        requests, self._beginning = self._beginning, []
        if requests and self._child is not None:  # if it has died meanwhile, all turns fail anyway
            self._child.post(wire.Begin(requests))

    async def drop(self, keys: list[str]) -> None:
        """Stop turns at a step boundary; returns when their last tokens have been received."""
        if self._child is None or self._loaded is None or not keys:
            return
        self._drops += 1
        done = self._dropping[self._drops] = anyio.Event()
        await self._send(wire.Drop(self._drops, keys))
        await done.wait()

    async def stop(self) -> None:
        """End the process, for good."""
        self._stopping = True
        self._wanted.set()
        if self._child is not None:
            await self._child.stop()

    async def _live(self) -> bool:
        """One life of the process, from start to end; whether it ever was loaded."""
        child = await Child.start(
            "services.rollout.engine_process",
            self._job.rollout.engine,
            receives=wire.FROM_ENGINE,
            environment=self._environment(),
            cores=self._cores[:1] if self._units is None or not self._units.units else self._wanted_cores(self._units),
        )
        self._child = child
        if self._stopping or not self._wanted.is_set():  # asked for while it started
            await child.stop()
        ever_loaded = False
        try:
            async for message in child.receive():
                ever_loaded = ever_loaded or (isinstance(message, wire.Loaded) and not message.error)
                if isinstance(message, wire.Started):
                    await self._policy_known.wait()
                    await child.send(self._load())  # only now, so that it is the newest policy
                    continue
                await self._note(message)
                await self._receiver(message)
            end = await child.ended()
        finally:
            self._loaded, self._child = None, None
            with anyio.CancelScope(shield=True):
                await child.stop()
            for event in self._dropping.values():
                event.set()
            self._dropping.clear()
        if self._stopping or not self._wanted.is_set():
            return ever_loaded
        reason = self._failure or f"the engine process ended: {end}"
        self._log.error("engine_ended", reason=reason)
        await self._receiver(wire.StepFailed(reason))
        return ever_loaded

    async def _note(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Loaded(error=error) if error:
                self._failure = f"the engine can't be loaded: {error}"
            case wire.Loaded(version=version, seconds=seconds, max_context=max_context):
                self._failure, self._loaded, self.max_context = "", version, max_context
                self._log.info("engine_loaded", policy=str(version), seconds=round(seconds, 2), max_context=max_context)
                await self._catch_up(version)
                self._changes.notify()
            case wire.PolicySwitched(version=version, seconds=seconds):
                self._loaded = version
                self._log.debug("policy_switched", policy=str(version), seconds=round(seconds, 3))
                self._changes.notify()
            case wire.UnitsApplied(revision=revision):
                self.revision = revision
            case wire.Dropped(number=number):
                if done := self._dropping.pop(number, None):
                    done.set()
            case wire.StepFailed():
                self._loaded = None  # it takes itself apart now, and can't be given anything
            case _:
                pass

    async def _catch_up(self, loaded: PolicyVersion) -> None:
        """Tell a new process what changed while it loaded."""
        if self._units is not None:
            await self._send(self._units)
        if loaded != self.version:
            await self.switch_policy()

    async def _send(self, message: wire.ToEngine) -> None:
        self._begin_all()  # a turn may be dropped in the moment in which it begins: in this order
        if self._child is not None:
            await self._child.send(message)

    def _environment(self) -> Mapping[str, str]:
        return {} if self._job.rollout.engine == "replay" else engine_environment(threads=1)

    def _wanted_cores(self, units: wire.SetUnits) -> list[int]:
        return [self._cores[unit] for unit in units.units]

    def _load(self) -> wire.Load:
        if self._policy is None:
            raise EngineLost("no policy has been published")
        version, folder = self._policy
        rollout, model = self._job.rollout, self._job.model
        return wire.Load(
            kind=rollout.engine,
            replay=rollout.engine_args,
            dtype=model.dtype,
            max_context=model.max_context,
            max_running=rollout.max_running,
            kv_memory_mb=min(rollout.kv_memory_mb, self._memory_mb),
            compile=rollout.compile,
            version=version,
            directory=str(folder),
            cores=self._cores,
            flush_tokens=rollout.checkpoint_tokens,
            flush_ms=rollout.checkpoint_ms,
        )
