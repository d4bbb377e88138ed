"""One pair of real servers for a whole test run, and clients on them for single tests."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import nats
import pytest
import structlog
from hypothesis import settings

from libs.common.bus import Bus
from libs.common.store import TrajectoryStore
from libs.node.servers import start_nats, start_valkey
from tests.store_servers import store_binaries

# How long one example takes says more about the machine than about the code; pytest's limit per test holds all the same.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def fresh_logging() -> Iterator[None]:
    """A command under test configures logging for its process; the next test must not write into its closed streams."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def servers_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run's servers keep their files."""
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def nats_url(servers_home: Path) -> Iterator[str]:
    """A NATS server with JetStream, shared by the run."""
    with start_nats(servers_home) as server:
        server.wait_until_answers()
        yield server.url


@pytest.fixture(scope="session")
def redis_url(servers_home: Path) -> Iterator[str]:
    """A Valkey server, shared by the run."""
    with start_valkey(servers_home) as server:
        server.wait_until_answers()
        yield server.url


@pytest.fixture(scope="module", params=store_binaries())
def store_binary(request: pytest.FixtureRequest) -> Path:
    """Each of the servers that the store has to work on, in turn."""
    binary: Path = request.param
    return binary


@pytest.fixture(scope="module")
def every_redis_url(tmp_path_factory: pytest.TempPathFactory, store_binary: Path) -> Iterator[str]:
    """A server of its own for a module of the store's tests."""
    with start_valkey(tmp_path_factory.mktemp("store"), binary=store_binary) as server:
        server.wait_until_answers()
        yield server.url


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    """A bus whose streams and buckets are set up and empty."""
    await _wipe(nats_url)
    bus = await Bus.connect(nats_url, instance=f"test-{uuid4().hex[:8]}", log=structlog.get_logger())
    await bus.set_up()
    yield bus
    await bus.close()


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[TrajectoryStore]:
    """A trajectory store; tests keep apart by their job uid."""
    store = await TrajectoryStore.connect(redis_url)
    await store.install(replace=True)
    yield store
    await store.close()


@pytest.fixture
def job_uid() -> str:
    """A job uid that no other test uses."""
    return f"job-{uuid4().hex[:8]}"


async def _wipe(url: str) -> None:
    client = await nats.connect(url)
    js = client.jetstream()
    for stream in await js.streams_info():
        assert stream.config.name
        await js.delete_stream(stream.config.name)
    await client.close()
