"""Messages on the wire: they come back as they went, neighbours of other versions understand them, strangers are refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common import messages as m
from libs.common import subjects
from libs.common.errors import MessageError
from libs.common.tokens import PolicyVersion
from tests.scheduling import job

names = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=12)
counts = st.integers(0, 2**31)
seconds = st.floats(0, 1e9)
where = {"sender": names, "job_uid": names, "step": counts, "group": counts, "sample": counts, "attempt": counts}
versions = st.builds(PolicyVersion, counts, counts)

MESSAGES = st.one_of(
    st.builds(m.CancelJob, sender=names, job_uid=names),
    st.builds(
        m.TrainingEnded,
        sender=names,
        job_uid=names,
        incarnation=counts,
        outcome=st.sampled_from(m.Outcome),
        reason=st.text(),
    ),
    st.builds(m.JobEnded, sender=names, job_uid=names, outcome=st.sampled_from(m.Outcome), ended_at=seconds),
    st.builds(m.StartRollout, policy=versions, **where),
    st.builds(m.TrajectoryFinished, **where),
    st.builds(m.TrajectorySettled, state=st.sampled_from(["scored", "failed"]), **where),
    st.builds(m.DeadLetter, sender=names, subject=names, reason=st.text(), payload=st.binary(), died_at=seconds),
    st.builds(m.SubStageEntered, sender=names, job_uid=names, step=counts, sub_stage=st.sampled_from(m.SubStage)),
    st.builds(
        m.Decision,
        sender=names,
        device=names,
        revision=counts,
        policy=names,
        reason=st.text(),
        grants=st.dictionaries(names, counts),
        decided_at=seconds,
    ),
)


@given(MESSAGES)
def test_a_message_comes_back_as_it_went(message: m.Message) -> None:
    assert m.decode(m.encode(message)) == message


@given(MESSAGES)
def test_a_field_of_a_newer_version_is_ignored(message: m.Message) -> None:
    plain = msgspec.msgpack.decode(m.encode(message))
    assert m.decode(msgspec.msgpack.encode({**plain, "of_a_newer_version": [1, 2]})) == message


@pytest.mark.parametrize("path", [(), ("rollout",), ("rollout", "engine_args"), ("rollout", "engine_args", "lengths")])
def test_a_job_setting_of_a_newer_version_is_ignored(path: tuple[str, ...]) -> None:
    message = m.SubmitJob(sender="t", job_uid="j", job=job("j"), submitted_at=1.0)
    plain = msgspec.msgpack.decode(m.encode(message))
    section = plain["job"]
    for key in path:
        section = section[key]
    section["of_a_newer_version"] = 1
    assert m.decode(msgspec.msgpack.encode(plain)) == message


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode({"type": "Stranger"}), msgspec.msgpack.encode([1])])
def test_a_stranger_is_one_clear_error(data: bytes) -> None:
    with pytest.raises(MessageError, match="undecodable"):
        m.decode(data)


@given(MESSAGES)
def test_every_message_has_its_subject_and_is_found_by_its_subscription(message: m.Message) -> None:
    subject = subjects.subject_of(message)
    wanted = subjects.subscription(type(message)).split(".")
    assert all(part in ("*", name) for part, name in zip(wanted, subject.split("."), strict=True))


def test_announcements_of_different_senders_and_attempts_are_different_messages() -> None:
    def task(**changes: object) -> m.StartRollout:
        plain: dict[str, object] = {
            "sender": "a",
            "job_uid": "j",
            "step": 0,
            "group": 1,
            "sample": 2,
            "policy": PolicyVersion(0),
        }
        return m.StartRollout(**{**plain, **changes})  # type: ignore[arg-type]

    ids = [subjects.message_id(task(**changes)) for changes in ({}, {"attempt": 1}, {"sender": "b"}, {"sample": 3})]
    assert len(set(ids)) == 4
    assert subjects.message_id(task()) == ids[0]


def test_streams_do_not_overlap() -> None:
    prefixes = [subject.split(".")[0] for stream in subjects.STREAMS for subject in stream.subjects]
    assert len(set(prefixes)) == len(prefixes)
    streams = {stream.name for stream in subjects.STREAMS}
    assert {route.stream for route in subjects.ROUTES.values() if route.stream} <= streams
