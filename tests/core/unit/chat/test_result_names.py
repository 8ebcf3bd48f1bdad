"""Attribute each tool result to its own call: calls of one tool, results in another order, earlier calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import chat_models as models
import pytest

from agentrl.chat.chat_format import ChatFormat, Message
from agentrl.chat.open_format import open_chat_format
from agentrl.chat.renderer import in_call_order, with_kimi_ids
from agentrl.chat.validate_format import CONVERSATION, TOOLS
from agentrl.config.schema import ModelConfig
from agentrl.errors import ModelError

RESULTS = "{{- m.content or '' }}"

BY_PLACE = models.KEEPS_ALL.replace(
    RESULTS,
    "{%- if m.tool_calls %}{% set ns.calls = m.tool_calls %}{% set ns.place = 0 %}{% endif %}"
    "{%- if m.role == 'tool' and m.tool_call_id %}{{ ns.calls[ns.place].function.name + ' gave ' }}"
    f"{{%- set ns.place = ns.place + 1 %}}{{% endif %}}{RESULTS}",
).replace("{%- for m in messages %}", "{%- set ns = namespace(calls=[], place=0) %}{%- for m in messages %}")
"""The n-th result is that of the n-th call."""

BY_NAME = (
    "{%- for m in messages if m.role != 'tool' or not m.tool_call_id %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content or '' }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{ '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}"
    "{%- set ns = namespace(end=false) %}"
    "{%- for r in messages[messages.index(m) + 1:] %}"
    "{%- if r.role != 'tool' %}{% set ns.end = true %}{% endif %}"
    "{%- if not ns.end and r.name == call.function.name %}{{ '<r>' + r.content }}{% endif %}{% endfor %}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Results stand behind each call of their tool."""


def call(place: int, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {"city": "Lisbon"}}
    return {"id": f"call{place:05d}", "type": "function", "function": function}


def result(place: int, name: str, text: str) -> Message:
    return {"role": "tool", "name": name, "tool_call_id": f"call{place:05d}", "content": text}


CALLS = [call(1, "find_river"), call(2, "count_bridges"), call(3, "find_river")]
CALLED: Message = {"role": "assistant", "content": "", "tool_calls": CALLS}
SWAPPED = [
    result(3, "find_river", "vltava"), result(2, "count_bridges", "eighteen"),
    result(1, "find_river", "tagus"),
]  # fmt: skip
IN_ORDER = ["find_river gave tagus", "count_bridges gave eighteen", "find_river gave vltava"]


def test_results_in_another_order_are_rendered_in_the_order_of_their_calls(tmp_path: Path) -> None:
    chat_format = models.opened(tmp_path, BY_PLACE, name="template")
    assert chat_format.tool_problems == ()
    question = CONVERSATION[1:2]
    rendered = chat_format.decode(chat_format.render([*question, CALLED, *SWAPPED], TOOLS))
    output = [min(chat_format.stop_ids)]
    added = chat_format.next_prompt([], output, [*question, CALLED], SWAPPED, TOOLS)
    assert added is not None
    places = [rendered.index(text) for text in IN_ORDER]
    assert places == sorted(places)
    words = [chat_format.decode(added).index(word) for word in ("tagus", "eighteen", "vltava")]
    assert words == sorted(words)


def test_a_result_without_an_id_stays_behind_those_of_its_calls() -> None:
    orphan: Message = {"role": "tool", "content": "an error"}
    question: Message = {"role": "user", "content": "?"}
    messages = [CALLED, orphan, *SWAPPED, question, *SWAPPED]
    assert in_call_order(messages) == [CALLED, *reversed(SWAPPED), orphan, question, *SWAPPED]


@pytest.mark.parametrize("text", [False, True], ids=["arguments", "arguments as text"])
def test_the_next_prompt_names_the_call_that_was_generated_and_no_earlier_one(
    tmp_path: Path, text: bool
) -> None:
    template = models.RESULTS_OF_F
    if text:
        template = template.replace(
            "'\\n<tool_call>\\n' + call.function | tojson", "'\\n<tool_call>\\n' + call.function.arguments"
        )
    base = models.opened(tmp_path, template, name="template").renderer
    calls = [call(1, "find_river"), call(2, "count_bridges")]
    for item in calls if text else ():
        item["function"]["arguments"] = '{"city": "Lisbon"}'
    history = [
        CONVERSATION[1],
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        result(1, "find_river", "tagus"),
        {"role": "assistant", "content": "", "tool_calls": calls[1:]},
    ]
    added = base.extend([], [], history, [result(2, "count_bridges", "eighteen")], TOOLS)
    assert added is not None
    assert "functions.count_bridges eighteen" in base.decode(added)
    assert "find_river" not in base.decode(added)


def test_a_template_that_cannot_tell_two_calls_of_one_tool_apart_is_refused_for_tools(tmp_path: Path) -> None:
    folder = models.write_model(tmp_path / "model", BY_NAME)
    with pytest.raises(ModelError, match=r"(repeats|loses) a tool result|cannot"):
        open_chat_format(folder, ModelConfig(chat_format="template"), with_tools=True)


def test_kimis_results_name_the_calls_by_the_ids_that_the_model_writes() -> None:
    again = {**CALLED, "tool_calls": CALLED["tool_calls"][:1]}
    messages = with_kimi_ids([CONVERSATION[1], CALLED, *SWAPPED, again, SWAPPED[2], {"role": "tool"}])
    assert [item["id"] for item in messages[1]["tool_calls"]] == [
        "functions.find_river:0", "functions.count_bridges:1", "functions.find_river:2",
    ]  # fmt: skip
    assert [message.get("tool_call_id") for message in messages[2:]] == [
        "functions.find_river:2", "functions.count_bridges:1", "functions.find_river:0",
        None, "functions.find_river:3", None,
    ]  # fmt: skip
    assert CALLED["tool_calls"][0]["id"] == "call00001"


def test_an_extension_counts_the_calls_of_the_whole_conversation(tmp_path: Path) -> None:
    shows_ids = models.KEEPS_ALL.replace(RESULTS, "{{- m.tool_call_id or '' }}" + RESULTS)
    plain = models.opened(tmp_path, shows_ids, name="template")
    adaptation = replace(plain.adaptation, kimi_ids=True)
    chat_format = ChatFormat(plain.renderer, adaptation, "all", "all", skips_cycles=True)
    last = {**CALLED, "tool_calls": [call(9, "find_river")]}
    history = [CONVERSATION[1], CALLED, *SWAPPED, last]
    added = chat_format.next_prompt([], [], history, [result(9, "find_river", "elbe")], TOOLS)
    assert added is not None
    assert "functions.find_river:3elbe" in chat_format.decode(added)
