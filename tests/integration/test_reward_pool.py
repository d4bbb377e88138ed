"""Scorers in real worker processes: whatever one does, every sample gets one verdict and the others still score."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from libs.common.errors import RewardError
from libs.common.sections import RewardSection
from libs.rewards.resolve import Scorer, resolve
from libs.rewards.score import Outcome
from services.reward.pool import ScorerPool

PLUGIN = '''
import os, re, signal, sys, time
from pathlib import Path

class Odd(Exception):
    """Can't be unpickled, and has no text."""
    def __init__(self, a, b): super().__init__()
    def __str__(self): raise RuntimeError("no text")

class OddFloat(float): pass

def behave(completion, answer, row, *, note=""):
    if completion == "loop":
        while True: pass
    if completion == "native loop": re.match(r"(a+)+$", "a" * 64 + "b")
    if completion == "sleep": time.sleep(60)
    if completion == "die": os.kill(os.getpid(), signal.SIGKILL)
    if completion == "die once":
        if os.path.exists(row["mark"]): return 0.5
        Path(row["mark"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "exit": os._exit(3)
    if completion == "sys.exit": sys.exit(4)
    if completion == "raise": raise ValueError("bad\\nluck")
    if completion == "odd": raise Odd(1, 2)
    if completion == "pid": return float(os.getpid())
    if completion == "note": return 1, note
    if completion == "row": return row["reward"], answer
    return {"nan": float("nan"), "inf": float("-inf"), "none": None, "text": "1", "huge": 10**400, "list": [1, "a"],
            "true": True, "odd float": OddFloat(0.5), "pair": (0.25, "so so"), "bad pair": ("a", "b")}[completion]
'''


def user_scorer(folder: Path, **args: Any) -> Scorer:
    (folder / "plug.py").write_text(PLUGIN)
    section = RewardSection(function="plug:behave", args=args)
    return resolve(section, allow=["plug.*"], folders=[str(folder)])


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[ScorerPool]:
    async with ScorerPool(user_scorer(tmp_path, note="noted"), timeout_s=1.0, workers=2) as running:
        yield running


async def worker_pids(pool: ScorerPool) -> set[int]:
    verdicts = await asyncio.gather(*(pool.score("pid", "", {}) for _ in range(20)))
    return {int(verdict.reward or 0) for verdict in verdicts}


def gone(pid: int) -> bool:
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


async def test_numbers_and_reasons_come_back(pool: ScorerPool) -> None:
    verdict = await pool.score("row", "why", {"reward": 0.75})
    assert (verdict.outcome, verdict.reward, verdict.reason) == (Outcome.SCORED, 0.75, "why")
    assert (await pool.score("note", "", {})).reason == "noted"
    assert (await pool.score("pair", "", {})).reason == "so so"
    assert (await pool.score("true", "", {})).reward == 1.0
    assert type((await pool.score("odd float", "", {})).reward) is float


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("nan", "returned nan, not a finite number"),
        ("inf", "returned -inf, not a finite number"),
        ("none", "returned NoneType, not a number"),
        ("text", "returned str, not a number"),
        ("list", "returned list, not a number"),
        ("bad pair", "returned tuple, not a number"),
        ("huge", "raised OverflowError"),
        ("raise", "raised ValueError: bad"),
        ("odd", "raised plug.Odd"),
        ("sys.exit", "raised SystemExit: 4"),
        ("exit", "ended its process with exit status 3"),
    ],
)
async def test_a_bad_scorer_fails_its_sample_with_a_reason(tmp_path: Path, completion: str, reason: str) -> None:
    async with ScorerPool(user_scorer(tmp_path), timeout_s=5.0) as pool:
        verdict = await pool.score(completion, "", {})
        assert verdict.outcome is Outcome.FAILED
        assert verdict.reward is None
        assert reason in verdict.reason
        assert "\n" not in verdict.reason
        assert (await pool.score("pair", "", {})).reward == 0.25


async def test_loops_are_killed_and_reported_and_the_others_still_score(pool: ScorerPool) -> None:
    start = time.monotonic()
    looping = ["loop", "native loop", "sleep"]
    verdicts = await asyncio.gather(*(pool.score(text, "", {}) for text in [*looping, *["pair"] * 20]))
    assert {v.outcome for v in verdicts[:3]} == {Outcome.FAILED}
    assert {v.reason for v in verdicts[:3]} == {"the scorer took longer than 1 s and was stopped"}
    assert [v.reward for v in verdicts[3:]] == [0.25] * 20
    assert time.monotonic() - start < 20


async def test_a_killed_worker_costs_one_retry(pool: ScorerPool, tmp_path: Path) -> None:
    verdict = await pool.score("die once", "", {"mark": str(tmp_path / "mark")})
    assert (verdict.outcome, verdict.reward) == (Outcome.SCORED, 0.5)


async def test_a_sample_whose_workers_are_killed_twice_is_lost(pool: ScorerPool) -> None:
    verdict, other = await asyncio.gather(pool.score("die", "", {}), pool.score("pair", "", {}))
    assert (verdict.outcome, verdict.reward) == (Outcome.LOST, None)
    assert verdict.reason == "a worker process was killed by signal 9, 2 times"
    assert other.reward == 0.25


async def test_the_pool_survives_the_death_of_its_idle_workers(pool: ScorerPool) -> None:
    for pid in await worker_pids(pool):
        os.kill(pid, signal.SIGKILL)
    assert (await pool.score("pair", "", {})).reward == 0.25
    await asyncio.sleep(0.5)
    assert (await pool.score("pair", "", {})).reward == 0.25


async def test_a_cancelled_score_frees_its_worker(tmp_path: Path) -> None:
    async with ScorerPool(user_scorer(tmp_path), timeout_s=30.0) as pool:
        pids = await worker_pids(pool)
        task = asyncio.create_task(pool.score("sleep", "", {}))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await asyncio.wait_for(pool.score("pair", "", {}), 20)).reward == 0.25
        assert await asyncio.to_thread(gone, pids.pop())


async def test_workers_start_at_first_use_and_end_with_close(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    pool = ScorerPool(user_scorer(tmp_path), timeout_s=5.0, workers=2)
    assert set(psutil.Process().children()) == before
    pids = await worker_pids(pool)
    await pool.close()
    assert pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_user_modules_stay_out_of_this_process(pool: ScorerPool) -> None:
    await pool.score("odd", "", {})
    assert "plug" not in sys.modules


@pytest.mark.parametrize(
    ("scorer", "problem"),
    [
        (Scorer(name="n", target="no_such_module:f"), "No module named 'no_such_module'"),
        (Scorer(name="n", target="math:no_such"), "has no attribute 'no_such'"),
        (Scorer(name="n", target="libs.rewards.scorers.exact:score", args={"x": 1}), "unexpected keyword argument 'x'"),
    ],
)
async def test_a_scorer_that_cannot_be_loaded_is_an_error_not_a_reward(scorer: Scorer, problem: str) -> None:
    async with ScorerPool(scorer, timeout_s=5.0) as pool:
        with pytest.raises(RewardError, match=problem):
            await pool.score("1", "1", {})


async def test_a_module_that_never_finishes_importing_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text("import time\ntime.sleep(600)\n")
    scorer = Scorer(name="stuck:f", target="stuck:f", folders=(str(tmp_path),))
    async with ScorerPool(scorer, timeout_s=0.5, load_timeout_s=1.0) as pool:
        verdict = await pool.score("1", "1", {})
    assert verdict.outcome is Outcome.LOST
    assert "within 1.5 s" in verdict.reason


async def test_importing_does_not_count_against_the_limit(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1)\ndef f(completion, answer, row): return 1.0\n")
    scorer = Scorer(name="slow:f", target="slow:f", folders=(str(tmp_path),))
    async with ScorerPool(scorer, timeout_s=0.5) as pool:
        assert (await pool.score("", "", {})).reward == 1.0


async def test_built_in_scorers_run_in_workers() -> None:
    async with ScorerPool(resolve(RewardSection(function="gsm8k")), timeout_s=5.0) as pool:
        assert (await pool.score("#### 7", "so\n#### 7", {})).reward == 1.0
        wrong = await pool.score("none", "7", {})
        assert (wrong.outcome, wrong.reward) == (Outcome.SCORED, 0.0)
        faulty = await pool.score("#### 7", "seven", {})
        assert (faulty.outcome, faulty.reward) == (Outcome.FAILED, None)
        assert "reference answer 'seven'" in faulty.reason


PARENT = """
import asyncio, sys, msgspec
from services.reward.pool import ScorerPool
from libs.rewards.resolve import Scorer

async def main():
    scorer = msgspec.json.decode(sys.argv[1], type=Scorer)
    pool = ScorerPool(scorer, timeout_s=600.0, workers=2)
    pid = int((await pool.score("pid", "", {})).reward)
    print(pid, flush=True)
    await asyncio.gather(pool.score("native loop", "", {}), pool.score("loop", "", {}))

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a busy process to its parent")
def test_busy_workers_die_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    argument = msgspec.json.encode(user_scorer(tmp_path)).decode()
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    with subprocess.Popen([sys.executable, str(script), argument], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        time.sleep(1.0)
        children = psutil.Process(parent.pid).children(recursive=True)
        workers = [child.pid for child in children if "spawn_main" in " ".join(child.cmdline())]
        parent.kill()
    assert len(workers) == 2
    for pid in workers:
        assert gone(pid)
