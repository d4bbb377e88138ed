"""Rows as opening prompts: the job's template, its system message, its environment's opening, and the model's chat template.

Used on submit, to refuse a prompt that can't fit before anything is queued, and by the trainer, which renders each prompt
once.
"""

from collections.abc import Sequence

import msgspec

from libs.common.chat import ChatMessage, ChatTokenizer
from libs.common.errors import DataError
from libs.common.sections import DataSection
from libs.datasets.rows import Row
from libs.datasets.sources import source_name
from libs.environments.protocol import Environment


class Prompt(msgspec.Struct, frozen=True):
    """A row ready to roll out: the question as asked, and the ids of the opening prompt."""

    row: Row
    text: str
    ids: list[int]


def render(row: Row, section: DataSection, *, chat: ChatTokenizer, environment: Environment) -> Prompt:
    """The opening prompt of a row."""
    text = section.template.replace("{prompt}", row.prompt)
    opening = environment.opening(prompt=text, row=row.fields)
    if section.system:
        opening = [ChatMessage("system", section.system), *opening]
    return Prompt(row, text, chat.opening_ids(opening))


def render_all(
    rows: Sequence[Row], section: DataSection, *, chat: ChatTokenizer, environment: Environment, max_context: int
) -> list[Prompt]:
    """All rows' opening prompts, in order.

    Args:
        max_context: tokens that the model can attend to; a prompt must leave room for one more.

    Raises:
        DataError: naming the first row whose prompt doesn't fit.
    """
    prompts = []
    for number, row in enumerate(rows, start=1):
        prompt = render(row, section, chat=chat, environment=environment)
        if len(prompt.ids) >= max_context:
            problem = f"the prompt has {len(prompt.ids)} tokens and the context only {max_context}"
            raise DataError(file=source_name(section), row=number, field=section.prompt, problem=problem)
        prompts.append(prompt)
    return prompts
