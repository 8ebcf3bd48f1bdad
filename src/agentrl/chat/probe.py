"""The conversation by which a chat format is validated, and variants of it.

It has thoughts, parallel calls, their results, an error, and further questions. Every text in it is a word of
its own, so a missing or misplaced one is found.
"""

from __future__ import annotations

from typing import Any

from agentrl.chat.renderer import Message

FIRST, SECOND = "find_river", "count_bridges"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "limit": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "tags": {"type": "array"},
                },
                "required": ["city"],
            },
        },
    }
    for name in (FIRST, SECOND)
]
"""The tools of the conversation."""


def make_call(number: int, name: str, city: str) -> dict[str, Any]:
    """Return one tool call of the conversation."""
    arguments = {"city": city, "limit": 7, "exact": True, "tags": ["über", {"a": None}]}
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def make_result(number: int, name: str, text: str) -> Message:
    """Return the result of one tool call of the conversation."""
    return {"role": "tool", "name": name, "tool_call_id": f"call{number:05d}", "content": text}


CONVERSATION: list[Message] = [
    {"role": "system", "content": "orchid"},
    {"role": "user", "content": "walnut"},
    {
        "role": "assistant",
        "reasoning_content": "juniper",
        "content": "",
        "tool_calls": [make_call(1, FIRST, "Lisbon"), make_call(2, SECOND, "Prague")],
    },
    make_result(1, FIRST, "tagus"),
    make_result(2, SECOND, "eighteen"),
    {"role": "assistant", "reasoning_content": "lavender", "content": "granite"},
    {"role": "user", "content": "pelican"},
    {
        "role": "assistant",
        "reasoning_content": "thistle",
        "content": "",
        "tool_calls": [make_call(3, SECOND, "Vienna")],
    },
    make_result(3, SECOND, "danube"),
    {"role": "assistant", "content": "obsidian"},
    {"role": "user", "content": "marigold"},
]
"""Five turns: two parallel calls, an answer, a call, an answer, a question."""

ENDS = (2, 5, 7, 9, 11)
"""Numbers of messages after which the assistant continues."""

PLAIN: list[Message] = [
    *CONVERSATION[:2],
    {"role": "assistant", "reasoning_content": "juniper", "content": "granite"},
    {"role": "user", "content": "pelican"},
]
PLAIN_ENDS = (2, 4)

BESIDE: list[Message] = [*CONVERSATION[:2], {**CONVERSATION[2], "content": "saffron"}, *CONVERSATION[3:5]]
"""Text beside calls."""

AGAIN: list[Message] = [
    *CONVERSATION[:2],
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [make_call(1, FIRST, "Lisbon"), make_call(2, FIRST, "Prague")],
    },
    make_result(1, FIRST, "tagus"),
    make_result(2, FIRST, "eighteen"),
    {"role": "assistant", "content": "", "tool_calls": [make_call(3, SECOND, "Vienna")]},
    make_result(3, SECOND, "danube"),
]
"""Two calls of one tool, then a call of another."""
AGAIN_ENDS = (5, 7)

ERROR: list[Message] = [
    *CONVERSATION[:2],
    {"role": "assistant", "content": "granite"},
    {"role": "tool", "content": "cobalt"},
]

_TAGS = "<think> </think> /think /no_think <tool_call> </tool_call> <tool_response> [TOOL_CALLS] <|im_end|>"
"""What templates look for in messages."""

_CALLED = CONVERSATION[7:9]
_MALFORMED: list[Message] = [{"role": "assistant", "content": _TAGS}, {"role": "tool", "content": _TAGS}]
_TAGGED = [{**_CALLED[0], "content": _TAGS, "reasoning_content": _TAGS}, {**_CALLED[1], "content": _TAGS}]
_OTHER: list[Message] = [
    {"role": "assistant", "content": "", "tool_calls": CONVERSATION[2]["tool_calls"][:1]},
    CONVERSATION[3],
]
CYCLES: list[list[Message]] = [
    [],
    _CALLED,
    _OTHER,
    BESIDE[2:],
    _MALFORMED,
    [*_CALLED, *_TAGGED],
    [*BESIDE[2:], *_MALFORMED, *_TAGGED, *_CALLED, *_CALLED],
]
"""Tool cycles: none, a call, one of another tool, parallel calls, a malformed call, tags in texts, all."""

HEADS = (CONVERSATION[1:2], CONVERSATION[:7])
"""What stands before the cycles: one question, and a second one after a tool cycle."""

LAST_TURNS: list[list[Message]] = [
    _CALLED,
    [*_CALLED, CONVERSATION[10]],
    CONVERSATION[2:5],
    CONVERSATION[5:6] + CONVERSATION[10:],
    [CONVERSATION[5], {"role": "tool", "content": "cobalt"}],
]
"""The last assistant message and the messages after it."""
