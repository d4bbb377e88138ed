"""Reading from the tokens alone where a trajectory stands."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from libs.common.tokens import TOKEN, PolicyVersion, TokenArray, join, observed, sampled
from services.rollout.turns import Next, ends_turn, standing

V = PolicyVersion(0)


def made(*parts: tuple[str, int]) -> TokenArray:
    """Tokens of alternating origin: ("model", n) or ("environment", n)."""
    arrays = [sampled([1] * n, [0.0] * n, V) if who == "model" else observed([2] * n, V) for who, n in parts]
    return join(*arrays)


def test_nothing_yet_is_the_start_of_the_first_turn() -> None:
    at = standing(np.zeros(0, TOKEN), turn_ended=False, max_new_tokens=8)
    assert (at.next, at.turn_start, at.spans, at.sampled) == (Next.GENERATE, 0, [], 0)


def test_an_unfinished_turn_goes_on() -> None:
    at = standing(made(("model", 3)), turn_ended=False, max_new_tokens=8)
    assert (at.next, at.turn_start, at.spans, at.sampled) == (Next.GENERATE, 0, [(0, 3)], 3)


def test_a_finished_turn_is_the_environments() -> None:
    at = standing(made(("model", 3), ("environment", 2), ("model", 4)), turn_ended=True, max_new_tokens=8)
    assert (at.next, at.turn_start, at.spans, at.sampled) == (Next.RESPOND, 5, [(0, 3), (5, 9)], 7)


def test_after_an_observation_a_new_turn_begins() -> None:
    at = standing(made(("model", 3), ("environment", 2)), turn_ended=False, max_new_tokens=8)
    assert (at.next, at.turn_start, at.sampled) == (Next.GENERATE, 5, 3)


def test_the_budget_counts_sampled_tokens_only() -> None:
    tokens = made(("model", 4), ("environment", 100))
    assert standing(tokens, turn_ended=False, max_new_tokens=5).next is Next.GENERATE
    assert standing(tokens, turn_ended=False, max_new_tokens=4).next is Next.TRUNCATED


def test_cap_64_taken_over_at_40_leaves_24() -> None:
    at = standing(made(("model", 40)), turn_ended=False, max_new_tokens=64)
    assert at.next is Next.GENERATE
    assert 64 - at.sampled == 24


def test_a_turn_that_ended_with_its_last_token_of_budget_is_not_truncated() -> None:
    assert standing(made(("model", 4)), turn_ended=True, max_new_tokens=4).next is Next.RESPOND


def test_turns_end_by_id_or_by_string() -> None:
    assert ends_turn(2, "", stop_token_ids=[2], stop=[])
    assert ends_turn(5, "so: END", stop_token_ids=[2], stop=["END"])
    assert not ends_turn(5, "so: EN", stop_token_ids=[2], stop=["END"])


@given(st.lists(st.tuples(st.sampled_from(["model", "environment"]), st.integers(1, 6)), max_size=10))
def test_spans_cover_exactly_what_the_model_sampled(parts: list[tuple[str, int]]) -> None:
    tokens = made(*parts)
    at = standing(tokens, turn_ended=False, max_new_tokens=10_000)
    covered = {index for start, end in at.spans for index in range(start, end)}
    assert covered == {index for index, flags in enumerate(tokens["flags"]) if flags}
    assert at.sampled == len(covered)
