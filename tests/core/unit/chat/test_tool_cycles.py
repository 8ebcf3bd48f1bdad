"""Extend prompts without rendering the tool cycle again, where nothing depends on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import chat_models as models
import pytest

from agentrl.chat.chat_format import ChatFormat, Message, without_cycle
from agentrl.chat.validate_format import CONVERSATION, TOOLS

INDEPENDENT = {"keeps all thoughts": models.KEEPS_ALL, "keeps the thoughts of a cycle": models.KEEPS_CYCLE}
PROMPT = "{{ '<|im_start|>assistant\\n' }}"
DEPENDENT = {
    "attributes results to the last call": models.RESULTS_OF_F,
    "counts messages": models.KEEPS_ALL.replace(PROMPT, PROMPT + "{{ messages | length }}"),
    "remembers the first result": models.KEEPS_ALL.replace(
        PROMPT,
        PROMPT + "{{ messages | selectattr('role', 'equalto', 'tool') | map(attribute='content') | first"
        " | default('') }}",
    ),
    "obeys a switch in a result": models.KEEPS_ALL.replace(
        PROMPT,
        PROMPT + "{% for m in messages if m.role == 'tool' and '/no_think' in m.content %}"
        "{{ '<think></think>' }}{% endfor %}",
    ),
}
CYCLES = [*CONVERSATION[:2], *CONVERSATION[2:5] * 6]


def extended(chat_format: ChatFormat, new: list[Message]) -> list[int] | None:
    return chat_format.next_prompt([], [min(chat_format.stop_ids)], [*CYCLES, CONVERSATION[7]], new, TOOLS)


def always_whole(chat_format: ChatFormat) -> ChatFormat:
    return replace(chat_format, skips_cycles=False)


@pytest.mark.parametrize("template", INDEPENDENT.values(), ids=INDEPENDENT)
def test_a_template_that_ignores_the_cycle_gets_the_same_ids_without_it(
    tmp_path: Path, template: str
) -> None:
    chat_format = models.opened(tmp_path, template, name="template")
    assert chat_format.skips_cycles
    for new in ([CONVERSATION[8]], [{"role": "tool", "content": "an error"}], [CONVERSATION[10]]):
        assert extended(chat_format, new) == extended(always_whole(chat_format), new)


@pytest.mark.parametrize("template", DEPENDENT.values(), ids=DEPENDENT)
def test_a_template_that_reads_the_cycle_gets_it_whole(tmp_path: Path, template: str) -> None:
    chat_format = models.opened(tmp_path, template, name="template")
    assert not chat_format.skips_cycles
    assert extended(chat_format, [CONVERSATION[8]]) == extended(always_whole(chat_format), [CONVERSATION[8]])


def test_a_long_cycle_is_not_rendered_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat_format = models.opened(tmp_path, models.KEEPS_ALL, name="template")
    rendered: list[int] = []
    render = chat_format.renderer.template.render  # type: ignore[attr-defined]

    def counted(messages: list[Message], *arguments: object, **options: object) -> str:
        rendered.append(len(messages))
        return str(render(messages, *arguments, **options))

    monkeypatch.setattr(chat_format.renderer.template, "render", counted)  # type: ignore[attr-defined]
    extended(chat_format, [CONVERSATION[8]])
    assert rendered == [4]


def test_only_assistant_and_tool_messages_after_the_question_are_left_out() -> None:
    question = CONVERSATION[:2]
    assert list(without_cycle(CYCLES)) == question
    assert list(without_cycle(CONVERSATION[:9])) == CONVERSATION[:7]
    reminder: Message = {"role": "system", "content": "reminder"}
    assert list(without_cycle([*CYCLES, reminder])) == [*CYCLES, reminder]
    assert list(without_cycle([reminder, *CYCLES[2:]])) == [reminder, *CYCLES[2:]]
    assert list(without_cycle([])) == []
