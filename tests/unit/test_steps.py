"""The step's ledger: what is waited for, what is replaced, when a step is complete."""

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.steps import StepLedger, is_evaluation_step


def ledger_of(groups: int, *, samples: int = 4, replacements: int = 8) -> StepLedger:
    ledger = StepLedger(step=0, replacements=replacements)
    for group in range(groups):
        ledger.issue(group, purpose="train", samples=samples)
    return ledger


def test_complete_only_when_every_sample_is_settled() -> None:
    ledger = ledger_of(2, samples=2)
    for group, sample in [(0, 0), (0, 1), (1, 0)]:
        ledger.settle(group, sample, "scored")
    assert not ledger.complete
    assert ledger.missing() == [(1, 1)]
    ledger.settle(1, 1, "failed")
    assert ledger.complete
    assert ledger.counts == (4, 4)


def test_settling_twice_keeps_the_first_word() -> None:
    ledger = ledger_of(1, samples=2)
    ledger.settle(0, 0, "scored")
    ledger.settle(0, 0, "failed")
    ledger.settle(0, 1, "scored")
    assert ledger.valid_groups() == [0]


def test_word_of_unknown_samples_changes_nothing() -> None:
    ledger = ledger_of(1, samples=2)
    ledger.settle(7, 0, "scored")
    ledger.settle(0, 9, "scored")
    assert ledger.counts == (0, 2)


def test_a_group_with_one_valid_sample_is_replaced_once() -> None:
    ledger = ledger_of(2, samples=3)
    for sample, state in enumerate(["scored", "failed", "failed"]):
        ledger.settle(0, sample, state)  # type: ignore[arg-type]
    for sample in range(3):
        ledger.settle(1, sample, "scored")
    assert ledger.take_replaceable() == 1
    assert ledger.take_replaceable() == 0
    assert ledger.valid_groups() == [1]


def test_replacing_ends_when_a_whole_step_was_tried_twice() -> None:
    ledger = ledger_of(2, samples=2, replacements=2)
    next_group = 2
    for _ in range(5):
        for group, sample in ledger.missing():
            ledger.settle(group, sample, "failed")
        for _ in range(ledger.take_replaceable()):
            ledger.issue(next_group, purpose="train", samples=2)
            next_group += 1
    assert next_group == 4  # two more groups, then no more
    assert ledger.complete
    assert ledger.valid_groups() == []


def test_evaluation_groups_are_never_replaced_nor_trained() -> None:
    ledger = StepLedger(step=0, replacements=4)
    ledger.issue(0, purpose="eval", samples=1)
    ledger.settle(0, 0, "failed")
    assert ledger.complete
    assert ledger.take_replaceable() == 0
    assert ledger.valid_groups() == []
    assert ledger.present() == [(0, 0)]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.sampled_from(["scored", "failed"])), max_size=200))
def test_any_order_of_words_ends_in_the_same_place(words: list[tuple[int, int, str]]) -> None:
    first: dict[tuple[int, int], str] = {}
    ledger = ledger_of(5)
    for group, sample, state in words:
        first.setdefault((group, sample), state)
        ledger.settle(group, sample, state)  # type: ignore[arg-type]
    assert set(ledger.missing()) == {(g, s) for g in range(5) for s in range(4)} - set(first)
    valid = [g for g in range(5) if all((g, s) in first for s in range(4))]
    valid = [g for g in valid if sum(first[g, s] == "scored" for s in range(4)) >= 2]
    assert ledger.valid_groups() == valid


def test_first_last_and_every_nth_policy_are_evaluated() -> None:
    assert [step for step in range(26) if is_evaluation_step(step, every=10, steps=25)] == [0, 10, 20, 25]
