"""Built-in scorers, and choosing one from a job's reward section."""

import sys
from typing import Any

import pytest

from libs.common.errors import JobFileError
from libs.common.sections import RewardSection
from libs.rewards.resolve import resolve
from libs.rewards.scorers import exact, gsm8k, last_number, math_verify, reasoning_gym


@pytest.mark.parametrize("text", ["It is 1000", "1,000.", "7, so $1,000", "x = 1000.0"])
def test_last_number_right(text: str) -> None:
    assert last_number.score(text, "1,000", {}).reward == 1


def test_last_number_wrong_with_reasons() -> None:
    assert last_number.score("2", "2 2/3", {}).reason == "2 isn't 8/3"
    assert last_number.score("no idea", "2", {}).reason == "no number in the completion"
    assert last_number.score("0.5", "50%", {}).reward == 0


def test_last_number_tolerance_is_absolute() -> None:
    assert last_number.score("0.33", "1/3", {}).reward == 0
    assert last_number.score("0.33", "1/3", {}, tolerance=0.01).reward == 1
    assert last_number.score("0.31", "1/3", {}, tolerance=0.01).reward == 0


def test_exact() -> None:
    assert exact.score(" Blue \n", "Blue", {}).reward == 1
    assert exact.score("blue", "Blue", {}).reward == 0
    assert exact.score("blue", "Blue", {}, ignore_case=True).reward == 1
    assert exact.score("I think.\nAnswer: New  York\nBye", "New York", {}, marker="Answer:").reward == 1
    assert exact.score("New York", "New York", {}, marker="Answer:").reason == "no 'Answer:' in the completion"


@pytest.mark.parametrize("answer", ["42", "4 * 10 = 40\n40 + 2 = 42\n#### 42", "#### $42", "####42", "#### 42."])
def test_gsm8k_right(answer: str) -> None:
    assert gsm8k.score("Take 7.\n#### 42", answer, {}).reward == 1


def test_gsm8k_wrong_or_unmarked() -> None:
    assert gsm8k.score("#### 42\n#### 41", "42", {}).reward == 0
    assert gsm8k.score("It is 42", "42", {}).reason == "no #### in the completion"
    assert gsm8k.score("It is 42", "42", {}, require_marker=False).reward == 1
    assert gsm8k.score("42 ####", "42", {}).reason == "no number after ####"
    assert gsm8k.score("#### −3", "#### -3", {}).reward == 1


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{3}", 0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1),
        (r"\boxed{1} no: \boxed{2}", "2", 1),
        (r"\boxed{1} no: \boxed{2}", "1", 0),
        (r"\boxed{2}", "2 2/3", 0),
        (r"\boxed{2 2/3}", r"\frac{8}{3}", 1),
        (r"\boxed{50\%}", "0.5", 0),
        (r"\boxed{50\%}", "50", 1),
        (r"\boxed{(3, \pi/2)}", r"\left( 3, \frac{\pi}{2} \right)", 1),
        (r"\boxed{(3, \pi/3)}", r"\left( 3, \frac{\pi}{2} \right)", 0),
        (r"\boxed{q - p}", "-p + q", 1),
        (r"\boxed{\sqrt{8}}", r"$2\sqrt{2}$", 1),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1),
        ("so the answer is $7$", "7", 1),
        (r"\boxed{}", "5", 0),
        ("", "5", 0),
    ],
)
def test_math_verify(completion: str, answer: str, reward: float) -> None:
    pytest.importorskip("math_verify", reason="math-verify isn't installed")
    assert math_verify.score(completion, answer, {}).reward == reward


def test_math_verify_can_insist_on_a_box() -> None:
    assert math_verify.score("$7$", "7", {}, require_boxed=True).reason == r"no \boxed{} in the completion"


def test_a_reference_that_is_no_number_is_not_the_completions_fault() -> None:
    for score in (last_number.score, gsm8k.score):
        with pytest.raises(ValueError, match="isn't one number"):
            score("3", "three", {})
    with pytest.raises(ValueError, match='set extract to "marker" or "whole"'):
        reasoning_gym.score("3", "three", {})


def test_reasoning_gym_without_an_answer_is_wrong_before_the_task_is_needed() -> None:
    assert reasoning_gym.score("none", "45", {}).reason == "no number in the completion"
    assert reasoning_gym.score("yes", "yes", {}, extract="marker").reason == "no 'Answer:' in the completion"


@pytest.mark.parametrize("name", ["exact", "gsm8k", "last_number", "math_verify", "reasoning_gym"])
def test_built_in_scorers_resolve_without_their_libraries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("math_verify", "reasoning_gym"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    scorer = resolve(RewardSection(function=name))
    assert scorer.target == f"libs.rewards.scorers.{name}:score"
    assert not {"math_verify", "reasoning_gym"} & set(sys.modules)


def test_an_unknown_scorer_is_named_with_what_exists() -> None:
    with pytest.raises(
        JobFileError, match=r"did you mean 'gsm8k'\? Built in: exact, gsm8k, last_number, math_verify"
    ) as caught:
        resolve(RewardSection(function="gms8k"), file="a.toml")
    assert (caught.value.file, caught.value.key) == ("a.toml", "reward.function")


@pytest.mark.parametrize("entry", ["mine.rewards:length", "mine.*", "mine.rewards.*"])
def test_allowed_user_functions(entry: str) -> None:
    section = RewardSection(function="mine.rewards:length", args={"target": 5})
    scorer = resolve(section, allow=["other:f", entry], folders=["plugins"])
    assert (scorer.target, scorer.args, scorer.folders) == ("mine.rewards:length", {"target": 5}, ("plugins",))


@pytest.mark.parametrize("entry", ["mine.rewards:other", "mine.rewards", "min.*", "mine.rewards.length.*", "*", ""])
def test_other_user_functions_are_refused(entry: str) -> None:
    with pytest.raises(JobFileError, match="isn't on this node's allow-list") as caught:
        resolve(RewardSection(function="mine.rewards:length"), allow=[entry])
    assert caught.value.key == "reward.function"


@pytest.mark.parametrize(
    ("function", "args", "key", "expected"),
    [
        ("last_number", {"tolerence": 1}, "reward.args.tolerence", "last_number takes tolerance"),
        ("last_number", {"tolerance": "much"}, "reward.args.tolerance", "Expected `float`"),
        ("last_number", {"tolerance": -1.0}, "reward.args.tolerance", ">= 0"),
        ("reasoning_gym", {"extract": "first"}, "reward.args.extract", "Invalid enum value 'first'"),
        ("last_number", {"row": {}}, "reward.args.row", "unknown argument"),
    ],
)
def test_arguments_are_checked_up_front(function: str, args: dict[str, Any], key: str, expected: str) -> None:
    with pytest.raises(JobFileError, match=expected) as caught:
        resolve(RewardSection(function=function, args=args))
    assert caught.value.key == key


def test_good_arguments_are_converted() -> None:
    assert resolve(RewardSection(function="last_number", args={"tolerance": 1})).args == {"tolerance": 1.0}


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libs.rewards.resolve.importlib.util.find_spec", lambda name: None)
    with pytest.raises(JobFileError, match="needs the package math-verify"):
        resolve(RewardSection(function="math_verify"))
