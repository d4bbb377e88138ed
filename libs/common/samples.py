"""What a model wrote, kept for people: one JSON object a line, one file a step, in ``samples/`` of a job's folder.

Fields of a line are the attributes of :class:`SampleLine`; a reader ignores ones that it doesn't know.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from libs.common.errors import JigsawError


class SampleLine(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory as it ended.

    Attributes:
        step, group, sample: which one it is. purpose: trained on, or held-out evaluation.
        prompt: the question. completion: everything after the opening prompt.
        reward, reason: the score and what it is for; None for a failed sample, whose ``reason`` says what failed.
        state: ``scored`` or ``failed``. stop_reason: why its last turn ended. tokens: after the opening prompt.
    """

    step: int
    group: int
    sample: int
    purpose: Literal["train", "eval"]
    prompt: str
    completion: str
    reward: float | None
    reason: str
    state: Literal["scored", "failed"]
    stop_reason: str
    tokens: int


def samples_file(job_folder: Path, step: int) -> Path:
    """Where a step's samples lie."""
    return job_folder / "samples" / f"step-{step:06d}.jsonl"


def write_samples(job_folder: Path, step: int, lines: Sequence[SampleLine]) -> None:
    """Write a step's samples, replacing what was there; complete or not at all.

    Raises:
        JigsawError: the folder can't be written.
    """
    path = samples_file(job_folder, step)
    aside = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        aside.rename(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise JigsawError(f"{path} can't be written: {error.strerror}") from None


def sampled_steps(job_folder: Path) -> list[int]:
    """Steps whose samples are there, in order."""
    return sorted(int(path.stem.removeprefix("step-")) for path in (job_folder / "samples").glob("step-*.jsonl"))


def read_samples(job_folder: Path, step: int) -> list[SampleLine]:
    """A step's samples.

    Raises:
        JigsawError: none, or unreadable; with file and line.
    """
    path = samples_file(job_folder, step)
    decoder = msgspec.json.Decoder(SampleLine)
    lines: list[SampleLine] = []
    try:
        for line in path.read_bytes().splitlines():
            lines.append(decoder.decode(line))
    except FileNotFoundError:
        raise JigsawError(f"there are no samples of step {step}: no {path}") from None
    except OSError as error:
        raise JigsawError(f"{path} can't be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise JigsawError(f"{path}: line {len(lines) + 1}: {error}") from None
    return lines
