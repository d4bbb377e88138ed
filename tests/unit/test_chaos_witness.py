"""The witness of a chaos campaign: what it lets pass, and what it doesn't."""

import msgspec
import numpy as np

from libs.common.tokens import PolicyVersion, TokenArray, join, sampled
from libs.common.trajectory import Record, State, TrajectoryId
from tests.chaos.witness import Testimony, Witness
from tests.trajectories import spec_of

ID = TrajectoryId("job", 0, 0)
POLICY = PolicyVersion(0, 1)


def tokens(count: int, *, first: int = 0, version: PolicyVersion = POLICY) -> TokenArray:
    return sampled(list(range(first, first + count)), [-1.0] * count, version)


def record(held: TokenArray, state: State = "running") -> Record:
    return Record(spec=spec_of(ID), state=state, epoch=1, tokens=held)


def witness_of(*looks: TokenArray) -> Witness:
    """One that looked every second, from second 1 on."""
    witness = Witness()
    for second, held in enumerate(looks, start=1):
        witness.see([record(held)], asked_at=float(second))
    return witness


def test_what_only_grows_is_right_and_counted() -> None:
    witness = witness_of(tokens(0), tokens(2), tokens(2), tokens(5))
    assert not witness.broken
    assert witness.testimony == Testimony(seen=1, running=1, grown=1)


def test_what_is_seen_only_after_its_end_was_not_seen_running() -> None:
    witness = Witness()
    witness.see([record(tokens(3), "finished")], asked_at=1.0)
    assert witness.testimony == Testimony(seen=1)


def test_other_ids_than_before_are_wrong() -> None:
    assert "other tokens" in witness_of(tokens(3), join(tokens(2), tokens(2, first=9))).broken[0]


def test_less_than_before_is_wrong() -> None:
    assert "3 of them safe" in witness_of(tokens(3), tokens(2)).broken[0]


def test_another_log_prob_than_before_is_wrong() -> None:
    changed = tokens(3)
    changed["logprob"] = np.float32(-2.0)
    assert witness_of(tokens(3), changed).broken


def test_tokens_of_another_steps_policy_are_wrong() -> None:
    assert "policies" in witness_of(tokens(3, version=PolicyVersion(1, 1))).broken[0]


def test_after_a_loss_what_was_new_may_be_gone_and_grows_again() -> None:
    witness = witness_of(tokens(2), tokens(4), tokens(6))
    witness.expect_loss(written_after=2.5, now=3.5)
    witness.see([record(tokens(2))], asked_at=4.0)
    witness.see([record(join(tokens(2), tokens(6, first=2, version=PolicyVersion(0, 2))))], asked_at=5.0)
    assert not witness.broken
    assert witness.testimony.taken_back == 4


def test_after_a_loss_what_had_been_there_for_long_must_be_there_still() -> None:
    witness = witness_of(tokens(2), tokens(4), tokens(6))
    witness.expect_loss(written_after=2.5, now=3.5)
    witness.see([record(tokens(1))], asked_at=4.0)
    assert "2 of them safe" in witness.broken[0]


def test_after_a_loss_it_must_grow_again_as_it_was() -> None:
    witness = witness_of(tokens(2), tokens(4), tokens(6))
    witness.expect_loss(written_after=2.5, now=3.5)
    witness.see([record(tokens(3))], asked_at=4.0)
    assert not witness.broken
    witness.see([record(join(tokens(3), tokens(3, first=9)))], asked_at=5.0)
    assert "other tokens" in witness.broken[0]


def test_an_answer_from_before_the_loss_makes_nothing_safe() -> None:
    witness = witness_of(tokens(2))
    witness.expect_loss(written_after=1.0, now=3.0)
    witness.see([record(tokens(5))], asked_at=2.9)
    witness.see([record(tokens(0))], asked_at=4.0)
    assert not witness.broken


def test_a_loss_excuses_nothing_that_comes_after_it() -> None:
    witness = witness_of(tokens(4))
    witness.expect_loss(written_after=1.0, now=3.0)
    witness.see([record(tokens(2))], asked_at=4.0)
    witness.see([record(tokens(1))], asked_at=5.0)
    assert witness.broken


def test_a_record_of_another_trajectory_is_another_matter() -> None:
    witness = witness_of(tokens(4))
    other = msgspec.structs.replace(record(tokens(1, first=7)), spec=spec_of(TrajectoryId("job", 0, 1)))
    witness.see([other], asked_at=2.0)
    assert not witness.broken
