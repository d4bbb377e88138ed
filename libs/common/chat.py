"""Chat templates and token ids, without torch: the same text for trainer (opening prompts) and rollout (later turns).

The opening is rendered once. Later turns only append: what the model sampled stays as it was sampled, and an observation
adds its own text with the template's framing, found as the difference between two renderings. History is never
re-rendered, so a sampled id can't change under the trainer's feet.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from libs.common.errors import ModelError


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str


_PROBE = "\u241fturn\u241f"
"""Stands for a model turn when the framing after one is looked for; a text that no template treats specially."""


class ChatTokenizer:
    """Renders conversations to ids and ids to text for one model.

    Args:
        directory: of the model, in Hugging Face format.

    Raises:
        ModelError: it has no ``tokenizer.json``, or its template can't be read.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception for every fault
            raise ModelError(f"{directory}: no usable tokenizer.json: {error}") from None
        config = _json(directory / "tokenizer_config.json")
        source = _template_source(directory, config)
        try:
            self._template = _environment().from_string(source) if source else None
        except TemplateError as error:
            raise ModelError(f"{directory}: its chat template can't be read: {error}") from None
        self._specials = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        self.eos_ids = _eos_ids(directory, self._tokenizer, self._specials["eos_token"])

    def opening_ids(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The prompt: the conversation so far and the start of the model's turn.

        Without a chat template the messages' texts are joined by blank lines.
        """
        return self._encode(self._render(messages, generate=True))

    def observation_ids(self, messages: Sequence[ChatMessage], *, turn_closed: bool) -> list[int]:
        """What follows a model turn: its closing, the observations, and the start of the next model turn.

        Args:
            messages: the observations.
            turn_closed: whether the model ended its turn with an end-of-sequence token itself.
        """
        before = [ChatMessage("user", "?"), ChatMessage("assistant", _PROBE)]
        text = self._render([*before, *messages], generate=True)
        following = text[text.rindex(_PROBE) + len(_PROBE) :]
        eos = self._specials["eos_token"]
        if turn_closed and eos and following.startswith(eos):
            following = following[len(eos) :]
        return self._encode(following)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ids; special tokens are left out unless wanted."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    def _encode(self, text: str) -> list[int]:
        # The template writes the special tokens itself; adding them again would double the first one.
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _render(self, messages: Sequence[ChatMessage], *, generate: bool) -> str:
        if self._template is None:
            return "\n\n".join(message.content for message in messages) + "\n\n" * generate
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(messages=plain, add_generation_prompt=generate, **self._specials)
        except TemplateError as error:
            raise ModelError(f"the model's chat template refuses this conversation: {error}") from None


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it: their authors test against transformers' settings."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

    def refuse(message: str) -> str:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **options)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from None
    return content


def _template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # named templates
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    return source


def _content(token: Any) -> str:
    """A special token's text; it is stored as a string or as an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token or ""


def _eos_ids(directory: Path, tokenizer: Tokenizer, eos: str) -> list[int]:
    """Every id that ends a turn: generation_config.json may name several, the tokenizer names one."""
    named = _json(directory / "generation_config.json").get("eos_token_id", [])
    ids = list(named) if isinstance(named, list) else [named]
    own = tokenizer.token_to_id(eos) if eos else None
    if own is not None and own not in ids:
        ids.append(own)
    return ids
