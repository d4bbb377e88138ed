"""reasoning-gym tasks as datasets, and their scorer, with the real library."""

import pytest

from libs.common.errors import DataError
from libs.common.sections import DataSection, RewardSection
from libs.datasets.load import check, load
from libs.rewards.resolve import resolve
from libs.rewards.scorers import reasoning_gym as scorer
from services.reward.pool import ScorerPool

pytest.importorskip("reasoning_gym", reason="reasoning-gym isn't installed")

ARGS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
PRODUCTS = DataSection(task="products", args=ARGS, size=300, seed=1)


def part(*, skip: int = 0, take: int | None = None) -> DataSection:
    return DataSection(task="products", args=ARGS, size=300, seed=1, skip=skip, take=take, split_seed=5)


def test_questions_are_distinct_so_that_held_out_ones_are_unseen() -> None:
    rows = load(PRODUCTS)
    assert len({row.prompt for row in rows}) == len(rows) == check(PRODUCTS).rows
    assert 90 <= len(rows) <= 100
    train = {row.prompt for row in load(part(take=70))}
    test = {row.prompt for row in load(part(skip=70))}
    assert len(train) == 70
    assert test
    assert not train & test


def test_the_same_settings_draw_the_same_rows() -> None:
    assert load(PRODUCTS) == load(PRODUCTS)
    assert load(PRODUCTS) != load(DataSection(task="products", args=ARGS, size=300, seed=2))


def test_rows_carry_what_the_scorer_needs() -> None:
    for row in load(PRODUCTS)[:5]:
        assert (row.fields["task"], row.fields["args"]) == ("products", ARGS)
        assert row.fields["metadata"]["source_dataset"] == "products"
        right = int(row.answer)
        assert scorer.score(f"It is {right}.", row.answer, row.fields).reward == 1
        assert scorer.score(f"{right}.0", row.answer, row.fields).reward == 1
        assert scorer.score(f"It is {right + 1}.", row.answer, row.fields).reward < 1


def test_answers_that_are_words() -> None:
    (row,) = load(DataSection(task="word_sorting", size=1))
    answer = row.answer
    assert scorer.score(f"Hm.\nAnswer: {answer}\n", answer, row.fields, extract="marker").reward == 1
    assert scorer.score(f" {answer} ", answer, row.fields, extract="whole").reward == 1


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (DataSection(task="product"), "task product: reasoning-gym has no such task; did you mean 'products'"),
        (DataSection(task="products", args={"terms": 2}), "task products: args: not accepted: .*'terms'"),
        (DataSection(task="products", args={"min_terms": 9}), "task products: args: not accepted: max_terms must be"),
        (DataSection(task="products", args={"seed": 9}), r"task products: args.seed: belongs in data.seed"),
        (DataSection(task="rearc", size=1), "its rows can't be scored once stored as JSON"),
    ],
)
def test_unusable_tasks(section: DataSection, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        check(section)


async def test_the_scorer_runs_in_a_worker_with_the_import_outside_its_limit() -> None:
    row = load(PRODUCTS)[0]
    async with ScorerPool(resolve(RewardSection(function="reasoning_gym")), timeout_s=1.0) as pool:
        verdict = await pool.score(f"So {row.answer}", row.answer, row.fields)
    assert verdict.reward == 1.0
