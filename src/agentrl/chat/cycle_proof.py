"""Check that the text after a generation does not depend on the tool calls and results before it.

Then each turn renders the conversation without that cycle, and costs the same however long it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from agentrl.chat.chat_format import Message, ToolSchemas
from agentrl.chat.proof import CONVERSATION, TOOLS
from agentrl.chat.proven_format import ProvenFormat
from agentrl.chat.template_format import TemplateFormat
from agentrl.errors import TrajectoryError

_TAGS = "<think> </think> /think /no_think <tool_call> </tool_call> <tool_response> [TOOL_CALLS] <|im_end|>"
"""What templates look for in messages."""

_CALL, _RESULT = CONVERSATION[7:9]
_OTHER: list[Message] = [
    {"role": "assistant", "content": "", "tool_calls": CONVERSATION[2]["tool_calls"][:1]},
    CONVERSATION[3],
]
"""A call of another tool."""
_PARALLEL = [{**CONVERSATION[2], "content": "saffron"}, *CONVERSATION[3:5]]
_MALFORMED: list[Message] = [{"role": "assistant", "content": _TAGS}, {"role": "tool", "content": _TAGS}]
_TAGGED = [{**_CALL, "content": _TAGS, "reasoning_content": _TAGS}, {**_RESULT, "content": _TAGS}]

_CYCLES: list[list[Message]] = [
    [_CALL, _RESULT],
    _OTHER,
    _PARALLEL,
    _MALFORMED,
    [_CALL, _RESULT, *_TAGGED],
    [*_PARALLEL, *_MALFORMED, *_TAGGED, _CALL, _RESULT, _CALL, _RESULT],
]

_HEADS: list[list[Message]] = [CONVERSATION[1:2], CONVERSATION[:7]]
"""One question, and a second one after a tool cycle."""

_QUESTION: Message = {"role": "user", "content": "marigold"}

_ENDS: list[tuple[Message, list[Message]]] = [
    (_CALL, [_RESULT]),
    (_CALL, [_RESULT, _QUESTION]),
    (CONVERSATION[2], CONVERSATION[3:5]),
    (CONVERSATION[5], [_QUESTION]),
    (CONVERSATION[5], [{"role": "tool", "content": "cobalt"}]),
]
"""The last assistant message and the messages after it."""


def may_skip_cycles(proven: ProvenFormat) -> bool:
    """Return whether no tool cycle of the proof changes the ids after it; False for other formats."""
    if not isinstance(proven.base, TemplateFormat):
        return False
    whole = ProvenFormat(proven.base, proven.adaptation, "all", "all")
    kinds: tuple[ToolSchemas | None, ...] = (TOOLS, None)
    return all(
        len(set(_extensions(whole, head, last, new, tools))) == 1
        for head, (last, new), tools in product(_HEADS, _ENDS, kinds)
    )


def _extensions(
    proven: ProvenFormat,
    head: Sequence[Message],
    last: Message,
    new: Sequence[Message],
    tools: ToolSchemas | None,
) -> Iterator[tuple[int, ...] | None]:
    """Yield the ids after ``last`` without a cycle and after each one; None where the template refuses."""
    output = [min(proven.stop_ids)]
    for cycle in ([], *_CYCLES):
        try:
            added = proven.next_prompt([], output, [*head, *cycle, last], new, tools)
        except TrajectoryError:
            yield None
        else:
            yield tuple(added or ())
