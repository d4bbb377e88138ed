"""Which row comes next: a deterministic order for as many epochs as a job runs, that can be left and taken up anywhere.

Invariants: every epoch has each row exactly once; a batch that an epoch's end cuts goes on in the next epoch; what comes
after a position depends on nothing but (position, rows, seed, shuffle). At most one epoch's order is in memory.
"""

import random
from typing import Self

import msgspec

from libs.common.errors import JigsawError


class CursorState(msgspec.Struct, frozen=True):
    """Where a cursor stands, as a checkpoint keeps it.

    Attributes:
        position: rows given out since the start of the job, over all epochs.
        rows: size of the dataset. seed, shuffle: what made the order.
    """

    position: int
    rows: int
    seed: int
    shuffle: bool

    @property
    def epoch(self) -> int:
        """Whole epochs behind this position."""
        return self.position // self.rows


class Cursor:
    """Gives out row indexes.

    Args:
        rows: size of the dataset, at least 1.
        seed: of the orders; each epoch has its own.
        shuffle: False gives the dataset's order in every epoch.

    Raises:
        ValueError: there are no rows.
    """

    def __init__(self, *, rows: int, seed: int, shuffle: bool = True) -> None:
        if rows < 1:
            raise ValueError("a cursor needs at least one row")
        self._rows, self._seed, self._shuffle = rows, seed, shuffle
        self._position = 0
        self._order_epoch, self._order = -1, list[int]()

    @classmethod
    def resume(cls, state: CursorState, *, rows: int) -> Self:
        """A cursor that goes on exactly where ``state`` was taken, over a dataset that now has ``rows`` rows.

        Raises:
            JigsawError: the dataset has changed size, so that its order can't be continued.
        """
        if rows != state.rows:
            raise JigsawError(f"the dataset had {state.rows} rows when the checkpoint was made and has {rows} now")
        cursor = cls(rows=rows, seed=state.seed, shuffle=state.shuffle)
        cursor._position = state.position
        return cursor

    def state(self) -> CursorState:
        """Where the cursor stands."""
        return CursorState(position=self._position, rows=self._rows, seed=self._seed, shuffle=self._shuffle)

    def take(self, count: int) -> list[int]:
        """The next ``count`` row indexes (0-based)."""
        taken: list[int] = []
        while len(taken) < count:
            epoch, offset = divmod(self._position, self._rows)
            part = self._epoch_order(epoch)[offset : offset + count - len(taken)]
            taken += part
            self._position += len(part)
        return taken

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order_epoch != epoch and (self._shuffle or not self._order):
            order = list(range(self._rows))
            if self._shuffle:
                # A text seed is hashed whole, so that (1, 23) and (12, 3) differ, and the same on every platform.
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = order
        self._order_epoch = epoch
        return self._order
