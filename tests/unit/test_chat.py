"""Rendering conversations as the model's own tokenizer does, and appending turns without touching history."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from libs.common.chat import ChatMessage, ChatTokenizer
from libs.common.errors import ModelError
from tests.tiny_model import build_tiny_model

CONVERSATION = [ChatMessage("system", "Be brief."), ChatMessage("user", "What is 2 plus 3?\nSay it.  ")]

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|system|>You help.<|end|>\n' }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def chat(model: Path) -> ChatTokenizer:
    return ChatTokenizer(model)


def copy_with_template(model: Path, target: Path, template: str) -> Path:
    target.mkdir()
    for file in model.iterdir():
        if file.suffix in (".json", ".jinja") and file.name != "chat_template.jinja":
            (target / file.name).write_bytes(file.read_bytes())
    (target / "chat_template.jinja").write_text(template)
    return target


@pytest.mark.parametrize("template", [None, CHATML], ids=["own", "chatml"])
@pytest.mark.parametrize("messages", [CONVERSATION, CONVERSATION[1:]], ids=["system", "plain"])
def test_opening_is_what_transformers_renders(
    model: Path, tmp_path: Path, template: str | None, messages: list[ChatMessage]
) -> None:
    folder = copy_with_template(model, tmp_path / "copy", template) if template else model
    theirs = AutoTokenizer.from_pretrained(folder)
    plain = [{"role": message.role, "content": message.content} for message in messages]
    expected = theirs.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
    ours = ChatTokenizer(folder).opening_ids(messages)
    assert ours == theirs(expected, add_special_tokens=False)["input_ids"]


def test_observation_continues_a_turn_that_the_model_closed(chat: ChatTokenizer) -> None:
    opening = chat.opening_ids(CONVERSATION)
    turn = [*chat.opening_ids([ChatMessage("user", "5")])[1:2], chat.eos_ids[0]]
    added = chat.observation_ids([ChatMessage("user", "Are you sure?")], turn_closed=True)
    text = chat.decode(added)
    assert "Are you sure?" in text
    assert added[0] not in chat.eos_ids  # the model's own closing isn't doubled
    assert [*opening, *turn, *added][: len(opening) + len(turn)] == [*opening, *turn]


def test_observation_closes_a_turn_that_was_cut(chat: ChatTokenizer) -> None:
    closed = chat.observation_ids([ChatMessage("user", "go on")], turn_closed=True)
    cut = chat.observation_ids([ChatMessage("user", "go on")], turn_closed=False)
    assert cut[0] in chat.eos_ids
    assert cut[1:] == closed


def test_an_observation_ends_with_the_start_of_the_next_model_turn(model: Path, chat: ChatTokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(model)
    start = theirs("<|assistant|>", add_special_tokens=False)["input_ids"]
    assert chat.observation_ids([ChatMessage("user", "go on")], turn_closed=True)[-len(start) :] == start


def test_decoding_leaves_special_tokens_out(chat: ChatTokenizer) -> None:
    assert chat.decode([*chat.opening_ids([ChatMessage("user", "hot water")]), chat.eos_ids[0]]).count("<|") == 0


def test_every_end_of_sequence_id_is_known(model: Path, tmp_path: Path) -> None:
    folder = copy_with_template(model, tmp_path / "copy", CHATML)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert ChatTokenizer(folder).eos_ids[:2] == [7, 9]
    assert ChatTokenizer(model).eos_ids[0] in ChatTokenizer(folder).eos_ids


def test_a_template_that_refuses_is_one_clear_error(model: Path, tmp_path: Path) -> None:
    template = "{{ raise_exception('no system messages here') }}"
    folder = copy_with_template(model, tmp_path / "copy", template)
    with pytest.raises(ModelError, match="no system messages here"):
        ChatTokenizer(folder).opening_ids(CONVERSATION)


def test_a_template_cannot_reach_the_interpreter(model: Path, tmp_path: Path) -> None:
    template = "{{ messages.__class__.__mro__ }}"
    folder = copy_with_template(model, tmp_path / "copy", template)
    with pytest.raises(ModelError):
        ChatTokenizer(folder).opening_ids(CONVERSATION)


def test_no_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        ChatTokenizer(tmp_path)
