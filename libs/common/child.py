"""A compute process and the service that owns it, joined by a socket pair that carries msgspec messages.

The service keeps the connections and the leases, the child keeps the engine or the optimiser: so heavy compute never
blocks a lease renewal, and the child's cores can be set apart. A child dies with its parent, by the kernel's word and by
the closed socket.
"""

import asyncio
import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Generic, Self, TypeVar

import msgspec

from libs.common.errors import JigsawError, MessageError

_HEADER = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1
FD_VARIABLE = "JIGSAW_CHILD_FD"

Received = TypeVar("Received")


class ParentGone(JigsawError):
    """The service that owns this child closed the socket: time to end."""


def die_with_parent() -> None:
    """Ask the kernel, where it is Linux, to kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child(Generic[Received]):
    """A compute process as its service sees it.

    Args:
        receives: decoder of what the child says.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        receives: "msgspec.msgpack.Decoder[Received]",
    ) -> None:
        self._process, (self._reader, self._writer), self._decoder = process, streams, receives
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def start(
        cls,
        module: str,
        *arguments: str,
        receives: "msgspec.msgpack.Decoder[Received]",
        environment: Mapping[str, str],
        cores: Sequence[int],
    ) -> Self:
        """Run ``python -m module arguments`` bound to ``cores``, with the environment added to this process's own."""
        ours, theirs = socket.socketpair()
        bound = set(cores)

        def before_exec() -> None:
            die_with_parent()
            os.sched_setaffinity(0, bound)

        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            env={**os.environ, **environment, FD_VARIABLE: str(theirs.fileno())},
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            preexec_fn=before_exec,
        )
        theirs.close()
        return cls(process, await asyncio.open_connection(sock=ours), receives)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def post(self, message: msgspec.Struct) -> None:
        """Queue a message to the child without waiting; the caller bounds how many there can be."""
        data = self._encoder.encode(message)
        self._writer.write(_HEADER.pack(len(data)) + data)

    async def send(self, message: msgspec.Struct) -> None:
        """Hand a message to the child; waits while its buffer is full."""
        self.post(message)
        try:
            await self._writer.drain()
        except ConnectionError:
            return  # the reader of receive() learns of the child's end and tells why

    async def receive(self) -> AsyncIterator[Received]:
        """What the child says, until it ends."""
        while True:
            try:
                (length,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                yield self._decoder.decode(await self._reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            except msgspec.MsgspecError as error:
                raise MessageError(f"child {self.pid} said something undecodable: {error}") from error

    async def ended(self) -> str:
        """Wait for its end, and say how it ended in words."""
        code = await self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def stop(self, *, patience_s: float = 5.0) -> None:
        """Close the socket, which tells the child to end; kill it if it doesn't. Needed also after it ended by itself."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        try:
            await asyncio.wait_for(self._process.wait(), patience_s)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


class Parent(Generic[Received]):
    """The service as its child sees it; blocking, because a compute loop has nothing else to do.

    Args:
        receives: decoder of what the service says.
    """

    def __init__(self, receives: "msgspec.msgpack.Decoder[Received]") -> None:
        self._socket = socket.socket(fileno=int(os.environ.pop(FD_VARIABLE)))
        self._decoder, self._encoder = receives, msgspec.msgpack.Encoder()
        self._buffer = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        """Tell the service something."""
        data = self._encoder.encode(message)
        try:
            self._socket.sendall(_HEADER.pack(len(data)) + data)
        except ConnectionError:
            raise ParentGone("the owning service is gone") from None

    def receive(self, *, wait_s: float | None) -> list[Received]:
        """All messages that have come; waits up to ``wait_s`` for the first (None: for as long as it takes).

        Raises:
            ParentGone: the service closed the socket.
        """
        messages: list[Received] = []
        while not messages:
            ready, _, _ = select.select([self._socket], [], [], wait_s)
            if not ready:
                return []
            while ready:
                data = self._socket.recv(1 << 20)
                if not data:
                    raise ParentGone("the owning service is gone")
                self._buffer += data
                ready, _, _ = select.select([self._socket], [], [], 0)
            messages = self._complete()
        return messages

    def _complete(self) -> list[Received]:
        """Take whole messages out of the buffer."""
        messages, at = [], 0
        while len(self._buffer) - at >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer, at)
            end = at + _HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(bytes(self._buffer[at + _HEADER.size : end])))
            at = end
        del self._buffer[:at]
        return messages
