"""A job in which every completion has the same length, so that two systems do the same work.

The model's copy names an end-of-sequence token that the model never samples: so nothing in the systems has to be told, and
the trainer and the rollout path run exactly what they always run.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from libs.common.chat import ChatMessage, ChatTokenizer
from libs.common.errors import JigsawError
from libs.common.models import resolve_model
from libs.common.sections import DataSection
from libs.datasets.load import load

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
NEVER_SAMPLED = "<empty_output>"
"""A token of the vocabulary that the model was never trained to write."""

PROMPTS = DataSection(
    task="products",
    args={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    size=2000,
    split_seed=0,
    take=80,
)
"""The demo's prompts: reasoning-gym's products of two digits, 80 of the 100."""


def endless_model(folder: Path, *, source: Path | None = None) -> Path:
    """A copy of the model (``source``: of another one) that doesn't end its answers; its weights are links.

    Raises:
        JigsawError: the tokenizer lacks the token.
    """
    source = source or resolve_model(MODEL)
    target = folder / "endless"
    target.mkdir(parents=True)
    for file in source.iterdir():
        (target / file.name).symlink_to(file.resolve())
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    if NEVER_SAMPLED not in ids:
        raise JigsawError(f"{source}: its tokenizer has no {NEVER_SAMPLED}")
    _change(target / "tokenizer_config.json", {"eos_token": NEVER_SAMPLED})
    for name in ("config.json", "generation_config.json"):
        _change(target / name, {"eos_token_id": ids[NEVER_SAMPLED]})
    return target


def write_prompts(file: Path) -> Path:
    """The prompts as plain jsonl with ``prompt`` and ``answer``, for any system to read."""
    lines = [msgspec.json.encode({"prompt": row.prompt, "answer": row.answer}) for row in load(PROMPTS)]
    file.write_bytes(b"\n".join(lines) + b"\n")
    return file


def opening_ids(model: Path, count: int) -> list[list[int]]:
    """Ids of the first prompts, rendered as a job renders them."""
    chat = ChatTokenizer(model)
    return [chat.opening_ids([ChatMessage("user", row.prompt)]) for row in load(PROMPTS)[:count]]


def _change(file: Path, values: dict[str, Any]) -> None:
    """Replace a link to a JSON file by a changed copy."""
    content = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    file.write_text(json.dumps({**content, **values}, indent=2), encoding="utf-8")
