"""What a job leaves for people to look at: TensorBoard events, the same numbers as JSON lines, and every sample as text.

Written by the service process, without torch: TensorBoard's own event writer is enough.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from libs.common.samples import SampleLine, write_samples
from libs.common.store import Record


class RunLog:
    """The log of one job. Its methods write files: call them in a thread.

    Args:
        folder: of the job; TensorBoard's files go to ``tensorboard``, samples to ``samples``, numbers to
            ``metrics.jsonl``.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder = folder
        self._events: Any = EventFileWriter(str(folder / "tensorboard"))
        self._metrics = (folder / "metrics.jsonl").open("ab")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._event(step, Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]))
        self._metrics.write(msgspec.json.encode({"step": step, "time": time.time(), **values}) + b"\n")
        self._metrics.flush()

    def samples(self, step: int, records: Sequence[Record], *, shown: int) -> None:
        """All samples of a step as lines in a file, the first ``shown`` of them as text in TensorBoard, too."""
        lines = [_line(record) for record in records]
        write_samples(self._folder, step, lines)
        for index, line in enumerate(lines[:shown]):
            self._text(step, f"samples/{index}", _markdown(line))

    def close(self) -> None:
        """Flush and close."""
        self._events.close()
        self._metrics.close()

    def _text(self, step: int, tag: str, text: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._event(step, text_pb(tag, text))

    def _event(self, step: int, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._events.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._events.flush()


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
