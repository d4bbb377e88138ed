"""JetStream's streams and buckets as the table of subjects says they are, and what a stream holds."""

from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, DiscardPolicy, KeyValueConfig, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import BadRequestError

from libs.common import messages as m
from libs.common import subjects
from libs.common.connection import say
from libs.common.errors import MessageError

DEDUPE_WINDOW_S = 120.0


def stream_of(kind: type[m.Message]) -> str:
    """The name of the stream that keeps a message type.

    Raises:
        MessageError: none does.
    """
    stream = subjects.ROUTES[kind].stream
    if stream is None:
        raise MessageError(f"{kind.__name__} travels on no stream")
    return stream


async def create(js: JetStreamContext) -> None:
    """Make all streams and buckets what the table says; safe to repeat."""
    for stream in subjects.STREAMS:
        config = _config(stream)
        try:
            await js.add_stream(config)
        except BadRequestError:
            await js.update_stream(config)
    for bucket in subjects.BUCKETS.values():
        await js.create_key_value(KeyValueConfig(bucket=bucket, history=1, storage=StorageType.FILE))


async def contents(js: JetStreamContext, stream: str, subject: str) -> list[bytes]:
    """The payloads that a stream holds on a subject, oldest first."""
    subscription = await js.pull_subscribe(subject, stream=stream, config=ConsumerConfig(ack_policy=None))
    try:
        found: list[bytes] = []
        info = await subscription.consumer_info()
        while (remaining := (info.num_pending or 0) - len(found)) > 0:
            for msg in await subscription.fetch(min(remaining, 256), timeout=5):
                await say(msg.ack())
                found.append(msg.data)
        return found
    finally:
        await say(subscription.unsubscribe())


def _config(stream: subjects.Stream) -> StreamConfig:
    return StreamConfig(
        name=stream.name,
        subjects=list(stream.subjects),
        retention=RetentionPolicy.WORK_QUEUE if stream.work_queue else RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        duplicate_window=DEDUPE_WINDOW_S,
        max_msgs=stream.max_messages,
        max_age=stream.max_age_s or None,
        max_msgs_per_subject=1 if stream.one_per_subject else -1,
        discard=DiscardPolicy.NEW if stream.one_per_subject else DiscardPolicy.OLD,
        discard_new_per_subject=stream.one_per_subject,
        allow_direct=True,
    )
