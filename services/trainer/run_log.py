"""What a job leaves for people to look at: TensorBoard events, the same numbers as JSON lines, and every sample as text.

Written by the service process, without torch: TensorBoard's own event writer is enough.
"""

import errno
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from libs.common.errors import JigsawError
from libs.common.samples import SampleLine, write_samples
from libs.common.trajectory import Record


class _StepOf(msgspec.Struct, frozen=True):
    """What is needed of a line of numbers to tell where it belongs."""

    step: int


_STEP_OF = msgspec.json.Decoder(_StepOf)


class RunLog:
    """The log of one job. Its methods write files: call them in a thread.

    Args:
        folder: of the job; TensorBoard's files go to ``tensorboard``, samples to ``samples``, numbers to
            ``metrics.jsonl``.
        start: the step that comes first; what is there of it and later ones is done again.

    Raises:
        JigsawError: the folder can't be written.
    """

    def __init__(self, folder: Path, start: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder, self._path = folder, folder / "metrics.jsonl"
        with _writable(folder):
            self._events: Any = EventFileWriter(str(folder / "tensorboard"))
            self._events.add_event(Event(step=start, session_log=SessionLog(status=SessionLog.START)))
            _forget_steps(self._path, start)
            # Opened once: should this trainer be frozen and replaced, its successor puts another file in this one's place.
            self._metrics = self._path.open("ab", buffering=0)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        line = msgspec.json.encode({"step": step, "time": time.time(), **values}) + b"\n"
        with _writable(self._folder):
            self._event(step, Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]))
            if self._metrics.write(line) < len(line):  # the disk took what it had room for
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def samples(self, step: int, records: Sequence[Record], *, shown: int) -> None:
        """All samples of a step as lines in a file, the first ``shown`` of them as text in TensorBoard, too."""
        lines = [_line(record) for record in records]
        write_samples(self._folder, step, lines)
        with _writable(self._folder):
            for index, line in enumerate(lines[:shown]):
                self._text(step, f"samples/{index}", _markdown(line))

    def close(self) -> None:
        """Flush and close."""
        with _writable(self._folder):
            self._events.close()
            self._metrics.close()

    def _text(self, step: int, tag: str, text: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._event(step, text_pb(tag, text))

    def _event(self, step: int, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._events.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._events.flush()


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JigsawError(f"the log in {folder} can't be written: {error.strerror or error}") from error


def _forget_steps(path: Path, start: int) -> None:
    """Leave out of a log of numbers what an earlier life wrote of steps that are done again from ``start`` on."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if _STEP_OF.decode(line).step < start:
                kept.append(line)
        except msgspec.MsgspecError:
            continue  # a power cut left half a line
    aside = path.with_name(f".{path.name}.partial")
    aside.write_bytes(b"".join(kept))
    aside.replace(path)


def _line(record: Record) -> SampleLine:
    spec = record.spec
    return SampleLine(
        step=spec.step,
        group=spec.id.group,
        sample=spec.id.sample,
        purpose=spec.purpose,
        prompt=spec.prompt,
        completion=record.text,
        reward=record.reward,
        reason=record.reason if record.state == "scored" else record.error,
        state="scored" if record.state == "scored" else "failed",
        stop_reason=record.stop_reason,
        tokens=len(record.tokens),
    )


def _markdown(line: SampleLine) -> str:
    return f"**{line.purpose}, reward {line.reward}** ({line.reason})\n\n> {line.prompt}\n\n{line.completion}"
