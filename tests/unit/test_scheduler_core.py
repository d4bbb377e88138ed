"""The scheduler's state machine: admission, stages, workers coming and going, endings, and starting again."""

import msgspec
import pytest

from libs.common import messages as m
from libs.common.errors import TransitionError
from services.scheduler import commands as c
from services.scheduler import events as e
from services.scheduler.core import REVISIONS_PER_TERM, Limits
from services.scheduler.policies.policy import Plan
from services.scheduler.view import View
from tests.scheduling import START, World, draining, progress, submit, trained, two_cores, worker

ROLLOUT, TRAIN = m.Phase.ROLLOUT, m.Phase.TRAIN


class Unwilling:
    """A policy that nobody is to ask."""

    name = "unwilling"

    def decide(self, view: View) -> Plan:
        raise AssertionError("asked")


def test_an_admitted_job_gets_consumers_then_its_record_then_allocations() -> None:
    commands = two_cores().send(submit("a"))
    kinds = [type(command) for command in commands]
    assert kinds[:3] == [c.PutJob, c.CreateConsumers, c.PutJob]
    assert set(kinds[3:6]) == {c.PutAllocation}
    assert kinds[6:] == [c.PublishDecision]
    record = commands[2]
    assert isinstance(record, c.PutJob)
    assert (record.record.state, record.record.trainer) == (m.JobState.RUNNING, "t0")


def test_units_follow_the_phase_and_the_others_keep_their_state() -> None:
    world = two_cores()
    world.send(submit("a"))
    assert world.units("a") == {"r0": (), "r1": (), "t0": (0, 1)}
    world.send(progress("a", ROLLOUT))
    assert world.units("a") == {"r0": (0,), "r1": (1,), "t0": ()}
    world.send(progress("a", TRAIN))
    assert world.units("a") == {"r0": (), "r1": (), "t0": (0, 1)}


def test_units_are_taken_before_they_are_given() -> None:
    world = two_cores()
    world.send(submit("a"), progress("a", ROLLOUT))
    puts = [command.allocation.units for command in world.log if isinstance(command, c.PutAllocation)]
    assert puts == [(), (0,), (1,)]


def test_running_trajectories_are_divided_among_the_workers_that_compute() -> None:
    world = two_cores()
    world.send(submit("a"), progress("a", ROLLOUT))
    assert {held.max_running for held in world.allocations.values()} == {8, 0}
    world.send(e.WorkerLeft("r1"))
    assert world.allocations["r0", "a"].max_running == 16
    small = two_cores()
    small.send(submit("a", max_running=3), progress("a", ROLLOUT))
    assert small.allocations["r0", "a"].max_running == 3


def test_a_paused_rollout_worker_doesnt_count_among_those_that_compute() -> None:
    world = two_cores()
    world.send(submit("a"), e.WorkerSeen(worker("r2", m.Role.ROLLOUT)), progress("a", ROLLOUT))
    assert world.units("a")["r2"] == ()
    assert world.allocations["r0", "a"].max_running == 8


def test_a_heartbeat_asks_no_policy() -> None:
    world = two_cores()
    world.scheduler._policy = Unwilling()
    world.send(*[e.WorkerSeen(some) for some in world.workers.values()], e.Tick())
    with pytest.raises(AssertionError, match="asked"):
        world.send(submit("a"))


def test_memory_is_divided_and_never_exceeds_the_device() -> None:
    world = two_cores("static-split")
    world.send(submit("a"), submit("b"))
    shares = [held.memory_mb for held in world.allocations.values()]
    assert min(shares) > 0
    assert sum(shares) <= 8000


def test_a_decision_names_policy_grants_and_cause() -> None:
    world = two_cores()
    world.send(submit("a"), progress("a", ROLLOUT))
    last = world.decisions[-1]
    assert (last.device, last.policy, last.decided_at) == ("cpu", "sequential", START)
    assert last.grants == {"r0/a": 1, "r1/a": 1, "t0/a": 0}
    assert "a enters rollout" in last.reason
    assert last.revision == world.highest


def test_an_event_that_changes_nothing_decides_nothing() -> None:
    world = two_cores()
    world.send(submit("a"), progress("a", ROLLOUT))
    again: list[e.Event] = [progress("a", ROLLOUT), e.Tick(), *[e.WorkerSeen(some) for some in world.workers.values()]]
    assert [world.send(event) for event in again] == [[]] * len(again)


def test_a_duplicate_submission_is_ignored_even_after_the_end() -> None:
    world = two_cores()
    world.send(submit("a"), submit("a"))
    assert world.notes == ["duplicate_job_ignored"]
    world.send(trained("a"), submit("a"))
    assert world.notes == ["duplicate_job_ignored"] * 2
    assert world.jobs["a"].outcome is m.Outcome.SUCCEEDED


def test_a_finished_job_ends_once_and_the_next_has_its_turn() -> None:
    world = two_cores()
    world.send(submit("a"), submit("b"), trained("a"))
    assert world.jobs["b"].state is m.JobState.RUNNING
    assert world.units("a") == {}
    assert world.consumers == {"b"}
    kinds = [type(command) for command in world.log]
    assert kinds.index(c.PublishEnded) < kinds.index(c.DropAllocation) < kinds.index(c.CleanUpJob) < kinds.index(c.PutJob)
    world.send(trained("a"), e.CancelRequested("a", "late"))
    assert world.notes == ["training_end_ignored", "cancel_ignored"]
    assert list(world.ended) == ["a"]


def test_the_end_of_the_only_job_is_a_decision_too() -> None:
    world = two_cores()
    world.send(submit("a"), trained("a"))
    assert world.decisions[-1].grants == {}


def test_cancel_ends_queued_and_running_jobs_at_once() -> None:
    world = two_cores()
    world.send(submit("a"), submit("b"), e.CancelRequested("b", "no more"), e.CancelRequested("a", "nor this"))
    assert {uid: (ended.outcome, ended.reason) for uid, ended in world.ended.items()} == {
        "b": (m.Outcome.CANCELLED, "no more"),
        "a": (m.Outcome.CANCELLED, "nor this"),
    }
    assert world.allocations == {}
    world.send(e.CancelRequested("never", ""))
    assert world.notes == ["cancel_ignored"]


def test_a_job_that_never_ran_cant_have_been_trained() -> None:
    world = two_cores()
    world.send(submit("a"), submit("b"))
    with pytest.raises(TransitionError, match=r"job b is queued.*known as queued"):
        world.send(trained("b"))


def test_a_job_waits_until_there_is_a_trainer_and_a_rollout_worker() -> None:
    world = World()
    world.send(submit("a"), e.WorkerSeen(worker("t0", m.Role.TRAINER)))
    assert world.running() == []
    world.send(e.WorkerSeen(worker("r0", m.Role.ROLLOUT)))
    assert world.running() == ["a"]


def test_a_silent_worker_is_gone_and_its_units_are_used_by_others() -> None:
    world = two_cores()
    world.send(submit("a"), e.WorkerSeen(worker("r2", m.Role.ROLLOUT)), progress("a", ROLLOUT))
    assert world.units("a")["r2"] == ()
    for _ in range(12):
        world.send(e.Tick(), *[e.WorkerSeen(world.workers[name]) for name in ("r1", "r2", "t0")], after_s=1.0)
    assert world.units("a") == {"r1": (0,), "r2": (1,), "t0": ()}
    assert "r0" not in world.workers


def test_a_draining_worker_holds_nothing() -> None:
    world = two_cores()
    world.send(submit("a"), progress("a", ROLLOUT), e.WorkerSeen(draining(world.workers["r0"])))
    assert world.units("a") == {"r1": (0,), "t0": ()}


def test_a_job_without_its_trainer_moves_to_another_and_starts_again() -> None:
    world = two_cores()
    world.send(submit("a"), progress("a", ROLLOUT), e.WorkerSeen(worker("t1", m.Role.TRAINER)), e.WorkerLeft("t0"))
    assert world.jobs["a"].trainer == "t1"
    assert world.units("a") == {"r0": (), "r1": (), "t1": (0, 1)}
    world.send(progress("a", ROLLOUT, trainer="t0"))
    world.send(trained("a", trainer="t0"))
    assert world.notes == ["progress_ignored", "training_end_ignored"]
    assert world.running() == ["a"]
    world.send(progress("a", ROLLOUT, trainer="t1"))
    assert world.units("a")["t1"] == ()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_late_word_of_a_trainer_that_was_replaced_and_has_the_job_again_does_not_end_it(restarted: bool) -> None:
    world = two_cores()
    world.send(submit("a"), progress("a", ROLLOUT, incarnation=1))
    world.send(
        e.WorkerSeen(worker("t1", m.Role.TRAINER)), e.WorkerLeft("t0"), progress("a", ROLLOUT, trainer="t1", incarnation=2)
    )
    world.send(e.WorkerSeen(worker("t0", m.Role.TRAINER)), e.WorkerLeft("t1"))
    assert world.jobs["a"].trainer == "t0"
    if restarted:
        world.restart()
    world.send(trained("a", incarnation=1, outcome=m.Outcome.FAILED))
    assert world.notes[-1:] == ["training_end_ignored"]
    assert world.running() == ["a"]
    world.send(trained("a", incarnation=3))
    assert world.jobs["a"].outcome is m.Outcome.SUCCEEDED


def test_the_last_word_of_a_trainer_that_has_left_counts() -> None:
    world = two_cores()
    world.send(submit("a"), e.WorkerLeft("t0"), trained("a"))
    assert world.jobs["a"].outcome is m.Outcome.SUCCEEDED


def test_a_job_without_any_trainer_waits_then_fails_with_the_reason() -> None:
    world = two_cores(limits=Limits(no_worker_s=20.0))
    world.send(submit("a"), e.WorkerLeft("t0"))
    assert world.running() == ["a"]
    assert not any(world.units("a").values())
    world.wait(15)
    assert world.running() == ["a"]
    world.wait(10)
    assert world.jobs["a"].outcome is m.Outcome.FAILED
    assert world.jobs["a"].reason == "no trainer worker for 20 s"


def test_a_worker_in_time_resets_the_patience() -> None:
    world = two_cores(limits=Limits(no_worker_s=20.0))
    world.send(submit("a"), e.WorkerLeft("t0"))
    world.wait(15)
    world.send(e.WorkerSeen(worker("t0", m.Role.TRAINER)))
    world.wait(2)
    world.send(e.WorkerLeft("t0"))
    world.wait(15)
    assert world.running() == ["a"]


def test_a_job_that_holds_units_without_progress_fails() -> None:
    world = two_cores(limits=Limits(stall_s=30.0))
    world.send(submit("a"), progress("a", ROLLOUT))
    world.wait(25)
    world.send(progress("a", ROLLOUT, settled=1))
    world.wait(25)
    assert world.running() == ["a"]
    world.send(progress("a", ROLLOUT, settled=1))
    world.wait(10)
    assert world.jobs["a"].reason == "no progress for 30 s in rollout"
    assert world.ended["a"].outcome is m.Outcome.FAILED


def test_a_paused_job_isnt_stalled() -> None:
    world = two_cores("static-split", limits=Limits(stall_s=30.0))
    world.send(submit("a"), submit("b"))
    world.restart("sequential")
    for step in range(4):
        world.send(progress("a", TRAIN, step=step))
        world.wait(20)
    assert world.running() == ["a", "b"]


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
def test_a_jump_of_the_clock_costs_nobody_anything(jump_s: float) -> None:
    world = two_cores()
    world.send(submit("a"), progress("a", ROLLOUT))
    held = dict(world.allocations)
    world.send(e.Tick(), after_s=jump_s)
    world.wait(3)
    assert world.allocations == held


def sweeps(world: World, seconds: int) -> list[c.CleanUpJob]:
    """What is cleaned up while time passes."""
    done = [command for _ in range(seconds) for command in world.send(e.Tick(), after_s=1.0)]
    return [command for command in done if isinstance(command, c.CleanUpJob)]


def test_an_ended_job_is_swept_once_more() -> None:
    world = two_cores(limits=Limits(sweep_s=5.0))
    world.send(submit("a"), e.CancelRequested("a", ""))
    assert sweeps(world, 20) == [c.CleanUpJob("a")]


def test_an_ended_job_is_swept_by_a_scheduler_that_was_restarted_meanwhile_and_by_no_later_one() -> None:
    world = two_cores(limits=Limits(sweep_s=5.0))
    world.send(submit("a"), e.CancelRequested("a", ""))
    world.restart()
    assert sweeps(world, 50) == [c.CleanUpJob("a")]
    world.restart()
    assert sweeps(world, 50) == []


def test_an_ended_job_is_swept_though_no_scheduler_lives_for_so_long() -> None:
    world = two_cores(limits=Limits(sweep_s=5.0))
    world.send(submit("a"), e.CancelRequested("a", ""))
    swept = []
    for _ in range(5):
        swept += sweeps(world, 3)
        world.restart()
    assert c.CleanUpJob("a") in swept


def test_a_restart_changes_nothing_and_revisions_go_on() -> None:
    world = two_cores()
    world.send(submit("a"), submit("b"), progress("a", ROLLOUT))
    held, highest = dict(world.allocations), world.highest
    world.restart()
    assert world.allocations == held
    world.send(progress("a", TRAIN))
    assert world.allocations["t0", "a"].revision > highest
    world.send(trained("a"))
    assert world.running() == ["b"]
    world.restart()
    world.send(submit("a"))
    assert world.notes == ["duplicate_job_ignored"]


def test_a_new_leader_gives_every_allocation_a_revision_that_no_earlier_one_can_reach() -> None:
    world = two_cores()
    world.send(submit("a"), submit("b"), progress("a", ROLLOUT))
    before = dict(world.allocations)
    world.restart(term=3)
    assert {key: a.units for key, a in world.allocations.items()} == {key: a.units for key, a in before.items()}
    assert {a.revision for a in world.allocations.values()} == {3 * REVISIONS_PER_TERM + 1}
    assert world.decisions[-1].revision == 3 * REVISIONS_PER_TERM + 1, "observers hear that there is a new leader"
    world.send(progress("a", TRAIN))
    assert world.highest == 3 * REVISIONS_PER_TERM + 2
    world.restart(term=4)
    assert min(a.revision for a in world.allocations.values()) > 4 * REVISIONS_PER_TERM


def test_revisions_go_on_above_what_a_worker_has_in_force() -> None:
    world = World()
    known = m.Worker(
        sender="r0", role=m.Role.ROLLOUT, device="cpu", units=2, max_units=1, memory_mb=8000, started_at=START,
        revisions={"a": 41},
    )  # fmt: skip
    world.workers = {"r0": known, "t0": worker("t0", m.Role.TRAINER)}
    world.restart()
    world.send(submit("a"))
    assert world.allocations["r0", "a"].revision > 41


def test_an_ending_cut_short_is_completed_at_the_start() -> None:
    world = two_cores()
    world.send(submit("a"), submit("b"))
    world.ended["a"] = m.JobEnded(sender="s", job_uid="a", outcome=m.Outcome.FAILED, reason="stalled", ended_at=START)
    world.restart()
    assert (world.jobs["a"].outcome, world.jobs["a"].reason) == (m.Outcome.FAILED, "stalled")
    assert world.units("a") == {}
    assert world.running() == ["b"]


def test_an_allocation_left_behind_by_an_ended_job_is_dropped_at_the_start() -> None:
    world = two_cores()
    world.send(submit("a"))
    left = dict(world.allocations)
    world.send(trained("a"))
    world.allocations = left
    world.restart()
    assert world.allocations == {}


def test_telemetry_reaches_the_view_bounded_and_goes_with_its_job() -> None:
    world = two_cores()
    world.send(submit("a"))
    window = m.TrainerWindow(sender="t0", job_uid="a", step=0, done=1, total=2, tokens=10, seconds=1.0, units=2, revision=1)
    entered = m.SubStageEntered(sender="t0", job_uid="a", step=0, sub_stage=m.SubStage.TRAIN)
    world.send(*[e.TelemetrySeen(window)] * 100, e.TelemetrySeen(entered))
    activity = world.scheduler.view().activity["t0", "a"]
    assert activity.sub_stage is m.SubStage.TRAIN
    assert 1 < len(activity.windows) <= 16
    world.send(trained("a"), e.TelemetrySeen(window))
    assert world.scheduler.view().activity == {}


def cannot(some: m.Worker, uid: str) -> e.WorkerSeen:
    return e.WorkerSeen(msgspec.structs.replace(some, broken={uid: "no memory for the KV cache"}))


def test_a_worker_that_cannot_run_a_job_gets_no_units_for_it() -> None:
    world = two_cores()
    world.send(submit("a"), progress("a", ROLLOUT), cannot(world.workers["r0"], "a"))
    assert world.units("a") == {"r0": (), "r1": (0,), "t0": ()}
    assert world.allocations["r1", "a"].max_running == 16
    assert not world.ended


def test_a_job_that_no_rollout_worker_can_run_fails_with_the_reason() -> None:
    world = two_cores()
    world.send(submit("a"), submit("b"), progress("a", ROLLOUT))
    world.send(cannot(world.workers["r0"], "a"), cannot(world.workers["r1"], "a"), e.Tick())
    assert world.ended["a"].outcome is m.Outcome.FAILED
    assert "no memory for the KV cache" in world.ended["a"].reason
    assert world.running() == ["b"]
    world.send(cannot(world.workers["r0"], "a"), cannot(world.workers["r1"], "a"))  # repeated by every heartbeat
    assert list(world.ended) == ["a"]


def test_a_job_whose_last_able_worker_leaves_fails_as_well() -> None:
    world = two_cores()
    world.send(submit("a"), progress("a", ROLLOUT), cannot(world.workers["r0"], "a"))
    world.wait(5)
    assert world.running() == ["a"]
    world.send(e.WorkerLeft("r1"), e.Tick())
    assert world.ended["a"].outcome is m.Outcome.FAILED


def test_a_job_that_crashes_its_trainer_fails() -> None:
    world = two_cores()
    world.send(submit("a"), cannot(world.workers["t0"], "a"), e.Tick())
    assert "no memory for the KV cache" in world.ended["a"].reason


def test_a_job_may_be_silent_for_as_long_as_one_of_its_trajectories_may_take() -> None:
    world = two_cores(limits=Limits(stall_s=5.0))
    world.send(submit("a"), progress("a", ROLLOUT))
    world.wait(25)
    assert world.running() == ["a"]
    world.wait(10)
    assert world.jobs["a"].reason == "no progress for 30 s in rollout"
