"""What an instance is asked over a real bus: carried out once, however often it has to be asked."""

import structlog

from libs.common import messages as m
from libs.common.bus import Bus
from libs.common.endpoints import Endpoints


class Source:
    """An instance that is asked to let go of trajectories, and loses the asker's connection before it answers."""

    def __init__(self, asker: Bus) -> None:
        self._asker = asker
        self.released: list[int] = []

    async def release(self, request: m.ReleaseTrajectories) -> m.Answer:
        self.released.append(request.count)
        await self._asker.client.force_reconnect()
        return m.Answer(sender="source", count=sum(self.released))


async def test_a_request_whose_answer_was_lost_is_answered_again_and_carried_out_once(bus: Bus, nats_url: str) -> None:
    asker = await Bus.connect(nats_url, instance="asker", log=structlog.get_logger())
    endpoints = await Endpoints.register(bus, "rollout", instance="source", log=structlog.get_logger())
    source = Source(asker)
    await endpoints.answer(m.ReleaseTrajectories, source.release)
    request = m.ReleaseTrajectories(sender="asker", job_uid="j", target="", count=3)
    assert (await asker.request("source", request)).count == 3
    assert source.released == [3]
    assert (await asker.request("source", request)).count == 6, "asked once more, on purpose, it is another request"
    assert source.released == [3, 3]
    await asker.close()
