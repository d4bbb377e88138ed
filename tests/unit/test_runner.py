"""The turn loop against a scripted engine and an in-memory store: which turns it asks for, what it stores, how it ends."""

import asyncio
from typing import Any

import pytest

from libs.common.chat import ChatMessage, ChatTokenizer
from libs.common.group_commit import GroupCommit
from libs.common.job import Job, job_from
from libs.common.tokens import TRAINED, PolicyVersion, TokenArray, join, observed, sampled
from libs.common.trajectory import Append, Claim, Die, Fail, Finish, TrajectoryId, Write
from libs.environments.protocol import Conversation, Done, EnvironmentFailed, Observation
from services.rollout.engine import StopReason, TurnRequest
from services.rollout.runner import BACKOFF_MS, EngineLost, Lost, Tools, Trajectory
from tests.tiny_model import build_tiny_model
from tests.trajectories import spec_of

V = PolicyVersion(3, 1)


class FakeStore:
    """Accepts every write."""

    def __init__(self) -> None:
        self.writes: list[Write] = []

    async def write(self, writes: list[Write]) -> list[int]:
        self.writes += writes
        return [1] * len(writes)


class FakeEngine:
    """Plays turns from a list of (ids, stop reason)."""

    max_context = 200
    version = V

    def __init__(self, turns: list[tuple[list[int], StopReason]]) -> None:
        self._turns = turns
        self.requests: list[TurnRequest] = []
        self.trajectory: Trajectory | None = None
        self.broken = False

    async def available(self) -> None:
        if self.broken:
            raise EngineLost("it can't be loaded")

    async def begin(self, request: TurnRequest) -> None:
        self.requests.append(request)
        if not self._turns:
            raise EngineLost("it died")
        ids, stopped = self._turns.pop(0)
        assert self.trajectory is not None
        self.trajectory.take(ids=ids, logprobs=[-0.5] * len(ids), version=V, stopped=stopped)


class FakeEnvironment:
    """Answers from a list; an exception in it is raised."""

    def __init__(self, answers: list[Observation | Done | Exception], *, wait_s: float = 0.0) -> None:
        self._answers, self._wait_s = answers, wait_s
        self.heard: list[Conversation] = []

    def opening(self, **_: object) -> list[ChatMessage]:
        return []

    async def respond(self, conversation: Conversation) -> Observation | Done:
        self.heard.append(conversation)
        await asyncio.sleep(self._wait_s)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(build_tiny_model(tmp_path_factory.mktemp("model")))


def job(*, tool_timeout_s: float = 60.0, **rollout: object) -> Job:
    tool = {"name": "scripted", "timeout_s": tool_timeout_s}
    raw = {"name": "t", "model": {"path": "m"}, "data": {"path": "d.jsonl"}, "environment": tool}
    return job_from({**raw, "rollout": {"max_turns": 3, **rollout}}, file="t")


class Played:
    """One trajectory played to its end."""

    def __init__(self, engine: FakeEngine, environment: FakeEnvironment, writes: list[Write]) -> None:
        self.engine, self.environment, self.writes = engine, environment, writes

    @property
    def end(self) -> Write:
        return self.writes[-1]

    @property
    def stored(self) -> TokenArray:
        parts = [write.tokens for write in self.writes if isinstance(write, Append | Finish)]
        return join(*parts)


async def play(
    chat: ChatTokenizer,
    turns: list[tuple[list[int], StopReason]],
    answers: list[Observation | Done | Exception],
    *,
    before: TokenArray | None = None,
    wait_s: float = 0.0,
    broken: bool = False,
    tool_timeout_s: float = 60.0,
    **rollout: object,
) -> Played:
    settings = job(tool_timeout_s=tool_timeout_s, **rollout)
    spec = spec_of(
        TrajectoryId("job", 1, 2),
        prompt_ids=[5, 6, 7],
        row={"k": 1},
        seed=11,
        max_new_tokens=settings.rollout.max_new_tokens,
        max_turns=settings.rollout.max_turns,
    )
    store, engine, environment = FakeStore(), FakeEngine(turns), FakeEnvironment(answers, wait_s=wait_s)
    engine.broken = broken
    commits = GroupCommit(store)  # type: ignore[arg-type]  # a fake store
    committing = asyncio.create_task(commits.run())
    claim = Claim(spec, 4, failures=1, deaths=0, alone=False, tokens=join() if before is None else before)
    trajectory = Trajectory(claim, Tools(settings, engine, chat, environment, commits))
    engine.trajectory = trajectory
    await trajectory.run()
    committing.cancel()
    return Played(engine, environment, store.writes)


async def test_one_turn_and_done(chat: ChatTokenizer) -> None:
    eos = chat.eos_ids[0]
    played = await play(chat, [([40, 41, eos], StopReason.STOP)], [Done()])
    assert isinstance(played.end, Finish)
    assert (played.end.stop_reason, played.end.turns, played.end.epoch) == ("stop", 1, 4)
    assert played.end.text == chat.decode([40, 41])
    assert played.stored["id"].tolist() == [40, 41, eos]
    assert played.stored["logprob"].tolist() == [-0.5] * 3
    assert set(played.stored["step"].tolist()) == {3}
    assert played.environment.heard[0].turns == [chat.decode([40, 41])]


async def test_an_observation_opens_another_turn_with_what_is_left_of_the_budget(chat: ChatTokenizer) -> None:
    eos = chat.eos_ids[0]
    told = Observation([ChatMessage("user", "are you sure")])
    turns = [([40, eos], StopReason.STOP), ([42, 43, eos], StopReason.STOP)]
    played = await play(chat, turns, [told, Done()], max_new_tokens=10)
    added = chat.observation_ids(told.messages, turn_closed=True)
    first, second = played.engine.requests
    assert (first.max_new_tokens, first.token_ids, first.turn_start) == (10, [], 0)
    assert (second.max_new_tokens, second.turn_start) == (8, 2 + len(added))
    assert list(second.token_ids) == [40, eos, *added]
    trained = (played.stored["flags"] & TRAINED).astype(bool).tolist()
    assert trained == [True] * 2 + [False] * len(added) + [True] * 3


async def test_lengths_that_writes_expect_follow_each_other(chat: ChatTokenizer) -> None:
    eos = chat.eos_ids[0]
    turns = [([40, eos], StopReason.STOP), ([42, eos], StopReason.STOP)]
    played = await play(chat, turns, [Observation([ChatMessage("user", "x")]), Done()])
    at = 0
    for write in played.writes:
        assert isinstance(write, Append | Finish)
        assert write.expected_length == at
        at += len(write.tokens)


async def test_a_turn_cut_by_the_budget_ends_truncated_without_asking(chat: ChatTokenizer) -> None:
    played = await play(chat, [([40] * 4, StopReason.LENGTH)], [], max_new_tokens=4)
    assert isinstance(played.end, Finish)
    assert played.end.stop_reason == "length"
    assert played.environment.heard == []


async def test_the_last_allowed_turn_isnt_answered(chat: ChatTokenizer) -> None:
    eos = chat.eos_ids[0]
    played = await play(chat, [([40, eos], StopReason.STOP)], [], max_turns=1)
    assert isinstance(played.end, Finish)
    assert played.environment.heard == []


async def test_taking_over_in_the_middle_of_a_turn(chat: ChatTokenizer) -> None:
    eos = chat.eos_ids[0]
    there = list(range(60, 100))
    before = sampled(there, [-0.1] * 40, PolicyVersion(1))
    played = await play(chat, [([42, eos], StopReason.STOP)], [Done()], before=before, max_new_tokens=64)
    (request,) = played.engine.requests
    assert (list(request.token_ids), request.max_new_tokens, request.turn_start) == (there, 24, 0)
    assert played.stored["id"].tolist() == [42, eos]  # only what is new is written
    assert isinstance(played.end, Finish)
    assert played.end.text == chat.decode([*there, 42])


FORCED = {"forced_lengths": {"kind": "list", "tokens": [5]}}


async def test_a_forced_turn_has_its_length_whatever_the_model_says(chat: ChatTokenizer) -> None:
    eos = chat.eos_ids[0]
    told = Observation([ChatMessage("user", "are you sure")])
    turns = [([40, eos, 41, 42, 43], StopReason.LENGTH), ([44] * 5, StopReason.LENGTH)]
    played = await play(chat, turns, [told, Done()], **FORCED)
    assert [(list(request.stop_token_ids), request.max_new_tokens) for request in played.engine.requests] == [([], 5)] * 2
    assert isinstance(played.end, Finish)
    assert (played.end.stop_reason, played.end.turns) == ("stop", 2)


async def test_taking_over_in_a_forced_turn_asks_for_the_rest_and_after_it_for_nothing(chat: ChatTokenizer) -> None:
    played = await play(chat, [([44] * 3, StopReason.LENGTH)], [Done()], before=sampled([40, 41], [-0.1] * 2, V), **FORCED)
    assert [request.max_new_tokens for request in played.engine.requests] == [3]
    played = await play(chat, [], [Done()], before=sampled([40] * 5, [-0.1] * 5, V), **FORCED)
    assert played.engine.requests == []
    assert isinstance(played.end, Finish)
    assert played.end.stop_reason == "stop"


async def test_the_budget_cuts_a_forced_turn(chat: ChatTokenizer) -> None:
    played = await play(chat, [([40] * 4, StopReason.LENGTH)], [], max_new_tokens=4, **FORCED)
    assert [request.max_new_tokens for request in played.engine.requests] == [4]
    assert isinstance(played.end, Finish)
    assert played.end.stop_reason == "length"


async def test_taking_over_after_a_finished_turn_asks_the_environment(chat: ChatTokenizer) -> None:
    before = sampled([40, chat.eos_ids[0]], [-0.1, -0.2], V)
    played = await play(chat, [], [Done()], before=before)
    assert played.engine.requests == []
    assert isinstance(played.end, Finish)


async def test_taking_over_after_an_observation_begins_the_next_turn(chat: ChatTokenizer) -> None:
    eos = chat.eos_ids[0]
    before = join(sampled([40, eos], [-0.1, -0.2], V), observed([50, 51], V))
    played = await play(chat, [([42, eos], StopReason.STOP)], [Done()], before=before, max_new_tokens=10)
    assert played.engine.requests[0].turn_start == 4
    assert played.engine.requests[0].max_new_tokens == 8
    assert len(played.environment.heard[0].turns) == 2


async def test_taking_over_at_the_limit_finishes_as_truncated(chat: ChatTokenizer) -> None:
    played = await play(chat, [], [], before=sampled([40] * 4, [0.0] * 4, V), max_new_tokens=4)
    assert played.engine.requests == []
    assert isinstance(played.end, Finish)
    assert played.end.stop_reason == "length"


async def test_an_environment_that_breaks_fails_the_attempt_and_allows_another(chat: ChatTokenizer) -> None:
    played = await play(chat, [([40, chat.eos_ids[0]], StopReason.STOP)], [EnvironmentFailed("tool is down")])
    assert isinstance(played.end, Fail)
    assert "tool is down" in played.end.error
    assert played.end.backoff_ms == 2 * BACKOFF_MS


async def test_an_engine_that_dies_is_a_death_and_no_failed_attempt(chat: ChatTokenizer) -> None:
    played = await play(chat, [], [])
    assert isinstance(played.end, Die)
    assert played.end == Die(played.end.id, 4, "engine: it died")


async def test_an_environment_that_takes_too_long_fails_the_attempt_and_allows_another(chat: ChatTokenizer) -> None:
    played = await play(chat, [([40, chat.eos_ids[0]], StopReason.STOP)], [Done()], wait_s=60, tool_timeout_s=0.05)
    assert isinstance(played.end, Fail)
    assert played.end.error == "environment: no answer within 0.05 s"
    assert played.end.backoff_ms


async def test_a_deadline_is_final(chat: ChatTokenizer) -> None:
    turn = ([40, chat.eos_ids[0]], StopReason.STOP)
    played = await play(chat, [turn], [Done()], wait_s=5.0, deadline_s=0.05)
    assert isinstance(played.end, Fail)
    assert "deadline" in played.end.error
    assert played.end.backoff_ms is None


async def test_a_full_context_ends_the_trajectory(chat: ChatTokenizer) -> None:
    before = join(sampled([40, chat.eos_ids[0]], [0.0, 0.0], V), observed([50] * 200, V))
    played = await play(chat, [], [], before=before, max_new_tokens=1000)
    assert isinstance(played.end, Finish)
    assert played.end.stop_reason == "context"


async def test_an_engine_that_cannot_be_loaded_is_a_death_with_its_reason(chat: ChatTokenizer) -> None:
    played = await play(chat, [], [], broken=True)
    assert isinstance(played.end, Die)
    assert "can't be loaded" in played.end.error


@pytest.mark.parametrize("answer", [None, "text", Observation(["text"])])  # type: ignore[list-item]  # a user's mistakes
async def test_whatever_an_environment_returns_is_its_failure(chat: ChatTokenizer, answer: Any) -> None:
    played = await play(chat, [([40, chat.eos_ids[0]], StopReason.STOP)], [answer], max_turns=2)
    assert isinstance(played.end, Fail)
    assert played.end.error.startswith("environment: AttributeError")
    assert played.end.backoff_ms


def after_its_first_turn(chat: ChatTokenizer, environment: FakeEnvironment, commits: GroupCommit) -> Trajectory:
    """A trajectory that is about to ask the environment."""
    tokens = sampled([40, chat.eos_ids[0]], [-1.0, -1.0], V)
    claim = Claim(spec_of(TrajectoryId("job", 0, 0), max_turns=2), 1, failures=0, deaths=0, alone=False, tokens=tokens)
    return Trajectory(claim, Tools(job(max_turns=2), FakeEngine([]), chat, environment, commits))


async def test_one_that_is_lost_ends_wherever_it_is_and_writes_nothing(chat: ChatTokenizer) -> None:
    environment, store = FakeEnvironment([Done()], wait_s=60), FakeStore()
    trajectory = after_its_first_turn(chat, environment, GroupCommit(store))  # type: ignore[arg-type]  # a fake store
    running = asyncio.create_task(trajectory.run())
    while not environment.heard:
        await asyncio.sleep(0)
    trajectory.lose("moved")
    with pytest.raises(Lost, match="moved"):
        await running
    assert store.writes == []


async def test_one_whose_lease_was_refused_because_it_has_just_ended_is_not_lost(chat: ChatTokenizer) -> None:
    store = FakeStore()
    commits = GroupCommit(store)  # type: ignore[arg-type]  # a fake store
    trajectory = after_its_first_turn(chat, FakeEnvironment([Done()]), commits)
    running = asyncio.create_task(trajectory.run())
    await asyncio.sleep(0.01)  # its end waits to be written
    trajectory.lease_refused("state finished")
    committing = asyncio.create_task(commits.run())
    await running
    committing.cancel()
    assert isinstance(store.writes[-1], Finish)


@pytest.mark.parametrize("error", [KeyError("tool"), TimeoutError("slow"), ValueError("odd")])
async def test_whatever_an_environment_raises_is_its_failure(chat: ChatTokenizer, error: Exception) -> None:
    played = await play(chat, [([40, chat.eos_ids[0]], StopReason.STOP)], [error])
    assert isinstance(played.end, Fail)
    assert type(error).__name__ in played.end.error
    assert played.end.backoff_ms
