"""The schedulers' lease by clocks that have nothing in common: nobody takes over before the leader knows that it is over."""

from hypothesis import given
from hypothesis import strategies as st

from libs.common import messages as m
from libs.common.tables import Change
from services.scheduler.leadership import GRACE_S, Sighting, Tenure

LEASE_S = 3.0
moments = st.floats(min_value=0.0, max_value=5.0)


def entry(revision: int, *, term: int = 1, held: bool = True) -> Change[m.Leadership]:
    return Change("scheduler", m.Leadership(sender="a", term=term, held=held), revision)


def test_a_lease_counts_from_before_it_was_asked_for() -> None:
    tenure = Tenure(LEASE_S)
    assert tenure.left_s(0.0) <= 0, "nobody leads by itself"
    tenure.renewed(10.0)
    assert tenure.left_s(12.5) == 0.5
    assert tenure.left_s(13.0) <= 0
    tenure.renewed(12.0)
    assert tenure.left_s(13.0) == 2.0
    tenure.end()
    assert tenure.left_s(13.0) <= 0


def test_an_answer_that_comes_after_a_freeze_renews_nothing() -> None:
    tenure = Tenure(LEASE_S)
    tenure.renewed(10.0)
    tenure.renewed(11.0)  # asked then, answered at 20
    assert tenure.left_s(20.0) <= 0


def test_a_key_that_changes_is_never_vacant() -> None:
    sighting = Sighting(LEASE_S)
    for second in range(20):
        assert sighting.see(entry(second + 1), float(second))
        assert sighting.vacant_in_s(float(second)) == LEASE_S + GRACE_S


def test_a_key_that_stands_still_is_vacant_after_a_lease() -> None:
    sighting = Sighting(LEASE_S)
    assert sighting.see(entry(7), 100.0)
    assert not sighting.see(entry(7), 102.0), "seen again, not changed"
    assert sighting.vacant_in_s(102.0) == LEASE_S + GRACE_S - 2.0
    assert sighting.vacant_in_s(103.5) == 0.0


def test_a_key_that_nobody_holds_is_vacant_at_once_and_its_term_is_remembered() -> None:
    sighting = Sighting(LEASE_S)
    assert sighting.vacant_in_s(0.0) > 0, "nothing is known yet"
    assert sighting.see(None, 5.0)
    assert (sighting.vacant_in_s(5.0), sighting.revision, sighting.term) == (0.0, 0, 0)
    sighting.see(entry(3, term=4), 6.0)
    sighting.see(entry(4, term=4, held=False), 7.0)
    assert (sighting.vacant_in_s(7.0), sighting.revision, sighting.term) == (0.0, 4, 4)


def test_late_word_of_an_older_revision_changes_nothing() -> None:
    sighting = Sighting(LEASE_S)
    sighting.see(entry(9), 1.0)
    assert not sighting.see(entry(8), 2.0)
    assert sighting.revision == 9


@given(st.lists(st.tuples(moments, moments, moments), min_size=1), st.floats(-1e6, 1e6))
def test_whoever_takes_over_does_so_after_the_leader_has_stopped(
    delays: list[tuple[float, float, float]], skew: float
) -> None:
    """However long it takes from asking to storing to seeing, and whatever the standby's clock says."""
    tenure, sighting, now = Tenure(LEASE_S), Sighting(LEASE_S), 0.0
    for revision, (to_ask, to_store, to_see) in enumerate(delays, start=1):
        asked = now + to_ask
        if revision > 1 and sighting.vacant_in_s(asked + to_store + skew) == 0.0:
            break  # taken over before it was stored, so the compare-and-set would have failed
        now = asked + to_store
        tenure.renewed(asked)
        sighting.see(entry(revision), now + to_see + skew)
        now += to_see
    taken_over = now + sighting.vacant_in_s(now + skew)
    assert tenure.left_s(taken_over) <= 1e-6 - GRACE_S + 1e-6 * abs(skew)
