"""The turn loop: drives one claimed trajectory from wherever it stands to its end.

Generate a turn, ask the environment, append the observation, again: until the environment is done, the budget of tokens or
turns is spent, or the context is full. Tokens are stored as they come; every write names the claim's epoch.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import anyio
import msgspec
import numpy as np

from libs.common.chat import ChatTokenizer
from libs.common.errors import JigsawError, StaleEpochError
from libs.common.group_commit import GroupCommit
from libs.common.job import Job
from libs.common.lengths import drawn_length
from libs.common.tokens import PolicyVersion, TokenArray, join, observed, sampled
from libs.common.trajectory import Append, Claim, Die, Fail, Finish, TrajectoryId
from libs.environments.protocol import Conversation, Done, Environment, EnvironmentFailed, Observation
from services.rollout.engine import StopReason, TurnRequest
from services.rollout.turns import Next, Standing, ends_turn, standing

BACKOFF_MS = 500


class Lost(JigsawError):
    """This worker doesn't own the trajectory any more; whoever does goes on with it."""


class GivenAway(Lost):
    """This worker has let go of it in order, with every token that it had."""


class EngineLost(JigsawError):
    """The engine process died under the trajectory, or was unloaded."""


class EngineLink(Protocol):
    """The job's engine, as a trajectory sees it."""

    @property
    def max_context(self) -> int:
        """Tokens of prompt and response together."""

    @property
    def version(self) -> PolicyVersion:
        """The policy in force."""

    async def available(self) -> None:
        """Wait until there is an engine: one that died is being restarted.

        Raises:
            EngineLost: none can be loaded.
        """

    async def begin(self, request: TurnRequest) -> None:
        """Start generating a turn; its tokens arrive at the trajectory's :meth:`Trajectory.take`."""


class Tools(msgspec.Struct, frozen=True):
    """What the trajectories of one job share on one worker."""

    job: Job
    engine: EngineLink
    chat: ChatTokenizer
    environment: Environment
    commits: GroupCommit


class Trajectory:
    """A claimed trajectory on this worker."""

    def __init__(self, claim: Claim, tools: Tools) -> None:
        self.claim, self._tools = claim, tools
        self._tokens: list[TokenArray] = [claim.tokens]
        self._length = len(claim.tokens)
        self._unstored: list[TokenArray] = []
        self._turn: asyncio.Future[StopReason] | None = None
        self._scope, self._ending = anyio.CancelScope(), False
        self._left: Lost | None = None

    @property
    def id(self) -> TrajectoryId:
        """Identity."""
        return self.claim.spec.id

    @property
    def key(self) -> str:
        """Its name on the engine; another claim of the same trajectory has another."""
        return f"{self.id.member}@{self.claim.epoch}"

    @property
    def length(self) -> int:
        """Tokens after the prompt so far."""
        return self._length

    @property
    def in_turn(self) -> bool:
        """Whether the engine has a turn of it that hasn't ended."""
        return self._turn is not None

    # --- called by the engine link -----------------------------------------------------------------------------------

    def take(
        self, *, ids: Sequence[int], logprobs: Sequence[float], version: PolicyVersion, stopped: StopReason | None
    ) -> None:
        """New tokens from the engine; the last ones of a turn wait to be stored with what follows them."""
        self._add(sampled(ids, logprobs, version))
        if stopped is not None and self._turn is not None and not self._turn.done():
            self._turn.set_result(stopped)

    def checkpoint(self) -> list[Append]:
        """A write for the tokens that aren't stored yet."""
        new = self._take_unstored()
        if not len(new):
            return []
        return [Append(self.id, self.claim.epoch, self._length - len(new), new)]

    def fail_turn(self, error: EngineLost) -> None:
        """The turn being generated can't end: the engine is gone."""
        if self._turn is not None and not self._turn.done():
            self._turn.set_exception(error)

    def lose(self, why: str) -> None:
        """Someone else owns it now, or may: :meth:`run` ends here, wherever it is."""
        self._leave(Lost(why))

    def give_away(self, to: str) -> None:
        """It was let go to an instance, or ("") to whoever claims it: :meth:`run` ends here, likewise."""
        self._leave(GivenAway(to or "anyone"))

    def _leave(self, how: Lost) -> None:
        self._left = self._left or how  # that writes are refused from now on is what follows
        self._scope.cancel()

    def lease_refused(self, why: str) -> None:
        """The lease can't be renewed: it is lost, unless its end is being written, whose answer will tell."""
        if not self._ending:
            self.lose(why)

    # --- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Drive it to its end; returns once *finished*, a failed attempt or its engine's death is stored.

        Raises:
            GivenAway: it was let go in order.
            Lost: someone else owns it now.
        """
        with self._scope:
            await self._run_to_an_end()
        if self._left is not None:
            raise self._left

    async def _run_to_an_end(self) -> None:
        end: Finish | Fail | Die
        try:
            with anyio.fail_after(self._tools.job.rollout.deadline_s):
                stopped = await self._play()
        except TimeoutError:
            end = self._failed(f"deadline of {self._tools.job.rollout.deadline_s:g} s passed", retry=False)
        except EnvironmentFailed as failure:
            end = self._failed(f"environment: {failure}", retry=True)
        except EngineLost as failure:
            end = Die(self.id, self.claim.epoch, f"engine: {failure}")
        else:
            end = self._finished(stopped)
        await self._commit(end)

    def _failed(self, error: str, *, retry: bool) -> Fail:
        return Fail(self.id, self.claim.epoch, error, BACKOFF_MS * (self.claim.failures + 1) if retry else None)

    async def _play(self) -> StopReason:
        """Turn after turn."""
        while True:
            at = self._standing()
            stopped = StopReason.STOP
            if at.next is Next.TRUNCATED:
                return StopReason.LENGTH
            if at.next is Next.GENERATE:
                await self._tools.engine.available()
                if len(self.claim.spec.prompt_ids) + self._length >= self._tools.engine.max_context:
                    return StopReason.CONTEXT
                stopped = await self._generate(at)
                at = self._standing()
            if stopped is not StopReason.STOP or len(at.spans) >= self.claim.spec.max_turns:
                return stopped
            if not await self._respond(at):
                return stopped

    def _standing(self) -> Standing:
        tokens = self._joined()
        at = standing(tokens, turn_ended=False, max_new_tokens=self.claim.spec.max_new_tokens)
        if not len(tokens) or at.turn_start == len(tokens):
            return at
        return standing(tokens, turn_ended=self._turn_ended(at), max_new_tokens=self.claim.spec.max_new_tokens)

    def _turn_ended(self, at: Standing) -> bool:
        tokens, rollout = self._joined(), self._tools.job.rollout
        if rollout.forced_lengths is not None:
            return self._forced_rest(at) <= 0
        text = self._text(*at.spans[-1], special=True) if rollout.stop else ""
        return ends_turn(int(tokens["id"][-1]), text, stop_token_ids=self._tools.chat.eos_ids, stop=rollout.stop)

    def _forced_rest(self, at: Standing) -> int:
        """Tokens that the current turn still lacks of its drawn length; a whole turn's if none has begun."""
        lengths = self._tools.job.rollout.forced_lengths
        assert lengths is not None
        drawn = drawn_length(lengths, seed=self.claim.spec.seed, turn_start=at.turn_start)
        return drawn - (len(self._joined()) - at.turn_start)

    async def _generate(self, at: Standing) -> StopReason:
        spec, rollout = self.claim.spec, self._tools.job.rollout
        forced = rollout.forced_lengths is not None
        most = spec.max_new_tokens - at.sampled
        self._turn = asyncio.get_running_loop().create_future()
        await self._tools.engine.begin(
            TurnRequest(
                key=self.key,
                prompt_ids=spec.prompt_ids,
                token_ids=self._joined()["id"].tolist(),
                turn_start=at.turn_start,
                max_new_tokens=min(most, self._forced_rest(at)) if forced else most,
                temperature=spec.temperature,
                seed=spec.seed,
                stop_token_ids=[] if forced else self._tools.chat.eos_ids,
                stop=rollout.stop,
            )
        )
        stopped = await self._turn
        self._turn = None
        if forced and stopped is StopReason.LENGTH and self._forced_rest(at) <= 0:
            return StopReason.STOP  # its length is what was drawn
        return stopped

    async def _respond(self, at: Standing) -> bool:
        """Ask the environment; whether there is another turn."""
        self._tools.commits.put(self.checkpoint())  # while the environment thinks, what was generated is safe
        spec = self.claim.spec
        turns = [self._text(*span) for span in at.spans]
        conversation = Conversation(prompt=spec.prompt, answer=spec.answer, row=spec.row, turns=turns, seed=spec.seed)
        closed = int(self._joined()["id"][-1]) in self._tools.chat.eos_ids
        try:
            outcome = await self._answer(conversation)
            if isinstance(outcome, Done):
                return False
            ids = self._tools.chat.observation_ids(outcome.messages, turn_closed=closed)
        except EnvironmentFailed:
            raise
        except Exception as error:  # an environment may be a user's code: whatever it raises or returns is its failure
            raise EnvironmentFailed(f"{type(error).__name__}: {error}") from error
        self._add(observed(ids, self._tools.engine.version))
        return True

    async def _answer(self, conversation: Conversation) -> Observation | Done:
        limit_s = self._tools.job.environment.timeout_s
        with anyio.move_on_after(limit_s):
            return await self._tools.environment.respond(conversation)
        raise EnvironmentFailed(f"no answer within {limit_s:g} s")

    def _finished(self, reason: StopReason) -> Finish:
        at = self._standing()
        text = "\n".join(self._text(*span) for span in at.spans)
        new = self._take_unstored()
        return Finish(
            self.id, self.claim.epoch, self._length - len(new), new, stop_reason=reason, text=text, turns=len(at.spans)
        )

    async def _commit(self, write: Finish | Fail | Die) -> None:
        self._ending = True
        (answer,) = self._tools.commits.put([write])
        result = await answer
        if isinstance(result, StaleEpochError):
            raise Lost(str(result))

    # --- tokens ------------------------------------------------------------------------------------------------------

    def _add(self, tokens: TokenArray) -> None:
        self._tokens.append(tokens)
        self._unstored.append(tokens)
        self._length += len(tokens)

    def _take_unstored(self) -> TokenArray:
        new, self._unstored = join(*self._unstored), []
        return new

    def _joined(self) -> TokenArray:
        self._tokens = [join(*self._tokens)]
        return self._tokens[0]

    def _text(self, start: int, end: int, *, special: bool = False) -> str:
        return self._tools.chat.decode(np.asarray(self._joined()["id"][start:end]).tolist(), special=special)
