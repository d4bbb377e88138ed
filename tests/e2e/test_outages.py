"""Servers that go away in the middle of a job: nobody dies of it, and the job ends as if nothing had been."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from libs.node.node_file import read_node_file
from tests.e2e.conftest import NodeUnderTest

pytestmark = pytest.mark.timeout(300)

STEPS = 8
FROZEN_S = 10.0


def processes(node: NodeUnderTest, words: str) -> list[psutil.Process]:
    """The node's processes with ``words`` in their command line."""
    running = read_node_file(node.home)
    assert running is not None
    children = psutil.Process(running.pid).children(recursive=True)
    return [process for process in children if words in " ".join(process.cmdline())]


def servers(node: NodeUnderTest) -> list[psutil.Process]:
    return [*processes(node, "nats-server"), *processes(node, "valkey-server")]


def submit(node: NodeUnderTest, folder: Path, name: str) -> str:
    return node.submit(folder, name=name, train={"steps": STEPS, "seed": 3}, rollout={"lease_s": 1.0})


def until_under_way(node: NodeUnderTest, uid: str) -> None:
    deadline = time.monotonic() + 90
    while len(node.show(uid)["rewards"]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(node: NodeUnderTest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same job, left alone."""
    ended = node.wait(submit(node, tmp_path_factory.mktemp("undisturbed"), "undisturbed"))
    assert ended["status"] == "succeeded", ended
    return ended


@pytest.mark.parametrize("outage", ["frozen", "killed"])
def test_a_job_outlives_an_outage_of_both_servers(
    node: NodeUnderTest, tmp_path: Path, outage: str, undisturbed: dict[str, Any]
) -> None:
    uid = submit(node, tmp_path, outage)
    until_under_way(node, uid)
    workers = {one.pid for role in ("trainer", "reward", "rollout") for one in processes(node, f"services.{role} ")}
    for server in servers(node):
        os.kill(server.pid, signal.SIGSTOP if outage == "frozen" else signal.SIGKILL)
    if outage == "frozen":
        time.sleep(FROZEN_S)
        for server in servers(node):
            os.kill(server.pid, signal.SIGCONT)
    ended = node.wait(uid, timeout_s=150)
    assert ended["status"] == "succeeded", ended
    assert ended["rewards"] == undisturbed["rewards"]
    assert ended["trajectories_trained"] == STEPS * 16
    assert workers <= {process.pid for process in processes(node, "services.")}, "nobody had to be started again"
