"""The order of rows over epochs, and taking it up again anywhere."""

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.errors import JigsawError
from libs.datasets.cursor import Cursor, CursorState


def test_four_rows_in_twos_resumed_at_step_two_of_four_give_two_more_steps() -> None:
    whole = Cursor(rows=4, seed=3)
    steps = [whole.take(2) for _ in range(4)]
    first = Cursor(rows=4, seed=3)
    before = [first.take(2) for _ in range(2)]
    resumed = Cursor.resume(msgspec.json.decode(msgspec.json.encode(first.state()), type=CursorState), rows=4)
    assert before + [resumed.take(2) for _ in range(2)] == steps
    assert resumed.state().epoch == 2


def test_epochs_differ_in_order_and_hold_every_row_once() -> None:
    cursor = Cursor(rows=50, seed=0)
    epochs = [cursor.take(50) for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(50))


def test_seeds_differ_also_where_their_digits_run_together() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        return Cursor.resume(CursorState(position=number * 50, rows=50, seed=seed, shuffle=True), rows=50).take(50)

    assert epoch(1, 23) != epoch(12, 3)
    assert epoch(1, 0) != epoch(2, 0)


def test_the_order_of_a_seed_is_the_same_in_every_version() -> None:
    assert Cursor(rows=8, seed=7).take(8) == [6, 3, 2, 1, 7, 0, 4, 5]


def test_unshuffled_is_the_datasets_order() -> None:
    assert Cursor(rows=3, seed=9, shuffle=False).take(7) == [0, 1, 2, 0, 1, 2, 0]


def test_a_batch_larger_than_the_dataset_goes_on_in_the_next_epochs() -> None:
    taken = Cursor(rows=3, seed=0).take(10)
    assert [sorted(taken[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 2]] * 3
    assert len(taken) == 10


@given(
    rows=st.integers(1, 30),
    seed=st.integers(-5, 5),
    shuffle=st.booleans(),
    counts=st.lists(st.integers(0, 40), max_size=8),
    cut=st.integers(0, 8),
)
def test_any_cuts_and_a_resume_anywhere_give_the_same_sequence(
    rows: int, seed: int, shuffle: bool, counts: list[int], cut: int
) -> None:
    whole = Cursor(rows=rows, seed=seed, shuffle=shuffle).take(sum(counts))
    cursor = Cursor(rows=rows, seed=seed, shuffle=shuffle)
    pieces: list[int] = []
    for index, count in enumerate(counts):
        if index == cut:
            cursor = Cursor.resume(cursor.state(), rows=rows)
        pieces += cursor.take(count)
    assert pieces == whole


def test_a_late_epoch_costs_no_more_than_the_first() -> None:
    start = time.monotonic()
    state = CursorState(position=10**15 + 5, rows=1000, seed=0, shuffle=True)
    assert len(Cursor.resume(state, rows=1000).take(16)) == 16
    assert time.monotonic() - start < 1


def test_a_dataset_of_another_size_and_an_empty_one_are_refused() -> None:
    with pytest.raises(JigsawError, match="had 4 rows when the checkpoint was made and has 5 now"):
        Cursor.resume(Cursor(rows=4, seed=0).state(), rows=5)
    with pytest.raises(ValueError, match="at least one row"):
        Cursor(rows=0, seed=0)
