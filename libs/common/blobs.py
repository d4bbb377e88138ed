"""Datasets on the bus: content-addressed files in the object store, so that services need not share the user's disk.

A blob's name is its sha256; what is stored under it never changes, and a download is checked against it. The file's ending
travels along, because it says how the file is read.
"""

import asyncio
import hashlib
import os
from pathlib import Path

from nats.errors import Error as NatsError
from nats.js.api import ObjectInfo, ObjectMeta, ObjectMetaOptions
from nats.js.errors import ObjectNotFoundError

from libs.common.bus import Bus
from libs.common.errors import JigsawError
from libs.common.subjects import BLOBS

CHUNK_BYTES = 512 * 1024
CHUNK_WAIT_S = 10.0


async def upload(bus: Bus, path: Path) -> str:
    """Store a file; returns its digest. One that is stored already isn't sent again.

    Raises:
        JigsawError: the file can't be read, or the bus doesn't take it.
    """
    try:
        digest = await asyncio.to_thread(_sha256, path)
        await bus.ask(lambda: _put(bus, digest, path))
    except OSError as error:
        raise JigsawError(f"{path} can't be read: {error.strerror}") from None
    except NatsError as error:
        raise JigsawError(f"{path} can't be uploaded: {error or type(error).__name__}") from None
    return digest


async def download(bus: Bus, digest: str, folder: Path) -> Path:
    """The file that was uploaded under a digest, in ``folder``; one that is there already isn't fetched again.

    Raises:
        JigsawError: there is no such blob, it arrives damaged, or it can't be written.
    """
    try:
        info = await bus.ask(lambda: _info(bus, digest))
        if info is None:
            raise JigsawError(f"the bus holds no dataset with digest {digest}")
        target = folder / f"{digest}{info.description or ''}"
        if not target.exists():
            await bus.ask(lambda: _fetch(bus, info, target))
    except NatsError as error:
        raise JigsawError(f"dataset {digest} can't be fetched: {error or type(error).__name__}") from None
    except OSError as error:
        raise JigsawError(f"{folder} can't be written: {error.strerror}") from None
    if target.stem != await asyncio.to_thread(_sha256, target):
        target.unlink()
        raise JigsawError(f"dataset {digest} is damaged: its sha256 differs")
    return target


async def _fetch(bus: Bus, info: ObjectInfo, target: Path) -> None:
    """Write the chunks as they come; the client's own ``get`` joins them anew for each, which is quadratic."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    subject = f"$O.{BLOBS}.C.{info.nuid}"
    subscription = await bus.js.subscribe(subject, stream=f"OBJ_{BLOBS}", ordered_consumer=True)
    try:
        with aside.open("wb") as file:
            for _ in range(info.chunks or 0):
                message = await subscription.next_msg(timeout=CHUNK_WAIT_S)
                file.write(message.data)
        aside.rename(target)
    finally:
        aside.unlink(missing_ok=True)
        await subscription.unsubscribe()


async def _put(bus: Bus, digest: str, path: Path) -> None:
    if await _info(bus, digest) is None:
        store = await bus.js.object_store(BLOBS)
        meta = ObjectMeta(description=path.suffix, options=ObjectMetaOptions(max_chunk_size=CHUNK_BYTES))
        with path.open("rb") as file:
            await store.put(digest, file, meta)


async def _info(bus: Bus, digest: str) -> ObjectInfo | None:
    try:
        return await (await bus.js.object_store(BLOBS)).get_info(digest)
    except ObjectNotFoundError:
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
