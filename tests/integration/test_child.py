"""The socket pair between a service and its compute process, with a real process at the other end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest

from libs.common.child import Child
from libs.common.errors import MessageError

ECHO = """
import os, sys
import msgspec
from libs.common.child import Parent, ParentGone, die_with_parent

class Said(msgspec.Struct, tag=True):
    text: str
    payload: bytes = b""

die_with_parent()
parent = Parent(msgspec.msgpack.Decoder(Said))
if "garbage" in sys.argv:
    import socket
    parent._socket.sendall(bytes([3, 0, 0, 0]) + b"xyz")
cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
parent.send(Said("|".join([" ".join(sys.argv[1:]), cores, os.environ["SAY"]])))
try:
    while True:
        for message in parent.receive(wait_s=None):
            parent.send(message)
except ParentGone:
    os._exit(7)
"""


class Said(msgspec.Struct, frozen=True, tag=True):
    """What both sides say in these tests."""

    text: str
    payload: bytes = b""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "echo_child.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    return "echo_child"


async def start(module: str, *arguments: str) -> Child[Said]:
    core = min(os.sched_getaffinity(0))
    receives = msgspec.msgpack.Decoder(Said)
    return await Child.start(module, *arguments, receives=receives, environment={"SAY": "hello"}, cores=[core])


async def test_messages_cross_whole_in_order_and_both_ways(echo: str) -> None:
    child = await start(echo, "one", "two")
    said = aiter(child.receive())
    assert (await anext(said)).text == f"one two|{min(os.sched_getaffinity(0))}|hello"
    sent = [Said(str(index), os.urandom(index * 50_000)) for index in range(20)]  # up to 1 MB: several reads each

    async def send_all() -> None:
        for message in sent:
            await child.send(message)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send_all)
        assert [await anext(said) for _ in sent] == sent
    await child.stop()
    assert await child.ended() == "exit code 7"  # it left by itself when the socket closed


async def test_a_child_that_is_killed_ends_the_stream(echo: str) -> None:
    child = await start(echo)
    said = aiter(child.receive())
    await anext(said)
    os.kill(child.pid, signal.SIGKILL)
    assert [message async for message in said] == []
    assert await child.ended() == "signal SIGKILL"
    await child.send(Said("to nobody"))  # no error: whoever listens learns it from the stream
    await child.stop()


async def test_a_child_that_ignores_the_socket_is_killed(echo: str) -> None:
    child = await start(echo)
    await anext(aiter(child.receive()))
    os.kill(child.pid, signal.SIGSTOP)
    started = time.monotonic()
    await child.stop(patience_s=0.2)
    assert time.monotonic() - started < 5
    assert await child.ended() == "signal SIGKILL"


async def test_garbage_is_one_clear_error(echo: str) -> None:
    child = await start(echo, "garbage")
    with pytest.raises(MessageError, match="undecodable"):
        await anext(aiter(child.receive()))
    await child.stop()


def test_a_child_dies_with_its_parent(echo: str, tmp_path: Path) -> None:
    parent = f"""
import asyncio, os, sys
import msgspec
from libs.common.child import Child
async def main():
    child = await Child.start({echo!r}, receives=msgspec.msgpack.Decoder(dict), environment={{"SAY": ""}}, cores=[0])
    print(child.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    owner = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    child = psutil.Process(pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    gone, alive = psutil.wait_procs([child], timeout=10)
    assert not alive
    assert gone
