"""Replayed training: its time, its checkpoints, and a digest in place of weights."""

import contextlib
import queue
import select
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libs.common.child import FD_VARIABLE, Parent, ParentGone
from libs.common.errors import JigsawError
from libs.common.job import Job, job_from
from libs.common.tokens import TOKEN, PolicyVersion, sampled
from services.trainer import replay_process, wire
from services.trainer.replay_process import ReplayLearner, load
from services.trainer.request_loop import RequestLoop


def replay_job(**train: Any) -> Job:
    raw = {
        "name": "small",
        "model": {"path": "m"},
        "data": {"task": "t"},
        "rollout": {"engine": "replay"},
        "train": {"engine": "replay", "micro_batch_tokens": 100, **train},
    }
    return job_from(raw, file="test")


def group(*lengths: int, prompt: int = 10, reward: float = 1.0, incarnation: int = 0) -> wire.SampleGroup:
    """Samples of these lengths, with ids that follow from them."""
    version = PolicyVersion(0, incarnation)
    samples = [wire.Sample(sampled(range(n), [-1.0] * n, version).tobytes(), reward) for n in lengths]
    return wire.SampleGroup(list(range(prompt)), samples)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "manifest.json"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def learner(model: Path) -> ReplayLearner:
    return ReplayLearner(model, replay_job(), resume=None)


def ignore(done: wire.MicroBatchDone) -> None:
    return None


def test_tokens_are_read_as_they_are_stored() -> None:
    (token,) = sampled([77], [-0.5], PolicyVersion(3, 9))
    assert replay_process.TOKEN.size == TOKEN.itemsize
    assert replay_process.TOKEN.unpack(token.tobytes()) == (77, -0.5, 3, 9, 1)


def test_a_step_takes_the_time_of_its_tokens_micro_batch_by_micro_batch(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1})
    job = replay_job(engine_args={"tokens_per_s": 1000, "thread_speedup": [1.0, 1.6, 2.0]})
    slept: list[float] = []
    timed = ReplayLearner(model, job, resume=None, sleep=slept.append)
    seen: list[wire.MicroBatchDone] = []

    def between(done: wire.MicroBatchDone) -> None:
        seen.append(done)
        timed.set_threads(done.done + 1)

    metrics = timed.train(0, [group(40, 60, prompt=20), group(50, 50, prompt=30)], on_micro_batch=between)
    assert [(done.done, done.total, done.tokens) for done in seen] == [(1, 3, 100), (2, 3, 100), (3, 3, 50)]
    assert slept == pytest.approx([0.1, 0.1 / 1.6, 0.05 / 1.6])
    assert metrics["throughput/tokens_computed"] == 250
    assert all(metrics[name] > 0 for name in ("loss/policy", "grad_norm", "mismatch/kl"))


def test_without_a_speed_no_time_passes(model: Path) -> None:
    slept: list[float] = []
    ReplayLearner(model, replay_job(), resume=None, sleep=slept.append).train(0, [group(500)], on_micro_batch=ignore)
    assert slept == []


def test_the_digest_is_of_all_that_was_trained_whoever_sampled_it(model: Path) -> None:
    def trained(*steps: list[wire.SampleGroup]) -> str:
        learner = ReplayLearner(model, replay_job(), resume=None)
        for step, groups in enumerate(steps):
            learner.train(step, groups, on_micro_batch=ignore)
        return learner.trained

    plain = trained([group(3, 4)], [group(5, 6)])
    assert plain == trained([group(3, 4, incarnation=2)], [group(5, 6)])
    others = [
        trained([group(3, 4)]),
        trained([group(5, 6)], [group(3, 4)]),
        trained([group(3, 4), group(5, 6)]),
        trained([group(3, 4)], [group(5, 6, reward=0.5)]),
        trained([group(3, 4)], [group(5, 6)], [group(5, 6)]),
    ]
    assert len({plain, *others}) == 6


def test_a_policy_has_tokenizer_and_config_and_says_what_it_is(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    learner = ReplayLearner(model, replay_job(), resume=None)
    learner.train(6, [group(3)], on_micro_batch=ignore)
    learner.write_policy(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "replay.json", "tokenizer.json"]
    assert msgspec.json.decode((folder / "replay.json").read_bytes()) == {"step": 7, "trained": learner.trained}
    with pytest.raises(JigsawError, match="can't be written"):
        learner.write_policy(tmp_path / "not-there")


def test_a_policy_for_an_engine_that_reads_weights_has_them(model: Path, tmp_path: Path) -> None:
    job = replay_job()
    job = msgspec.structs.replace(job, rollout=msgspec.structs.replace(job.rollout, engine="vllm"))
    folder = tmp_path / "policy"
    folder.mkdir()
    ReplayLearner(model, job, resume=None).write_policy(folder)
    assert (folder / "model.safetensors").read_text() == "model.safetensors"


def told(model: Path, *resume: Path) -> wire.Load:
    return wire.Load(replay_job(), str(model), [str(path) for path in resume], [0])


def test_a_resumed_replay_equals_one_that_was_never_stopped(model: Path, tmp_path: Path) -> None:
    whole, found = load(told(model))
    assert (whole.step, whole.extra, found.directory) == (0, {}, None)
    whole.train(0, [group(3)], on_micro_batch=ignore)
    whole.write_checkpoint(tmp_path / "step-2", step=2, extra={"position": {"row": 7}})  # step 1 had nothing to train on
    resumed, found = load(told(model, tmp_path / "step-2"))
    assert (resumed.step, resumed.extra) == (2, {"position": {"row": 7}})
    assert (found.directory, found.passed_over) == (tmp_path / "step-2", ())
    for learner in (whole, resumed):
        learner.train(2, [group(4)], on_micro_batch=ignore)
    assert whole.trained == resumed.trained


def test_a_damaged_checkpoint_is_passed_over_and_nothing_but_damaged_ones_is_an_error(
    learner: ReplayLearner, model: Path, tmp_path: Path
) -> None:
    older, newer = tmp_path / "step-3", tmp_path / "step-6"
    for path, step in ((older, 3), (newer, 6)):
        learner.write_checkpoint(path, step=step, extra={})
    state = newer / "state.msgpack"
    state.write_bytes(state.read_bytes()[:-1] + b"\x00")
    loaded, found = load(told(model, newer, older))
    assert (loaded.step, found.directory) == (3, older)
    assert len(found.passed_over) == 1
    assert "state.msgpack" in found.passed_over[0]
    with pytest.raises(JigsawError, match="no checkpoint can be used"):
        load(told(model, newer))


class Service:
    """The other end of a request loop's socket, and of its learner's clock."""

    def __init__(self, end: socket.socket, naps: "queue.Queue[None]") -> None:
        self._end, self._naps = end, naps
        self._file = end.makefile("rb")

    def say(self, message: wire.ToTrainer) -> None:
        data = msgspec.msgpack.encode(message)
        self._end.sendall(struct.pack("<I", len(data)) + data)

    def hear(self) -> wire.FromTrainer:
        (length,) = struct.unpack("<I", self._file.read(4))
        return wire.FROM_TRAINER.decode(self._file.read(length))

    def hears_nothing(self, seconds: float = 0.1) -> bool:
        return not select.select([self._end], [], [], seconds)[0]

    def let_a_micro_batch_end(self) -> None:
        self._naps.put(None)

    def close(self) -> None:
        self._end.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._end.close()


@pytest.fixture
def service(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """The service of a loop in a thread, whose learner's micro-batches end when the test says so; it begins paused."""
    ours, theirs = socket.socketpair()
    monkeypatch.setenv(FD_VARIABLE, str(theirs.detach()))
    monkeypatch.setattr("libs.common.partition.bind", lambda _cores: None)  # the cores are this whole test run's
    parent = Parent(wire.TO_TRAINER)
    naps: queue.Queue[None] = queue.Queue()
    job = replay_job(engine_args={"tokens_per_s": 1000})
    learner = ReplayLearner(model, job, resume=None, sleep=lambda _: naps.get(timeout=10))

    def serve() -> None:
        with contextlib.suppress(ParentGone):
            RequestLoop(parent, learner, cores=[0], waiting=[wire.SetUnits((), 1)]).run()

    thread = threading.Thread(target=serve)
    thread.start()
    service = Service(ours, naps)
    yield service
    service.close()
    thread.join(10)
    assert not thread.is_alive()
    parent._socket.close()


def test_training_begins_with_units_and_stops_between_micro_batches_without_any(service: Service) -> None:
    assert service.hear() == wire.UnitsApplied((), 1)
    service.say(wire.Train(4, [group(140)]))
    assert service.hears_nothing()
    service.say(wire.SetUnits((0,), 2))
    assert service.hear() == wire.UnitsApplied((0,), 2)
    service.say(wire.SetUnits((), 3))
    assert service.hears_nothing()  # a micro-batch isn't interrupted
    service.let_a_micro_batch_end()
    first = service.hear()
    assert isinstance(first, wire.MicroBatchDone)
    assert (first.done, first.total, first.tokens) == (1, 2, 100)
    assert service.hear() == wire.UnitsApplied((), 3)
    service.let_a_micro_batch_end()
    assert service.hears_nothing()
    service.say(wire.SetUnits((0,), 4))
    assert service.hear() == wire.UnitsApplied((0,), 4)
    second, trained = service.hear(), service.hear()
    assert isinstance(second, wire.MicroBatchDone) and isinstance(trained, wire.Trained)
    assert (second.done, second.tokens, trained.step) == (2, 50, 4)


def test_policies_and_checkpoints_are_written_while_paused(service: Service, tmp_path: Path) -> None:
    assert service.hear() == wire.UnitsApplied((), 1)
    (tmp_path / "policy").mkdir()
    service.say(wire.WritePolicy(str(tmp_path / "policy")))
    assert service.hear() == wire.Written()
    service.say(wire.WriteCheckpoint(5, str(tmp_path / "step-5"), {"position": 3}))
    assert service.hear() == wire.Written()
    assert load(told(tmp_path, tmp_path / "step-5"))[0].extra == {"position": 3}
