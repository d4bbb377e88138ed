"""Rules: a plan that breaks one is refused, and no sequence of events makes any policy break one."""

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from libs.common import messages as m
from libs.common.errors import RuleViolation
from services.scheduler import commands as c
from services.scheduler import events as e
from services.scheduler.allocations import Allocations, complete
from services.scheduler.core import Limits
from services.scheduler.policies.policy import Grant, Placement, Plan
from services.scheduler.policies.registry import POLICIES
from services.scheduler.rules import Proposal, check
from services.scheduler.view import View
from tests.scheduling import World, draining, progress, submit, trained, two_cores, worker

# --- each rule refuses what it is there for --------------------------------------------------------------------------


def rolling_and_waiting() -> View:
    """Job a holds both rollout workers, b waits."""
    world = two_cores()
    world.send(submit("a"), submit("b"), progress("a", m.Phase.ROLLOUT))
    return world.scheduler.view()


HELD = (Grant("t0", "a", ()), Grant("r0", "a", (0,)), Grant("r1", "a", (1,)))


def propose(view: View, *grants: Grant, placements: tuple[Placement, ...] = ()) -> Proposal:
    plan = Plan(grants=grants, placements=placements, reason="test")
    return Proposal(view, plan, complete(plan, view, sender="s", revision=view.revision + 1), view.revision + 1)


def test_a_plan_that_keeps_the_rules_passes() -> None:
    check(propose(rolling_and_waiting(), *HELD))
    check(
        propose(
            rolling_and_waiting(),
            *HELD[:2],
            Grant("t0", "b", (1,)),
            Grant("r1", "a", ()),
            placements=(Placement("b", "t0"),),
        )
    )


@pytest.mark.parametrize(
    ("name", "grants", "placements"),
    [
        ("only_announced_workers", (*HELD, Grant("r7", "a", ())), ()),
        ("only_announced_workers", HELD, (Placement("b", "r0"),)),
        ("units_of_the_device_once", (*HELD[:2], Grant("r1", "a", (0,))), ()),
        ("units_of_the_device_once", (*HELD[:2], Grant("r1", "a", (2,))), ()),
        ("workers_within_limits", (HELD[0], Grant("r0", "a", (0, 1)), Grant("r1", "a", ())), ()),
        ("only_running_jobs", (*HELD, Grant("r0", "b", ())), ()),
        ("only_running_jobs", (*HELD, Grant("r0", "ended", ())), ()),
        ("only_running_jobs", HELD, (Placement("a", "t0"),)),
        ("one_trainer_each", HELD[1:], ()),
        ("someone_progresses", (Grant("t0", "a", (0, 1)), Grant("r0", "a", ()), Grant("r1", "a", ())), ()),
        ("preemption_makes_room", (*HELD[:2], Grant("r1", "a", ())), ()),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(
    name: str, grants: tuple[Grant, ...], placements: tuple[Placement, ...]
) -> None:
    with pytest.raises(RuleViolation, match=name):
        check(propose(rolling_and_waiting(), *grants, placements=placements))


@pytest.mark.parametrize(
    ("name", "field", "value"), [("memory_of_the_device", "memory_mb", 9000), ("revisions_increase", "revision", 1)]
)
def test_allocations_that_break_a_rule_are_refused(name: str, field: str, value: int) -> None:
    sound = propose(rolling_and_waiting(), *HELD)
    broken = msgspec.structs.replace(sound.after["r0", "a"], **{field: value})
    with pytest.raises(RuleViolation, match=name):
        check(Proposal(sound.view, sound.plan, {**sound.after, ("r0", "a"): broken}, sound.revision))


class Stranding:
    """A policy that gives an unit to two jobs."""

    name = "stranding"
    watches_sub_stages = False

    def decide(self, view: View) -> Plan:
        grants = [Grant(some, uid, (0,)) for uid in view.jobs for some in view.workers]
        return Plan(grants=tuple(grants), reason="everything to everybody")


def test_the_scheduler_refuses_a_policy_that_breaks_a_rule() -> None:
    world = two_cores()
    world.scheduler._policy, world.refusals_expected = Stranding(), True
    world.send(submit("a"))
    assert world.notes == [c.REFUSED]
    assert world.allocations == {}
    assert world.jobs["a"].state is m.JobState.QUEUED  # what the event itself means isn't lost with the plan
    world.send(e.CancelRequested("a", "no"))
    assert world.ended["a"].outcome is m.Outcome.CANCELLED
    assert world.jobs["a"].state is m.JobState.ENDED


# --- random histories ------------------------------------------------------------------------------------------------

UNITS = {"a": 4, "b": 2, "c": 1}
POOL = {
    f"{kind}-{device}{number}": worker(f"{kind}-{device}{number}", role, device=device, units=units, max_units=most)
    for device, units in UNITS.items()
    for kind, role, most, count in (
        ("r", m.Role.ROLLOUT, 1, 2), ("w", m.Role.ROLLOUT, 2, 1), ("t", m.Role.TRAINER, units, 1)
    )
    for number in range(count)
}  # fmt: skip
NAMES = st.sampled_from(sorted(POOL))
PICK = st.integers(0, 1000)
LIMITS = Limits(worker_lost_s=10.0, no_worker_s=40.0, stall_s=60.0, sweep_s=5.0)
NEXT = {m.Phase.STARTING: m.Phase.ROLLOUT, m.Phase.ROLLOUT: m.Phase.TRAIN, m.Phase.TRAIN: m.Phase.ROLLOUT}


class Histories(RuleBasedStateMachine):
    """Jobs and workers come and go, messages are lost, repeated and late, clocks jump, the scheduler is restarted."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)), names=st.sets(NAMES))
    def start(self, policy: str, names: set[str]) -> None:
        self.world = World(policy, LIMITS)
        self.submitted = 0
        self.world.restart()
        self.world.send(*[e.WorkerSeen(POOL[name]) for name in sorted(names)])

    @rule(priority=st.integers(-1, 1))
    def a_job_comes(self, priority: int) -> None:
        self.submitted += 1
        self.world.send(submit(f"j{self.submitted}", priority=priority))

    @rule(name=NAMES)
    def a_worker_comes(self, name: str) -> None:
        self.world.send(e.WorkerSeen(POOL[name]))

    @rule(name=NAMES)
    def a_worker_leaves(self, name: str) -> None:
        self.world.send(e.WorkerLeft(name))

    @rule(name=NAMES)
    def a_worker_drains(self, name: str) -> None:
        self.world.send(e.WorkerSeen(draining(POOL[name])))

    @precondition(lambda self: self.world.running())
    @rule(pick=PICK)
    def a_step_goes_on(self, pick: int) -> None:
        uid = self.world.running()[pick % len(self.world.running())]
        self.world.send(self._next(uid))

    @precondition(lambda self: self.submitted)
    @rule(pick=PICK, name=NAMES, phase=st.sampled_from(list(m.Phase)))
    def a_trainer_speaks_out_of_turn(self, pick: int, name: str, phase: m.Phase) -> None:
        told = progress(f"j{pick % self.submitted + 1}", phase, trainer=name)
        self.world.send(told)

    @precondition(lambda self: self.world.running())
    @rule(pick=PICK, outcome=st.sampled_from([m.Outcome.SUCCEEDED, m.Outcome.FAILED]), repeats=st.integers(1, 2))
    def training_ends(self, pick: int, outcome: m.Outcome, repeats: int) -> None:
        uid = self.world.running()[pick % len(self.world.running())]
        self._finish(uid, outcome, repeats=repeats)

    @precondition(lambda self: self.submitted)
    @rule(pick=PICK)
    def a_user_cancels_or_submits_again(self, pick: int) -> None:
        uid = f"j{pick % self.submitted + 1}"
        self.world.send(submit(uid), e.CancelRequested(uid, "test"))

    @rule(seconds=st.integers(1, 45), heard=st.booleans())
    def time_passes(self, seconds: int, heard: bool) -> None:
        self.world.wait(seconds, heard=heard, tick_s=5)

    @rule(jump_s=st.floats(-1e6, 1e6))
    def the_clock_jumps(self, jump_s: float) -> None:
        self.world.send(e.Tick(), after_s=jump_s)

    @precondition(lambda self: self.submitted)
    @rule(pick=PICK, name=NAMES, stage=st.sampled_from(list(m.SubStage)))
    def telemetry_arrives(self, pick: int, name: str, stage: m.SubStage) -> None:
        uid = f"j{pick % self.submitted + 1}"
        self.world.send(e.TelemetrySeen(m.SubStageEntered(sender=name, job_uid=uid, step=0, sub_stage=stage)))

    @rule(policy=st.sampled_from([None, *sorted(POLICIES)]))
    def the_scheduler_restarts(self, policy: str | None) -> None:
        self.world.restart(policy)

    @invariant()
    def nothing_is_stranded_or_shared(self) -> None:
        world = getattr(self, "world", None)
        if world is None:
            return
        holders: Allocations = world.allocations
        taken = [(world.workers[name].device, unit) for (name, _), held in holders.items() for unit in held.units]
        assert len(taken) == len(set(taken))
        assert all(unit < UNITS[device] for device, unit in taken)
        assert {uid for _, uid in holders} <= set(world.running())
        assert world.consumers == set(world.running())
        assert {uid for uid, record in world.jobs.items() if record.state is m.JobState.ENDED} == set(world.ended)

    def teardown(self) -> None:
        """With all workers there, every job comes to its end, and nothing is left."""
        if not hasattr(self, "world"):
            return
        self.world.send(*[e.WorkerSeen(some) for some in POOL.values()])
        for _ in range(8 * self.submitted):
            able = [uid for uid in self.world.running() if self._can_go_on(uid)]
            assert able or not set(self.world.jobs) - set(self.world.ended)
            for uid in able:
                told = self.world.progress.get(uid)
                if told is not None and told.sender == self.world.jobs[uid].trainer and told.step >= 2:
                    self._finish(uid, m.Outcome.SUCCEEDED, repeats=1)
                else:
                    self.world.send(self._next(uid))
        assert set(self.world.ended) == set(self.world.jobs)
        assert self.world.allocations == {}

    def _can_go_on(self, uid: str) -> bool:
        role = m.Role.ROLLOUT if self._phase(uid) is m.Phase.ROLLOUT else m.Role.TRAINER
        return any(units for name, units in self.world.units(uid).items() if POOL[name].role is role)

    def _phase(self, uid: str) -> m.Phase:
        return self.world.scheduler.view().jobs[uid].phase

    def _next(self, uid: str) -> e.ProgressSeen:
        told = self.world.progress.get(uid)
        phase = NEXT.get(self._phase(uid), m.Phase.STARTING)
        step = (told.step if told is not None else 0) + (phase is m.Phase.ROLLOUT)
        return progress(uid, phase, trainer=self.world.jobs[uid].trainer, step=step)

    def _finish(self, uid: str, outcome: m.Outcome, *, repeats: int) -> None:
        trainer = self.world.jobs[uid].trainer
        self.world.send(*[trained(uid, trainer=trainer, outcome=outcome)] * repeats)


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
