"""The embedded node as a user runs it: up, found, used, and gone without a trace however it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from libs.common.errors import NodeError
from libs.node.node_file import NodeFile, read_node_file, sole_node
from libs.node.servers import start_nats, start_valkey

UP_S = 60.0
GONE_S = 30.0
ONE_ROLLOUT = "[rollout]\ninstances = 1\n"

pytestmark = pytest.mark.timeout(180)


def jigsaw(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "libs.cli.main", *(str(argument) for argument in arguments)]


def call(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(jigsaw(*arguments), capture_output=True, text=True, timeout=120, check=False)


def answer(*arguments: object) -> Any:
    done = call(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def wait_for(condition: Callable[[], Any], timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it doesn't come true"
        time.sleep(0.05)
    return found


def family(pid: int) -> list[psutil.Process]:
    """Everything that a process has started."""
    return psutil.Process(pid).children(recursive=True)


def start(tmp_path: Path) -> tuple["subprocess.Popen[bytes]", Path, NodeFile]:
    """A node in the foreground, up."""
    home, settings = tmp_path / "home", tmp_path / "node.toml"
    settings.write_text(ONE_ROLLOUT)
    said = tmp_path / "said.txt"
    with said.open("wb") as output:
        command = jigsaw("up", "--home", home, "--settings", settings)
        process = subprocess.Popen(command, stdout=output, stderr=output)

    def up() -> NodeFile | None:
        assert process.poll() is None, said.read_text()
        return read_node_file(home)

    return process, home, wait_for(up, UP_S)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The home of a node that is up, in the background."""
    folder = tmp_path_factory.mktemp("node")
    settings = folder / "node.toml"
    settings.write_text(ONE_ROLLOUT + "[scheduler]\ninstances = 2\n")
    done = call("up", "--detach", "--home", folder / "home", "--settings", settings)
    assert done.returncode == 0, done.stderr
    node = read_node_file(folder / "home")
    assert node is not None
    processes = family(node.pid)
    yield folder / "home"
    done = call("down", "--home", folder / "home")
    assert done.returncode == 0, done.stderr
    assert read_node_file(folder / "home") is None
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert alive == []


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """A job that is accepted, because its model looks like one, and that its trainer can't load."""
    model = tmp_path / "model"
    model.mkdir()
    tokenizer = Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "config.json").write_text('{"max_position_embeddings": 64}')
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    job = {"name": "hollow", "model": {"path": "model"}, "data": {"path": "rows.jsonl"}}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job))
    return path


def test_servers_refuse_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for launch, name in ((start_nats, "NATS"), (start_valkey, "Valkey")):
            with pytest.raises(NodeError, match=f"^port {port} for {name} is taken"):
                launch(tmp_path, port=port)


def test_servers_keep_what_they_are_told_across_a_restart(tmp_path: Path) -> None:
    def ask(port: int, command: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(command)
            return connection.recv(64)

    for command, expected in ((b"SET k v\r\n", b"+OK\r\n"), (b"GET k\r\n", b"$1\r\nv\r\n")):
        with start_valkey(tmp_path) as server:
            server.wait_until_answers()
            assert ask(server.port, command) == expected
        assert not psutil.pid_exists(server.pid)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with start_nats(tmp_path) as server:
        server.kill()
        with pytest.raises(NodeError, match="NATS ended with code"):
            server.wait_until_answers()


def test_one_home_has_one_node(tmp_path: Path) -> None:
    with sole_node(tmp_path), pytest.raises(NodeError, match=r"a node is running in .* already"), sole_node(tmp_path):
        pass
    with sole_node(tmp_path):
        pass


def test_a_home_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = call("up", "--home", tmp_path / "file" / "home")
    assert done.returncode == 1
    assert done.stderr.startswith("jigsaw: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_takes_everything_down_in_order(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process, home, node = start(tmp_path)
    processes = family(node.pid)
    assert len(processes) >= 6  # two servers and four services
    process.send_signal(number)
    assert process.wait(GONE_S) == code
    _, alive = psutil.wait_procs(processes, timeout=1)
    assert alive == []
    assert read_node_file(home) is None
    for service in ("scheduler-0", "reward-0", "trainer-0", "rollout-0"):
        assert "service_stopped" in (home / "logs" / f"{service}.log").read_text(), f"{service} has drained"


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    process, _, node = start(tmp_path)
    processes = family(node.pid)
    (reward,) = [one for one in processes if "services.reward" in one.cmdline()]
    reward.suspend()  # it won't drain
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(GONE_S) == 130
    assert time.monotonic() - began < 5.0
    _, alive = psutil.wait_procs(processes, timeout=1)
    assert alive == []


def test_a_killed_supervisor_leaves_nothing_running(tmp_path: Path) -> None:
    process, home, node = start(tmp_path)
    processes = family(node.pid)
    process.kill()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
    process.wait(5)
    assert read_node_file(home) is None
    done = call("down", "--home", home)
    assert (done.returncode, done.stderr) == (1, f"jigsaw: no node is up in {home}\n")


def test_a_second_node_on_the_home_is_refused(home: Path) -> None:
    done = call("up", "--home", home)
    assert done.returncode == 1
    assert done.stderr.startswith(f"jigsaw: a node is running in {home} already (process ")


def test_a_taken_port_takes_the_node_down_with_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = call("up", "--detach", "--home", tmp_path / "home", "--redis-port", port)
    assert done.returncode == 1
    assert done.stderr == f"jigsaw: port {port} for Valkey is taken: stop what listens there or choose another\n"
    assert not [one for one in psutil.process_iter() if str(tmp_path) in " ".join(_command(one))]


def test_a_service_that_dies_comes_back(home: Path) -> None:
    node = read_node_file(home)
    assert node is not None

    def reward() -> psutil.Process | None:
        return next((one for one in family(node.pid) if "services.reward" in _command(one)), None)

    before = reward()
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)
    after = wait_for(lambda: (found := reward()) and found.pid != before.pid and found, 15)
    assert after.is_running()


def test_servers_that_die_come_back_under_the_services(home: Path) -> None:
    node = read_node_file(home)
    assert node is not None
    services = {one.pid for one in family(node.pid) if "services." in " ".join(_command(one))}

    def server(name: str) -> psutil.Process | None:
        return next((one for one in family(node.pid) if name in " ".join(_command(one)[:1])), None)

    for name in ("nats-server", "valkey-server"):
        before = server(name)
        assert before is not None
        os.kill(before.pid, signal.SIGKILL)
        wait_for(lambda old=before.pid, name=name: (found := server(name)) and found.pid != old and found, 15)  # type: ignore[misc]
    wait_for(lambda: len(answer("workers", "--home", home)["workers"]) == 2, 20)
    assert answer("jobs", "--home", home) is not None
    assert services <= {one.pid for one in family(node.pid)}, "no service had to be started again"


def test_a_server_that_keeps_dying_takes_the_node_down_with_one_line(tmp_path: Path) -> None:
    process, home, node = start(tmp_path)
    processes = family(node.pid)
    (server,) = [one for one in processes if "nats-server" in " ".join(_command(one)[:1])]
    (home / "nats" / "nats.conf").write_text("nonsense {")
    server.kill()
    assert process.wait(120) == 1
    assert "jigsaw: NATS keeps dying (code 1): " in (tmp_path / "said.txt").read_text()
    _, alive = psutil.wait_procs(processes, timeout=1)
    assert alive == []


def test_the_node_tells_what_it_has(home: Path) -> None:
    told = wait_for(lambda: len((found := answer("workers", "--home", home))["workers"]) == 2 and found, 20)
    assert sorted(worker["role"] for worker in told["workers"]) == ["rollout", "trainer"]
    node = read_node_file(home)
    assert node is not None
    schedulers = [instance for instance in node.instances if instance.startswith("scheduler")]
    assert schedulers == ["scheduler-0", "scheduler-1"]
    assert told["scheduler"]["sender"] in schedulers
    assert call("workers", "--home", home).stdout.endswith(" leads\n")
    assert answer("dead-letters", "--home", home) == {"dead_letters": []}


def test_a_job_with_a_bad_row_queues_nothing(home: Path, job_file: Path) -> None:
    (job_file.parent / "rows.jsonl").write_text('{"prompt": "a"}\n')
    before = answer("jobs", "--home", home)
    done = call("submit", job_file, "--home", home)
    assert done.returncode == 1
    assert done.stderr.startswith(f"jigsaw: {job_file.parent / 'rows.jsonl'}: row 1: answer: is missing")
    assert answer("jobs", "--home", home) == before


def test_a_prompt_longer_than_the_context_queues_nothing(home: Path, job_file: Path) -> None:
    (job_file.parent / "rows.jsonl").write_text(json.dumps({"prompt": "a " * 99, "answer": "1"}))
    done = call("submit", job_file, "--home", home)
    assert done.returncode == 1
    assert "row 1: prompt: the prompt has" in done.stderr
    assert done.stderr.count("\n") == 1


def test_submitted_jobs_are_listed_cancelled_and_end_once(home: Path, job_file: Path) -> None:
    uid = answer("submit", job_file, "--steps", 3, "--home", home)["job"]
    assert uid.startswith("hollow-")
    shown = answer("show", uid, "--home", home)
    assert (shown["name"], shown["steps_total"], shown["uid"]) == ("hollow", 3, uid)
    other = answer("submit", job_file, "--home", home)["job"]
    done = call("cancel", other, "--home", home)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{other} cancelled\n"
    again = call("cancel", other, "--home", home)
    assert (again.returncode, again.stderr) == (1, f"jigsaw: {other} has ended already: cancelled\n")
    watched = call("watch", uid, "--home", home)
    assert watched.returncode == 0, watched.stderr
    listed = {job["uid"]: job for job in answer("jobs", "--home", home)["jobs"]}
    assert listed[other]["status"] == "cancelled"
    assert listed[uid]["status"] == "failed"
    assert listed[uid]["reason"]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
