"""What each policy makes of a situation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common import messages as m
from libs.common.errors import NodeError
from services.scheduler import events as e
from services.scheduler.policies.registry import policy_named
from services.scheduler.policies.stages import by_phase
from services.scheduler.policies.static_split import deal
from services.scheduler.view import WorkerView
from tests.scheduling import World, progress, submit, trained, two_cores, worker

ROLLOUT, TRAIN = m.Phase.ROLLOUT, m.Phase.TRAIN


def rollout(instance: str, *, device: str = "cpu", max_units: int = 1) -> WorkerView:
    return WorkerView(instance, m.Role.ROLLOUT, device, max_units)


def test_policies_are_found_by_name() -> None:
    assert policy_named("static-split").name == "static-split"
    with pytest.raises(NodeError, match="sequential"):
        policy_named("fastest")


def test_sequential_goes_by_priority_then_order_and_never_interrupts() -> None:
    world = two_cores()
    world.send(submit("a"), submit("b"), submit("c", priority=1), submit("d", priority=1))
    order = []
    while running := world.running():
        order += running
        world.send(trained(running[0]))
    assert order == ["a", "c", "d", "b"]


def test_sequential_uses_every_device() -> None:
    world = two_cores()
    world.send(
        e.WorkerSeen(worker("r9", m.Role.ROLLOUT, device="gpu", units=4, max_units=3)), submit("a"), progress("a", ROLLOUT)
    )
    assert world.units("a") == {"r0": (0,), "r1": (1,), "r9": (0, 1, 2), "t0": ()}


def test_static_split_gives_jobs_that_come_together_equal_fixed_parts() -> None:
    world = two_cores("static-split")
    world.send(submit("a"), submit("b"))
    assert (world.units("a"), world.units("b")) == ({"r0": (), "t0": (0,)}, {"r1": (), "t0": (1,)})
    world.send(progress("a", ROLLOUT))
    assert (world.units("a"), world.units("b")) == ({"r0": (0,), "t0": ()}, {"r1": (), "t0": (1,)})
    world.send(progress("b", ROLLOUT), progress("a", TRAIN))
    assert (world.units("a"), world.units("b")) == ({"r0": (), "t0": (0,)}, {"r1": (1,), "t0": ()})


def test_static_split_keeps_a_part_for_the_whole_run_and_hands_it_on() -> None:
    world = two_cores("static-split")
    world.send(submit("a"), submit("b"), submit("c"), progress("a", ROLLOUT))
    assert world.running() == ["a", "b"]
    world.send(trained("b"))
    assert world.units("c") == {"r1": (), "t0": (1,)}
    world.send(trained("c"))
    assert world.units("a") == {"r0": (0,), "t0": ()}


def test_static_split_is_fixed_once_a_job_has_begun() -> None:
    world = two_cores("static-split")
    world.send(submit("a"), progress("a", ROLLOUT), submit("b"))
    assert world.running() == ["a"]
    assert world.units("a") == {"r0": (0,), "r1": (1,), "t0": ()}
    world.send(trained("a"), submit("c"))
    assert (world.units("b"), world.units("c")) == ({"r0": (), "t0": (0,)}, {"r1": (), "t0": (1,)})


def test_static_split_never_admits_a_job_that_no_rollout_worker_would_serve() -> None:
    world = two_cores("static-split")
    world.send(submit("a"), submit("b"), submit("c"), progress("a", ROLLOUT), progress("b", ROLLOUT), e.WorkerLeft("r1"))
    world.send(trained("a"))
    assert world.running() == ["b"]
    assert world.units("b")["r0"] == (1,)


def test_static_split_is_made_anew_when_a_device_is_too_small_for_it() -> None:
    world = two_cores("static-split")
    world.send(submit("a"), submit("b"), progress("a", ROLLOUT), progress("b", ROLLOUT))
    world.send(e.WorkerSeen(worker("r9", m.Role.ROLLOUT, device="tiny", units=1)))
    assert world.units("a") == {"r0": (0,), "r1": (1,), "r9": (0,), "t0": ()}
    assert not any(world.units("b").values())
    world.send(trained("a"))
    assert world.units("b") == {"r0": (0,), "r1": (1,), "r9": (0,), "t0": ()}


def test_two_jobs_go_to_two_trainers() -> None:
    world = World("static-split")
    for name in ("t0", "t1"):
        world.send(e.WorkerSeen(worker(name, m.Role.TRAINER)))
    world.send(e.WorkerSeen(worker("r0", m.Role.ROLLOUT)), e.WorkerSeen(worker("r1", m.Role.ROLLOUT)))
    world.send(submit("a"), submit("b"))
    assert {world.jobs["a"].trainer, world.jobs["b"].trainer} == {"t0", "t1"}


workers = st.lists(
    st.builds(rollout, st.uuids().map(str), device=st.sampled_from(["x", "y"]), max_units=st.integers(1, 3)),
    max_size=8,
    unique_by=lambda some: some.instance,
)


@given(rollouts=workers, units=st.integers(0, 8))
def test_a_rollout_uses_all_units_that_its_workers_can(rollouts: list[WorkerView], units: int) -> None:
    trainer = WorkerView("t", m.Role.TRAINER, "x", 8)
    mine = {device: range(units) for device in ("x", "y")}
    grants = by_phase("a", ROLLOUT, units=mine, trainer=trainer, rollouts=rollouts)
    for device in ("x", "y"):
        here = {some.instance: some.max_units for some in rollouts if some.device == device}
        given_here = [unit for grant in grants if grant.instance in here for unit in grant.units]
        assert len(given_here) == len(set(given_here)) == min(units, sum(here.values()))
        assert all(len(grant.units) <= here[grant.instance] for grant in grants if grant.instance in here)


@given(rollouts=workers, parts=st.integers(1, 4), data=st.data())
def test_dealing_is_even_stable_and_leaves_no_taken_part_without(
    rollouts: list[WorkerView], parts: int, data: st.DataObject
) -> None:
    taken = sorted(data.draw(st.sets(st.integers(0, parts - 1))))
    first = deal(rollouts, {}, parts=parts, taken=taken)
    assert deal(rollouts, first, parts=parts, taken=taken) == first
    kept = [some for some in rollouts if data.draw(st.booleans())]
    then = deal(kept, first, parts=parts, taken=taken)
    assert set(then) == {some.instance for some in kept}
    assert len(set(then.values()) & set(taken)) == min(len(taken), len(kept))
