"""When new tokens leave the engine process: never later than the job's settings say."""

import pytest

from libs.common.tokens import PolicyVersion
from services.rollout import engine_process, wire
from services.rollout.engine import NewToken, StopReason

STEP_S = 0.2


class Sent:
    """The service's end of the socket, under a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.sizes: list[int] = []
        monkeypatch.setattr(engine_process.time, "monotonic", lambda: self.now)

    def send(self, message: wire.FromEngine) -> None:
        assert isinstance(message, wire.Progress)
        self.sizes.append(len(message.segments[0].ids))


def steps(sent: Sent, count: int, *, flush_tokens: int, flush_s: float, stopped: StopReason | None = None) -> None:
    outbox = engine_process.Outbox(
        sent,  # type: ignore[arg-type]  # all that it needs of a parent
        flush_tokens=flush_tokens,
        flush_s=flush_s,
        version=PolicyVersion(0),
    )
    for number in range(count):
        sent.now += STEP_S
        outbox.take([NewToken("a", number, -1.0, stopped if number == count - 1 else None)])


def test_tokens_leave_before_the_step_in_which_they_would_have_waited_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(monkeypatch)
    steps(sent, 6, flush_tokens=100, flush_s=0.5)
    assert sent.sizes == [2, 2, 2]  # 0.4 s; with a third step it would be 0.6 s


def test_tokens_leave_when_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(monkeypatch)
    steps(sent, 7, flush_tokens=3, flush_s=100.0)
    assert sent.sizes == [3, 3]


def test_the_end_of_a_turn_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(monkeypatch)
    steps(sent, 2, flush_tokens=100, flush_s=100.0, stopped=StopReason.STOP)
    assert sent.sizes == [2]
