"""The workloads: what runs side by side, as scenario files, and the jobs that they mean.

A workload fixes everything that a schedule doesn't decide: prompts of so many tokens, the length of every turn, what tools
answer and how long they take, all drawn from seeds. So every policy does the same work.
"""

import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from libs.common.chat import ChatMessage, ChatTokenizer
from libs.common.errors import JigsawError
from libs.common.job import Job, job_from
from libs.common.lengths import Lengths

FOLDER = Path(__file__).parent / "workloads"
NAMES = ("long-tail", "tool-wait", "mixed-a", "mixed-b", "mixed-c", "saturated")

WARM_UP_STEPS, MEASURED_STEPS = 1, 3
WORDS = ("the", "number", "of", "one", "more", "and", "two")

Count = Annotated[int, Meta(ge=1)]


class Pipeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One pipeline of a workload.

    Attributes:
        model: ``smollm2`` (SmolLM2-135M-Instruct) or ``small`` (3.3 M parameters, random weights).
        prompt_tokens: of every prompt, as rendered. turns: of the model; ``tool_s`` and ``observation_tokens`` lie between
            two of them: seconds, drawn uniformly, and tokens. lengths: of every turn. seed: of the job.
    """

    name: str
    model: Literal["smollm2", "small"]
    prompt_tokens: Count
    batch: Count
    group: Count
    max_new_tokens: Count
    lengths: Lengths
    seed: int
    turns: Count = 1
    observation_tokens: int = 0
    tool_s: tuple[float, float] = (0.0, 0.0)


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pipelines that run side by side."""

    pipelines: list[Pipeline]


def load_workload(name: str) -> Workload:
    """A workload by name.

    Raises:
        JigsawError: there is none, or its file is wrong.
    """
    path = FOLDER / f"{name}.toml"
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Workload)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise JigsawError(f"{path}: {error}") from None


def job_of(pipeline: Pipeline, *, model: Path, folder: Path, steps: int = WARM_UP_STEPS + MEASURED_STEPS) -> Job:
    """The job that a pipeline is.

    Args:
        model: its directory. folder: where its prompts are written.
    """
    chat = ChatTokenizer(model)
    data = folder / f"{pipeline.name}.jsonl"
    data.write_bytes(
        b"".join(
            msgspec.json.encode(row) + b"\n" for row in _rows(chat, pipeline.prompt_tokens, count=pipeline.batch * steps)
        )
    )
    raw = {
        "name": pipeline.name,
        "model": {"path": str(model), "max_context": 1024},
        "data": {"path": str(data), "shuffle": False},
        "rollout": {
            "batch": pipeline.batch,
            "group": pipeline.group,
            "max_new_tokens": pipeline.max_new_tokens,
            "max_turns": pipeline.turns,
            "max_running": pipeline.batch * pipeline.group,
            "forced_lengths": msgspec.to_builtins(pipeline.lengths),
            "kv_memory_mb": 1024,
        },
        "environment": _environment(pipeline, chat),
        "reward": {"function": "last_number"},
        "train": {"steps": steps, "seed": pipeline.seed, "checkpoint_every": steps, "micro_batch_tokens": 2048},
    }
    return job_from(raw, file=pipeline.name)


def _rows(chat: ChatTokenizer, tokens: int, *, count: int) -> list[dict[str, str]]:
    """Prompts of exactly so many tokens, each different."""

    def size(text: str) -> int:
        return len(chat.opening_ids([ChatMessage("user", text)]))

    return [{"prompt": _filled(f"{number}:", size, tokens), "answer": str(number)} for number in range(count)]


def _environment(pipeline: Pipeline, chat: ChatTokenizer) -> dict[str, Any]:
    """A tool between two turns; none for a single turn."""
    if pipeline.turns == 1:
        return {"name": "single_turn"}
    replies = [_observation(chat, pipeline.observation_tokens)] * (pipeline.turns - 1)
    return {"name": "scripted", "args": {"replies": replies, "latency_s": list(pipeline.tool_s)}}


def _observation(chat: ChatTokenizer, tokens: int) -> str:
    """What a tool says, in exactly so many tokens with all that the template puts around it."""

    def size(text: str) -> int:
        return len(chat.observation_ids([ChatMessage("user", text)], turn_closed=False))

    return _filled("found:", size, tokens)


def _filled(start: str, size: Callable[[str], int], tokens: int) -> str:
    """A text that begins so and has exactly so many tokens.

    Raises:
        JigsawError: words don't add up to that.
    """
    draw, text = random.Random(start), start
    while (lacks := tokens - size(text)) > 0:
        # Half of what is missing at once, then word by word: rendering is slow, and not every word is one token.
        longer = f"{text} {' '.join(draw.choices(WORDS, k=max(1, lacks // 2)))}"
        if size(longer) > tokens:
            fitting = [more for word in WORDS if size(more := f"{text} {word}") <= tokens]
            if not fitting:
                break
            longer = fitting[0]
        text = longer
    if size(text) != tokens:
        raise JigsawError(f"a text of {tokens} tokens can't be made: {size(text)} are closest")
    return text
