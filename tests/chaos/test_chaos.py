"""Whatever dies, whenever it dies: every job ends with the same trained samples as if nothing had happened."""

from pathlib import Path

import pytest

from services.trainer.job_data import seed_of
from tests.chaos.attack import Kind
from tests.chaos.campaign import Workload, run_campaign
from tests.chaos.invariants import check_same_weights
from tests.chaos.jobs import model_jobs, poisoned_jobs, replayed_jobs
from tests.chaos.plan import CELLS, Planned, planned
from tests.chaos.watch import Moment
from tests.tiny_model import build_tiny_model

pytestmark = pytest.mark.timeout(600)

MOST_DELICATE = {
    Kind.KILL_ROLLOUT: Moment.GENERATING,
    Kind.KILL_ENGINE: Moment.TAIL,
    Kind.KILL_TRAINER: Moment.PUBLISHED,
    Kind.KILL_TRAINING: Moment.TRAINING,
    Kind.KILL_REWARD: Moment.SCORING,
    Kind.KILL_SCORER: Moment.SCORING,
    Kind.KILL_LEADER: Moment.TRAINING,
    Kind.KILL_NATS: Moment.ISSUED,
    Kind.KILL_VALKEY: Moment.GENERATING,
    Kind.TEAR_VALKEY: Moment.SCORING,
    Kind.END_ROLLOUT: Moment.GENERATING,
    Kind.END_TRAINER: Moment.TRAINING,
    Kind.END_REWARD: Moment.SCORING,
    Kind.END_LEADER: Moment.PUBLISHED,
    Kind.END_NATS: Moment.SCORING,
    Kind.END_VALKEY: Moment.TAIL,
    Kind.FREEZE_ROLLOUT: Moment.GENERATING,
    Kind.FREEZE_ENGINE: Moment.GENERATING,
    Kind.FREEZE_TRAINER: Moment.TRAINING,
    Kind.FREEZE_TRAINING: Moment.TRAINING,
    Kind.FREEZE_REWARD: Moment.SCORING,
    Kind.FREEZE_REWARD_LONG: Moment.SCORING,
    Kind.FREEZE_LEADER: Moment.TAIL,
    Kind.FREEZE_NATS: Moment.PUBLISHED,
    Kind.FREEZE_VALKEY: Moment.GENERATING,
    Kind.CUT_ROLLOUT_BUS: Moment.GENERATING,
    Kind.CUT_ROLLOUT_STORE: Moment.GENERATING,
    Kind.CUT_TRAINER_BUS: Moment.PUBLISHED,
    Kind.CUT_TRAINER_STORE: Moment.TRAINING,
    Kind.CUT_REWARD_BUS: Moment.SCORING,
    Kind.CUT_REWARD_STORE: Moment.SCORING,
    Kind.CUT_LEADER_BUS: Moment.TRAINING,
    Kind.CUT_LEADER_STORE: Moment.PUBLISHED,
    Kind.DRAIN: Moment.GENERATING,
    Kind.MIGRATE: Moment.TAIL,
    Kind.CANCEL: Moment.PUBLISHED,
}

SEEDS = {1: CELLS}
"""Campaigns at random, and how many of their faults: one with every kind at every moment, and what once found a bug."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; without an engine, it is its tokenizer that is needed."""
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Workload:
    """Jobs without a model; how they end undisturbed is found out once for all tests."""
    return Workload(replayed_jobs(tmp_path_factory.mktemp("jobs"), model))


async def test_each_kind_of_fault_alone(tmp_path: Path, replayed: Workload) -> None:
    plan = [Planned(kind, moment, pause_s=0.0) for kind, moment in MOST_DELICATE.items()]
    assert {one.kind for one in plan} == set(Kind)
    report = await run_campaign(tmp_path, replayed, plan, seed=0, alone=True)
    assert len(report.struck) == len(plan)
    assert not [one for one in report.struck if one.began_anew], "nobody dies of another's fault"


@pytest.mark.parametrize(("seed", "count"), SEEDS.items())
async def test_random_faults_on_top_of_each_other(tmp_path: Path, replayed: Workload, seed: int, count: int) -> None:
    report = await run_campaign(tmp_path, replayed, planned(seed, count), seed=seed)
    assert len(report.struck) == count
    assert len(report.cells()) == min(count, CELLS), "no kind struck twice at a moment before all did at all"


async def test_a_trajectory_that_kills_its_engine_is_failed_and_no_other(tmp_path: Path, model: Path) -> None:
    workload = Workload(poisoned_jobs(tmp_path, model, deadly_seed=seed_of(5, 6, 2)), at_once=1)
    plan = [Planned(kind, Moment.GENERATING, pause_s=0.1) for kind in (Kind.KILL_ROLLOUT, Kind.MIGRATE, Kind.KILL_TRAINER)]
    await run_campaign(tmp_path, workload, plan, seed=2)
    (ending,) = workload.expected.values()
    assert [(line.group, line.sample) for line in ending.samples if line.state == "failed"] == [(6, 2)]


async def test_faults_on_a_model(tmp_path: Path, model: Path) -> None:
    kinds = (
        Kind.KILL_ENGINE,
        Kind.MIGRATE,
        Kind.KILL_TRAINING,
        Kind.KILL_NATS,
        Kind.KILL_ROLLOUT,
        Kind.FREEZE_ROLLOUT,
        Kind.KILL_VALKEY,
        Kind.KILL_TRAINER,
    )
    plan = [Planned(kind, MOST_DELICATE[kind], pause_s=0.5) for kind in kinds]
    plan.append(Planned(Kind.KILL_TRAINER, Moment.GENERATING, pause_s=0.5))
    workload = Workload(model_jobs(tmp_path, model), at_once=1, rollouts=1)
    report = await run_campaign(tmp_path, workload, plan, seed=3)
    assert len(report.struck) == len(plan)
    check_same_weights(tmp_path)
