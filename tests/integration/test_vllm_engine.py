"""The vLLM engine with a tiny fp32 model: resume, log-probs, stop strings, policies, and what a step reports."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from libs.common.errors import ModelError
from libs.common.tokens import PolicyVersion
from services.rollout.engine import NewToken, StepReport, StopReason, TurnRequest
from services.rollout.stopping import StopWatch
from services.rollout.vllm_engine import VllmEngine, engine_environment
from tests.tiny_model import CONTEXT, VOCAB, build_tiny_model

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(180)]  # vLLM and its imports warn a lot

PROMPT = (100, 200, 300, 50, 60, 70)
MAX_RUNNING = 8
versions = count(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {seed: build_tiny_model(tmp_path_factory.mktemp(f"tiny{seed}"), seed=seed) for seed in (0, 1)}


@pytest.fixture(scope="module")
def loaded(models: dict[int, Path]) -> Iterator[VllmEngine]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environment(1).items():
            patch.setenv(name, value)
        engine = VllmEngine(str(models[0]), max_running=MAX_RUNNING, kv_memory_mb=8, dtype="float32")
        yield engine
        engine.close()


@pytest.fixture
def engine(loaded: VllmEngine, models: dict[int, Path]) -> VllmEngine:
    """The engine, empty, with the first model's weights and no usable prefix cache."""
    loaded.load_policy(PolicyVersion(next(versions)), str(models[0]))
    return loaded


def turn(key: str, **changes: Any) -> TurnRequest:
    defaults: dict[str, Any] = {
        "prompt_ids": PROMPT,
        "token_ids": (),
        "turn_start": 0,
        "max_new_tokens": 40,
        "temperature": 1.0,
        "seed": 7,
    }
    return TurnRequest(key=key, **(defaults | changes))


def generate(engine: VllmEngine, *requests: TurnRequest) -> dict[str, list[NewToken]]:
    engine.add(requests)
    tokens: dict[str, list[NewToken]] = {request.key: [] for request in requests}
    while engine.busy():
        for token in engine.step().new:
            tokens[token.key].append(token)
    return tokens


def ids(tokens: Sequence[NewToken]) -> tuple[int, ...]:
    return tuple(token.token_id for token in tokens)


def logprobs(tokens: Sequence[NewToken]) -> list[float]:
    return [token.logprob for token in tokens]


def reference_logprobs(model: Path, sampled: Sequence[int], *, temperature: float = 1.0) -> list[float]:
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits_TV = policy(torch.tensor([[*PROMPT, *sampled]])).logits[0, len(PROMPT) - 1 : -1]
    logprobs_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    return [float(logprobs_V[token]) for logprobs_V, token in zip(logprobs_TV, sampled, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_agree_with_transformers(engine: VllmEngine, models: dict[int, Path], temperature: float) -> None:
    tokens = generate(engine, turn("a", temperature=temperature), turn("b", seed=8))["a"]
    assert logprobs(tokens) == pytest.approx(reference_logprobs(models[0], ids(tokens), temperature=temperature), abs=1e-4)


def test_greedy_is_the_argmax_with_the_logprob_of_temperature_1(engine: VllmEngine, models: dict[int, Path]) -> None:
    tokens = generate(engine, turn("a", temperature=0.0))["a"]
    assert logprobs(tokens) == pytest.approx(reference_logprobs(models[0], ids(tokens)), abs=1e-4)
    assert ids(generate(engine, turn("a", temperature=0.0, seed=99))["a"]) == ids(tokens)
    assert ids(tokens) != ids(generate(engine, turn("a", temperature=1.0))["a"])


@pytest.mark.parametrize("seam", [1, 2, 17, 39])
def test_a_resumed_turn_equals_the_uninterrupted_one(engine: VllmEngine, models: dict[int, Path], seam: int) -> None:
    whole = generate(engine, turn("whole"))["whole"]
    engine.load_policy(PolicyVersion(next(versions)), str(models[0]))  # so that its KV cache must be computed again
    others = [turn(f"other{i}", seed=i, prompt_ids=PROMPT[:i], max_new_tokens=20) for i in range(1, 6)]
    resumed = turn("resumed", token_ids=ids(whole[:seam]), max_new_tokens=40 - seam)
    rest = generate(engine, *others[:3], resumed, *others[3:])["resumed"]
    assert ids(rest) == ids(whole[seam:])
    assert logprobs(rest) == pytest.approx(logprobs(whole[seam:]), abs=1e-4)


def test_a_preempted_turn_equals_an_undisturbed_one(engine: VllmEngine, models: dict[int, Path]) -> None:
    """Eight sequences of 700 tokens need more KV cache than there is, so that vLLM preempts and computes again."""
    requests = [turn(f"t{seed}", seed=seed, max_new_tokens=700) for seed in range(MAX_RUNNING)]
    engine.add(requests)
    tokens: dict[str, list[NewToken]] = {request.key: [] for request in requests}
    recomputed = 0
    while engine.busy():
        report = engine.step()
        recomputed += report.prefill_tokens
        for token in report.new:
            tokens[token.key].append(token)
    assert recomputed > 2 * MAX_RUNNING * len(PROMPT)
    for key in ("t0", "t7"):
        assert logprobs(tokens[key]) == pytest.approx(reference_logprobs(models[0], ids(tokens[key])), abs=2e-4)
        alone = generate(engine, next(request for request in requests if request.key == key))[key]
        assert ids(alone) == ids(tokens[key])


def test_the_context_window_ends_a_turn(engine: VllmEngine) -> None:
    nearly_full = tuple(i % VOCAB for i in range(CONTEXT - len(PROMPT) - 5))
    tokens = generate(engine, turn("a", token_ids=nearly_full))["a"]
    assert (len(tokens), tokens[-1].stopped) == (5, StopReason.CONTEXT)
    with pytest.raises(ModelError, match="context window"):
        engine.add([turn("fits"), turn("long", token_ids=(*nearly_full, 1, 2, 3, 4, 5))])
    assert not engine.busy()


def test_the_budget_ends_a_turn(engine: VllmEngine) -> None:
    tokens = generate(engine, turn("a", max_new_tokens=3))["a"]
    assert [token.stopped for token in tokens] == [None, None, StopReason.LENGTH]


def test_a_stop_token_ends_a_turn_and_is_kept(engine: VllmEngine) -> None:
    free = ids(generate(engine, turn("a"))["a"])
    stop = free[9]
    tokens = generate(engine, turn("a", stop_token_ids=(stop,)))["a"]
    assert ids(tokens) == free[: free.index(stop) + 1]
    assert tokens[-1].stopped is StopReason.STOP


def test_a_stop_string_ends_a_turn_with_the_token_that_completes_it(engine: VllmEngine, models: dict[int, Path]) -> None:
    tokenizer = Tokenizer.from_file(str(models[0] / "tokenizer.json"))
    free = ids(generate(engine, turn("a"))["a"])
    texts = [tokenizer.decode(list(free[: n + 1]), skip_special_tokens=False) for n in range(len(free))]
    start = next(
        n for n in range(12, 30) if "\ufffd" not in texts[n][len(texts[n - 3]) :] and len(texts[n]) > len(texts[n - 2])
    )
    stop = texts[start][len(texts[start - 2]) - 1 :]  # spans a seam between tokens
    end = next(n for n, text in enumerate(texts) if stop in text)
    tokens = generate(engine, turn("a", stop=("never to be seen", stop)), turn("b", seed=1))["a"]
    assert ids(tokens) == free[: end + 1]
    assert tokens[-1].stopped is StopReason.STOP
    resumed = generate(engine, turn("a", token_ids=free[:end], max_new_tokens=40 - end, stop=(stop,)))["a"]
    assert ids(resumed) == free[end : end + 1]
    assert resumed[-1].stopped is StopReason.STOP


def test_a_new_policy_is_in_force_at_once_and_old_prefixes_are_not_used(engine: VllmEngine, models: dict[int, Path]) -> None:
    long_prompt = turn("a", token_ids=tuple(i % 500 for i in range(300)), max_new_tokens=10)
    before = generate(engine, long_prompt)["a"]
    engine.load_policy(PolicyVersion(next(versions)), str(models[1]))
    after = generate(engine, long_prompt)["a"]
    for model, tokens in ((models[0], before), (models[1], after)):
        expected = reference_logprobs(model, (*long_prompt.token_ids, *ids(tokens)))[300:]
        assert logprobs(tokens) == pytest.approx(expected, abs=1e-4)


def test_a_prefix_is_computed_once_per_policy(engine: VllmEngine, models: dict[int, Path]) -> None:
    long_prompt = turn("a", token_ids=tuple(i % 500 for i in range(300)), max_new_tokens=1)

    def prefilled() -> int:
        engine.add([long_prompt])
        return engine.step().prefill_tokens

    first, second = prefilled(), prefilled()
    engine.load_policy(PolicyVersion(next(versions)), str(models[0]))
    assert first == len(PROMPT) + 300
    assert second < first / 2
    assert prefilled() == first


def test_a_policy_that_is_not_there_is_refused(engine: VllmEngine, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no safetensors of policy 5\.1"):
        engine.load_policy(PolicyVersion(5, 1), str(tmp_path))


def test_dropped_turns_free_their_blocks_at_once(engine: VllmEngine) -> None:
    engine.add([turn(f"t{i}", seed=i, token_ids=tuple(range(200))) for i in range(MAX_RUNNING)])
    full = engine.step()
    engine.drop([f"t{i}" for i in range(1, MAX_RUNNING)] + ["unknown"])
    one = engine.step()
    assert [token.key for token in one.new] == ["t0"]
    assert one.kv_used < full.kv_used / 2
    engine.drop(["t0"])
    assert not engine.busy()
    assert engine.step() == StepReport(new=[], prefill_tokens=0, decode_tokens=0, running=0, waiting=0, kv_used=0.0)


def test_a_key_comes_back_with_its_next_turn(engine: VllmEngine) -> None:
    first = generate(engine, turn("a", max_new_tokens=5))["a"]
    observed = (*ids(first), 11, 12)
    assert len(generate(engine, turn("a", token_ids=observed, turn_start=7, max_new_tokens=5))["a"]) == 5
    engine.add([turn("a")])
    with pytest.raises(ModelError, match="already has a turn"):
        engine.add([turn("a")])
    engine.drop(["a"])


def test_the_report_counts_the_work(engine: VllmEngine) -> None:
    engine.add([turn(f"t{i}", seed=i, prompt_ids=(i, *PROMPT)) for i in range(MAX_RUNNING + 2)])
    first, second = engine.step(), engine.step()
    assert (first.prefill_tokens, first.decode_tokens) == (MAX_RUNNING * (len(PROMPT) + 1), 0)
    assert (second.prefill_tokens, second.decode_tokens) == (0, MAX_RUNNING)
    assert (second.running, second.waiting, len(second.new)) == (MAX_RUNNING, 2, MAX_RUNNING)
    assert 0 < second.kv_used <= 1
    engine.drop([f"t{i}" for i in range(MAX_RUNNING + 2)])


def test_threads_can_be_changed_and_never_exceed_the_cores(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1})
    engine.set_threads(2)
    assert torch.get_num_threads() == 2
    engine.set_threads(64)
    assert torch.get_num_threads() == 2
    engine.set_threads(1)
    assert torch.get_num_threads() == 1


def test_a_broken_model_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in engine_environment(1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelError, match="vLLM can't load it"):
        VllmEngine(str(tmp_path / "nowhere"), max_running=1, kv_memory_mb=16)


def test_the_parent_can_ask_for_the_environment_without_torch_or_vllm() -> None:
    program = (
        "import sys; from services.rollout.vllm_engine import engine_environment; "
        "assert engine_environment(2)['OMP_NUM_THREADS'] == '2'; print({'torch', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("text", ["one</answer>two", "é</ansé</answer>", "</answer>", " </answer >"])
@pytest.mark.parametrize("special", [False, True])
def test_stop_watch_finds_what_the_whole_text_holds(models: dict[int, Path], text: str, special: bool) -> None:
    tokenizer = Tokenizer.from_file(str(models[0] / "tokenizer.json"))
    turn_ids = [tokenizer.token_to_id("<|user|>")] * special + tokenizer.encode(text).ids
    watch = StopWatch(tokenizer, ["</answer>"])
    seen = [watch.completes(token_id) for token_id in turn_ids]
    whole = ["</answer>" in tokenizer.decode(turn_ids[: n + 1], skip_special_tokens=False) for n in range(len(turn_ids))]
    first = whole.index(True) if True in whole else None
    assert (seen.index(True) if True in seen else None) == first


def test_text_before_the_turn_does_not_stop_it_but_its_own_earlier_tokens_count(models: dict[int, Path]) -> None:
    tokenizer = Tokenizer.from_file(str(models[0] / "tokenizer.json"))
    left, right = tokenizer.encode("ab</ans").ids, tokenizer.encode("wer>").ids
    for start, stops in ((0, True), (len(left), False)):
        watch = StopWatch(tokenizer, ["</answer>"], (*left, *right[:-1])[start:])
        assert watch.completes(right[-1]) is stops


def test_the_tiny_model_is_small_and_the_same_every_time(models: dict[int, Path], tmp_path: Path) -> None:
    again = build_tiny_model(tmp_path / "again", seed=1)
    for file in ("model.safetensors", "tokenizer.json"):
        assert (again / file).read_bytes() == (models[1] / file).read_bytes()
    assert 0.4e6 < (again / "model.safetensors").stat().st_size / 4 < 0.5e6
    probabilities = [math.exp(value) for value in reference_logprobs(again, (1, 2, 3))]
    assert all(0 < probability < 1 for probability in probabilities)
