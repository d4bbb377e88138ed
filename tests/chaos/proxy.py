"""A wire that can be cut: forwards TCP to a server, until it is told to let nothing through any more."""

import asyncio
import contextlib
from typing import Self

import anyio


class Wire:
    """Forwards what connects to its port. While it is cut nothing gets through and nobody is told, as on a real network."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._whole = anyio.Event()
        self._whole.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @classmethod
    async def lay(cls, target_port: int) -> Self:
        """A wire to a port of this machine."""
        wire = cls(target_port)
        wire._server = await asyncio.start_server(wire._connect, "127.0.0.1", 0)
        return wire

    @property
    def port(self) -> int:
        """Where to connect instead of to the server."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        """Let nothing through; it waits, as packets do that are sent again and again."""
        self._whole = anyio.Event()

    def mend(self, *, torn: bool) -> None:
        """Let through what waits; or, if it was ``torn``, that is lost and so are the connections, as after a long time."""
        if torn:
            for connection in list(self._connections):
                connection.cancel()
        self._whole.set()

    async def close(self) -> None:
        """End all connections and accept no more."""
        assert self._server is not None
        self._server.close()
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._whole.wait()
            await self._forward_both(reader, writer, *await self._reach_server())
        except OSError:
            pass  # there is no server now, and the client learns it by the closed connection
        except asyncio.CancelledError:
            pass  # by this wire alone, and asyncio's own callback trips over a connection's task that was cancelled
        finally:
            self._connections.discard(task)
            writer.close()

    async def _reach_server(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect; what is opened for a connection that was cancelled meanwhile is closed."""
        opening = asyncio.ensure_future(asyncio.open_connection("127.0.0.1", self._target_port))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close)
            raise

    async def _forward_both(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        their_reader: asyncio.StreamReader,
        their_writer: asyncio.StreamWriter,
    ) -> None:
        """Until either side ends it."""
        ways = [
            asyncio.ensure_future(self._forward(reader, their_writer)),
            asyncio.ensure_future(self._forward(their_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            their_writer.close()  # first, because another cancellation would cut the rest short
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self._whole.wait()
                target.write(data)
                await target.drain()


def _close(opening: "asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[1].close()
