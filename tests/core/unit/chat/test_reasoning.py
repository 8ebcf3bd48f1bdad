"""Test that thoughts are split from text, closed or not."""

from __future__ import annotations

import pytest

from agentrl.chat.parsers.parser import (
    THINK,
    ReasoningTags,
    get_parser,
    opens_thought,
    parse_text,
    split_reasoning,
    tags_in,
)

CALL = '<tool_call>{"name": "f", "arguments": {"html": "<think>x"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "reasoning", "rest", "is_open"),
    [
        ("plain", "", "plain", False),
        ("<think>a</think>b", "a", "b", False),
        ("<think>\na\n</think>\n\nb", "a", "\n\nb", False),
        ("a</think>b", "a", "b", False),
        ("<think>a", "a", "", True),
        ("<think></think>b", "", "b", False),
        ("a<think>b</think>c<think>d</think>e", "b\n\nd", "ace", False),
        ("<think>a</think>b<think>c", "a\n\nc", "b", True),
        ("a</think>b<think>c", "a\n\nc", "b", True),
        (CALL, "", CALL, False),
        (f"<think>{CALL}</think>{CALL}<think>{CALL}", f"{CALL}\n\n{CALL}", CALL, True),
    ],
)
def test_thoughts_are_split_from_the_rest(text: str, reasoning: str, rest: str, is_open: bool) -> None:
    split = split_reasoning(text)
    assert (split.reasoning, split.rest, split.is_open) == (reasoning, rest, is_open)


@pytest.mark.parametrize(
    ("text", "reasoning", "rest"),
    [("a", "a", ""), ("a</think>b", "a", "b"), ("<think>a</think>b", "a", "b"), ("<think>a", "a", "")],
)
def test_the_prompt_may_open_the_thought(text: str, reasoning: str, rest: str) -> None:
    split = split_reasoning(text, opened=True)
    assert (split.reasoning, split.rest) == (reasoning, rest)


def test_a_prompt_opens_a_thought_only_at_its_end() -> None:
    assert opens_thought("<|im_start|>assistant\n<think>\n")
    assert not opens_thought("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens_thought("<think> is a tag. assistant\n")


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        ("{{ '<think>' }}", THINK),
        ("no thought", THINK),
        ("{{ m.split('[/THINK]') }}", ReasoningTags("[THINK]", "[/THINK]")),
        ("<|thought_start|>", ReasoningTags("<|thought_start|>", "<|thought_end|>")),
    ],
)
def test_tags_are_those_of_the_template(template: str, tags: ReasoningTags) -> None:
    assert tags_in(template) == tags
    assert split_reasoning(f"{tags.open}a{tags.close}b", tags).reasoning == "a"


def test_a_malformed_call_stays_in_the_content_and_out_of_the_reasoning() -> None:
    parsed = parse_text(get_parser("hermes"), "<think>a</think>b <tool_call>{</tool_call>", ())
    assert (parsed.reasoning, parsed.content) == ("a", "b <tool_call>{</tool_call>")
    assert parsed.error is not None
