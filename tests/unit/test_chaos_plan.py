"""What a campaign's seed stands for."""

from collections import Counter

import pytest

from tests.chaos import plan
from tests.chaos.attack import Kind
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
