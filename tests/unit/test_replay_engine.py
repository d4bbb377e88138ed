"""The replay engine: lengths, speeds, resume, and the contract of every engine."""

import msgspec
import pytest

from libs.common.errors import ModelError
from libs.common.lengths import ListedLengths, LogNormalLengths, drawn_length
from libs.common.replay import ReplayedRollout
from libs.common.tokens import PolicyVersion
from services.rollout.engine import Engine, NewToken, StepReport, StopReason, TurnRequest
from services.rollout.replay_engine import ReplayEngine

PROMPT = (1, 2, 3, 4)


def request(
    key: str, *, seed: int = 0, token_ids: tuple[int, ...] = (), budget: int = 10_000, turn_start: int = 0
) -> TurnRequest:
    return TurnRequest(
        key=key,
        prompt_ids=PROMPT,
        token_ids=token_ids,
        turn_start=turn_start,
        max_new_tokens=budget,
        temperature=1.0,
        seed=seed,
        stop_token_ids=(0,),
    )


def play(engine: Engine) -> dict[str, list[NewToken]]:
    tokens: dict[str, list[NewToken]] = {}
    while engine.busy():
        for token in engine.step().new:
            tokens.setdefault(token.key, []).append(token)
    return tokens


def engine(max_running: int = 8, **settings: object) -> ReplayEngine:
    return ReplayEngine(msgspec.convert(settings, ReplayedRollout), max_running=max_running)


def test_a_turn_has_the_length_that_its_seed_drew_and_ends_with_a_stop_token() -> None:
    played = engine()
    requests = [request(f"t{seed}", seed=seed) for seed in range(20)]
    played.add(requests)
    tokens = play(played)
    for each in requests:
        assert len(tokens[each.key]) == drawn_length(LogNormalLengths(), seed=each.seed, turn_start=0)
        assert tokens[each.key][-1].stopped is StopReason.STOP
        assert [token.token_id == 0 for token in tokens[each.key]] == [False] * (len(tokens[each.key]) - 1) + [True]


@pytest.mark.parametrize("seam", [1, 7, 30])
def test_a_resumed_turn_continues_as_the_uninterrupted_one(seam: int) -> None:
    settings = {"lengths": {"kind": "uniform", "low": 40, "high": 60}}
    whole = engine(**settings)
    whole.add([request("a", seed=11)])
    ids = tuple(token.token_id for token in play(whole)["a"])
    other = engine(**settings)
    other.add([request("b", seed=4), request("a", seed=11, token_ids=ids[:seam])])
    assert tuple(token.token_id for token in play(other)["a"]) == ids[seam:]


def test_budget_and_context_cut_a_turn_with_their_reasons() -> None:
    settings = ReplayedRollout(lengths=ListedLengths((50,)))
    cut = ReplayEngine(settings, max_running=8, max_context=len(PROMPT) + 20)
    cut.add([request("budget", budget=5), request("context")])
    tokens = play(cut)
    assert (len(tokens["budget"]), tokens["budget"][-1].stopped) == (5, StopReason.LENGTH)
    assert (len(tokens["context"]), tokens["context"][-1].stopped) == (20, StopReason.CONTEXT)
    with pytest.raises(ModelError, match="context window"):
        cut.add([request("long", token_ids=(1,) * 20)])


def test_a_step_lasts_what_the_speeds_say() -> None:
    slept: list[float] = []
    settings = ReplayedRollout(
        lengths=ListedLengths((3,)), prefill_tokens_per_s=1000, decode_ms=10, decode_ms_per_sequence=2
    )
    timed = ReplayEngine(settings, max_running=8, sleep=slept.append)
    timed.add([request("a"), request("b", seed=1)])
    play(timed)
    assert slept == pytest.approx([0.008, 0.014, 0.014])


def test_without_speeds_no_time_passes() -> None:
    slept: list[float] = []
    instant = ReplayEngine(ReplayedRollout(), max_running=8, sleep=slept.append)
    instant.add([request("a")])
    play(instant)
    assert slept == []


def test_threads_speed_up_a_step_up_to_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1})
    slept: list[float] = []
    settings = ReplayedRollout(prefill_tokens_per_s=1000, thread_speedup=(1.0, 1.6, 2.0))
    timed = ReplayEngine(settings, max_running=8, threads=1, sleep=slept.append)
    for threads, key in [(1, "a"), (2, "b"), (3, "c")]:
        timed.set_threads(threads)
        timed.add([request(key)])
        timed.step()
        timed.drop([key])
    assert slept == pytest.approx([0.004, 0.004 / 1.6, 0.004 / 1.6])


def test_the_report_counts_the_work() -> None:
    counted = engine(max_running=2, lengths={"kind": "list", "tokens": [3]}, kv_tokens=100)
    counted.add([request("a"), request("b"), request("c")])
    first, second = counted.step(), counted.step()
    assert (first.prefill_tokens, first.decode_tokens, first.running, first.waiting) == (8, 0, 2, 1)
    assert (second.prefill_tokens, second.decode_tokens, second.running, second.waiting) == (0, 2, 2, 1)
    assert second.kv_used == pytest.approx(0.10)


def test_long_prompts_are_filled_over_several_steps() -> None:
    chunked = engine(batched_tokens=3)
    chunked.add([request("a")])
    first, second = chunked.step(), chunked.step()
    assert (first.prefill_tokens, len(first.new)) == (3, 0)
    assert (second.prefill_tokens, len(second.new)) == (1, 1)


def test_dropped_turns_are_gone_and_their_place_is_free() -> None:
    dropping = engine(max_running=1)
    dropping.add([request("a"), request("b")])
    dropping.step()
    dropping.drop(["a", "unknown"])
    report: StepReport = dropping.step()
    assert [token.key for token in report.new] == ["b"]
    dropping.load_policy(PolicyVersion(1), "anywhere")
    dropping.close()
    assert not dropping.busy()
