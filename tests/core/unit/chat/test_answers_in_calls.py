"""Test that no answer and no thought is read out of a tool call, whole or broken.

The calls are those of ``parser_cases``: one for each text value that a format writes as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat.parsers.marked import MarkedParser
from agentrl.chat.parsers.parser import ParsedMessage, ToolCall, get_parser, parse_text, split_reasoning
from agentrl.scoring.answers import extract_answer

ANSWER = "<answer>4</answer>"
FILES = [
    json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "parser_cases").glob("*.json"))
]
PARSERS = sorted({case["parser"] for content in FILES for case in content["cases"] if case["calls"]})
BARE = {"llama", "pythonic"}
"""Formats without marks: nothing says before its end that a text is a call."""


def calls_with(value: str, parser: str) -> Iterator[tuple[str, list[ToolCall], list[dict[str, Any]]]]:
    """Yield texts in whose calls ``value`` stands for a text of the case, with their calls and tools."""
    for content in FILES:
        for case in content["cases"]:
            if case["parser"] != parser or case.get("error") or case.get("opened") or "tools" in case:
                continue
            for index, (_, arguments) in enumerate(case["calls"]):
                for key, text in arguments.items():
                    if isinstance(text, str) and len(text) > 1 and case["text"].count(text) == 1:
                        calls = [ToolCall(name, dict(given)) for name, given in case["calls"]]
                        calls[index].arguments[key] = value
                        yield case["text"].replace(text, value), calls, content["tools"]


def answer_of(parsed: ParsedMessage) -> str | None:
    return None if parsed.error is not None else extract_answer(parsed.content, "answer")


@pytest.mark.parametrize("name", PARSERS)
def test_a_call_that_is_cut_holds_no_answer(name: str) -> None:
    parser, seen = get_parser(name), 0
    for text, calls, tools in calls_with(ANSWER, name):
        if list(parse_text(parser, text, tools).tool_calls) != calls:
            continue  # the schema has another type for this argument, or allows other values
        seen += 1
        first = text.index(ANSWER) + len(ANSWER)
        for end in range(first, len(text)):
            assert answer_of(parse_text(parser, text[:end], tools)) is None, text[:end]
    assert seen


@pytest.mark.parametrize("name", sorted({*PARSERS} - BARE))
@pytest.mark.parametrize("value", ["a <think>b</think> c", "a </think> b", "a <think> b"])
def test_a_thought_in_a_call_is_an_argument(name: str, value: str) -> None:
    parser = get_parser(name)
    close = parser.close if isinstance(parser, MarkedParser) else ""
    for text, _, tools in calls_with(value, name):
        plain = parser.parse(text, tools)
        if not plain.tool_calls[0].arguments or plain.error is not None:
            continue
        before, _, behind = text.partition(value)
        is_unclosed = close not in behind if close else "<tool_call>" in before
        if "think>" in before or (value == "a </think> b" and is_unclosed):
            continue  # a mark that nothing closes may be a word of a thought
        assert list(parse_text(parser, text, tools).tool_calls) == list(plain.tool_calls), text


OK = '{"name": "add", "arguments": {"a": 1}}'
WITH = '{"name": "add", "arguments": {"note": "<answer>4</answer>"}}'
LLAMA = WITH.replace("arguments", "parameters")
HARMONY = '<|constrain|>json<|message|>{"note": "<answer>4</answer>"}<|call|>'
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", f"<toolcall>{WITH}</tool_call><tool_call>{OK}</tool_call>", 1),
        ("qwen", f"{WITH}</tool_call>\n<tool_call>{OK}</tool_call>", 1),
        ("glm45", "<tool>add<arg_key>note</arg_key><arg_value><answer>4</answer></arg_value></tool_call>"
         "<tool_call>add</tool_call>", 1),
        ("internlm", f"<|action_start|>{WITH}<|action_end|><|action_start|><|plugin|>{OK}<|action_end|>", 1),
        ("llama", f"{OK}; {LLAMA[:-1]}", 1),
        ("llama", f'{OK}; {LLAMA.replace("name", "nme")}', 1),
        ("llama", f"So: {LLAMA[:-1]}", 0),
        ("llama", f'<|python_tag|>{LLAMA.replace("name", "nme")}; {OK}', 1),
        ("gpt_oss", f"commentary to=functions.add {HARMONY}", 0),
        ("gpt_oss", f"<|channel|>commentary functions.add {HARMONY}", 0),
        ("gpt_oss", f"<|channel|>commentaryto=functions.add {HARMONY}", 0),
        ("gpt_oss", 'to=functions.add<|message|>{"note": "<answer>4</answer>"}', 0),
    ],
)  # fmt: skip
def test_a_call_without_its_opening_is_malformed(name: str, text: str, calls: int) -> None:
    parsed = parse_text(get_parser(name), text, [ADD])
    assert parsed.error is not None
    assert len(parsed.tool_calls) == calls


def test_a_mark_that_a_model_repeats_does_not_empty_the_call() -> None:
    text = '<|channel|>commentary to=functions.add<|message|><|message|>{"a": 1}<|call|>'
    assert parse_text(get_parser("gpt_oss"), text, [ADD]).tool_calls == (ToolCall("add", {"a": 1}),)


def test_a_mark_of_calls_in_a_thought_that_began_before_hides_nothing_behind_it() -> None:
    call = f"<tool_call>{OK}</tool_call>"
    split = split_reasoning(f"I write <tool_call>.</think>{call}")
    assert (split.reasoning, split.rest) == ("I write <tool_call>.", call)
    split = split_reasoning(f"{call} perhaps.</think>Done")
    assert split.rest == "Done"
