"""What a step is summarised as, and what a user is warned of."""

import msgspec

from libs.common.history import History
from libs.common.tokens import PolicyVersion, sampled
from libs.common.trajectory import Record, TrajectoryId
from services.trainer.checkpoints import Kept, droppable
from services.trainer.summary import account, summarise, warnings_of
from tests.trajectories import spec_of


def record(group: int, sample: int, reward: float | None, *, stop: str = "stop", tokens: int = 3, **counts: int) -> Record:
    return Record(
        spec=spec_of(TrajectoryId("job", group, sample)),
        state="failed" if reward is None else "scored",
        epoch=1,
        tokens=sampled([1] * tokens, [0.0] * tokens, PolicyVersion(0)),
        stop_reason=stop,
        reward=reward,
        claims=1,
        **counts,
    )


def test_failed_samples_count_in_nothing() -> None:
    summary = summarise([[record(0, 0, 1.0), record(0, 1, None, tokens=99)], [record(1, 0, 0.0, tokens=5)]])
    assert summary.rewards == [1.0, 0.0]
    assert summary.lengths == [3, 5]
    assert summary.metrics()["reward/mean"] == 0.5
    assert summary.metrics()["response_length/max"] == 5


def test_mixed_is_the_share_of_groups_with_signal() -> None:
    groups = [[record(0, 0, 1.0), record(0, 1, 0.0)], [record(1, 0, 1.0), record(1, 1, 1.0)]]
    assert summarise(groups).mixed == 0.5


def test_all_truncated_is_warned_of_and_some_truncated_is_not() -> None:
    every = summarise([[record(0, 0, 1.0, stop="length"), record(0, 1, 0.0, stop="context")]])
    some = summarise([[record(0, 0, 1.0, stop="length"), record(0, 1, 0.0)]])
    assert "all_truncated" in warnings_of(every, {})
    assert "all_truncated" not in warnings_of(some, {})


def test_constant_reward_and_zero_loss_are_warned_of() -> None:
    constant = summarise([[record(0, 0, 0.5), record(0, 1, 0.5)]])
    assert "constant_reward" in warnings_of(constant, {})
    assert "zero_loss" in warnings_of(constant, {"loss/policy": 0.0, "grad_norm": 0.0})
    assert "zero_loss" not in warnings_of(constant, {"loss/policy": 0.0, "grad_norm": 0.3})


def test_a_warning_comes_once() -> None:
    history = History()
    assert history.warn({"a": "text"}) == ["text"]
    assert history.warn({"a": "text", "b": "other"}) == ["other"]


def test_a_steps_samples_are_added_to_the_history() -> None:
    history = History(steps=1, first_rewards=[0.1], rewards=[0.1], tokens=7, trained=8)
    groups = [[record(0, 0, 1.0, stop="length"), record(0, 1, None)], [record(1, 0, 0.0), record(1, 1, 0.0)]]
    prompts = sum(len(item.spec.prompt_ids) for group in groups for item in group)
    account(history, groups)
    assert history.rewards == history.first_rewards == [0.1, 1 / 3]
    assert history.steps == 2
    assert history.tokens == 7 + prompts + 4 * 3
    assert (history.failed, history.truncated, history.retries) == (1, 1, 0)


def test_what_is_told_of_a_long_job_stays_small() -> None:
    history = History()
    for step in range(100_000):
        history.rewarded(step / 100_000)
        history.evaluations.append((step, 0.5))
    told = history.abridged()
    assert (told.steps, told.first_rewards, told.rewards[-1]) == (100_000, [0.0, 1e-05, 2e-05], 0.99999)
    assert len(msgspec.msgpack.encode(told)) < 10_000
    assert len(history.rewards) == 100_000


def test_what_it_took_to_get_the_samples_is_counted_by_step_and_by_job() -> None:
    history = History(retries=1, deaths=10, moves=4)
    survivor = record(0, 0, 1.0, failures=1, deaths=3, resumes=2, moves=1, recomputed=50)
    poison = record(0, 1, None, deaths=2)
    metrics = account(history, [[survivor, poison]]).metrics()
    assert {name: value for name, value in metrics.items() if name.startswith("durability/")} == {
        "durability/retries": 1,
        "durability/deaths": 5,
        "durability/resumes": 2,
        "durability/moves": 1,
        "durability/recomputed_tokens": 50,
    }
    assert (history.retries, history.deaths, history.resumes, history.moves) == (2, 15, 2, 5)
    assert history.recomputed_tokens == 50


def kept(step: int, reward: float | None, *, incarnation: int = 1) -> Kept:
    return Kept(PolicyVersion(step, incarnation), reward)


def test_newest_and_best_checkpoints_are_kept() -> None:
    all_four = [kept(10, 0.9), kept(20, 0.2), kept(30, 0.4), kept(40, 0.3)]
    assert [version.step for version in droppable(all_four, keep_last=1, keep_best=1)] == [20, 30]
    assert [version.step for version in droppable(all_four, keep_last=2, keep_best=0)] == [10, 20]


def test_of_equally_good_checkpoints_the_first_is_best_and_unjudged_ones_go() -> None:
    all_four = [kept(10, 0.5), kept(20, 0.5), kept(30, None), kept(40, None)]
    assert [version.step for version in droppable(all_four, keep_last=1, keep_best=1)] == [20, 30]


def test_what_a_replaced_trainer_left_is_older_and_worse_than_the_same_of_its_successor() -> None:
    late = [kept(20, 0.5, incarnation=1), kept(30, 0.2, incarnation=1)]
    successors = [kept(20, 0.5, incarnation=2), kept(25, 0.3, incarnation=2)]
    assert droppable([*late, *successors], keep_last=1, keep_best=1) == [one.version for one in late]


def test_a_skipped_update_is_warned_of_by_the_learners_own_metric() -> None:
    assert "update_skipped" in warnings_of(summarise([]), {"updates_skipped": 1.0})
    assert "update_skipped" not in warnings_of(summarise([]), {"updates_skipped": 0.0})
