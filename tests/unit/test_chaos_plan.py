"""What a campaign's seed stands for."""

from collections import Counter

import pytest

from tests.chaos import plan
from tests.chaos.__main__ import Done, next_seed
from tests.chaos.attack import Kind
from tests.chaos.campaign import Report
from tests.chaos.plan import CELLS, planned


def test_every_kind_comes_at_every_moment_before_any_comes_again() -> None:
    cells = [(one.kind, one.moment) for one in planned(3, 2 * CELLS)]
    assert len(set(cells[:CELLS])) == CELLS
    assert set(Counter(cells).values()) == {2}


def test_a_seed_stands_for_one_order_and_another_for_another() -> None:
    assert planned(3, 50) == planned(3, CELLS)[:50]
    assert planned(3, 50) != planned(4, 50)


def test_a_new_kind_leaves_the_order_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    after = [one for one in planned(3, CELLS) if one.kind is not Kind.CANCEL]
    monkeypatch.setattr(plan, "Kind", [kind for kind in Kind if kind is not Kind.CANCEL])
    assert planned(3, len(after)) == after


@pytest.mark.parametrize(("used", "wanted", "seed"), [([], 7, 7), ([7, 8], 7, 9), ([7, 8], 3, 9), ([7, 8], 20, 20)])
def test_no_seed_is_used_twice_whatever_is_asked_for(used: list[int], wanted: int, seed: int) -> None:
    assert next_seed([Done(one, Report()) for one in used], wanted=wanted) == seed
