"""Split a model's text into reasoning and the rest, and parse the rest: nothing in a thought is a call."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from agentrl.chat.parsers.base import MOST_FAILURES, ParsedMessage, ToolCallParser, Tools, skip_space


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The texts around a thought."""

    open: str
    close: str


THINK = ReasoningTags("<think>", "</think>")

REASONING_TAGS = (
    THINK,
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningTags("<|thought_start|>", "<|thought_end|>"),
    ReasoningTags("◁think▷", "◁/think▷"),
    ReasoningTags("<|channel>thought", "<channel|>"),
    ReasoningTags("<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningTags("[unused16]", "[unused17]"),
)
"""How model families mark thoughts. ``THINK`` is by far the most common, so it is first."""

_CALLS = {
    "<tool_call>": "</tool_call>",
    "<tool_calls>": "</tool_calls>",
    "<|tool_call>": "<tool_call|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
    "<|tool_calls_section_begin|>": "<|tool_calls_section_end|>",
    "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>": "<｜tool▁call▁end｜>",
    "<seed:tool_call>": "</seed:tool_call>",
    "<minimax:tool_call>": "</minimax:tool_call>",
    "<｜DSML｜function_calls>": "</｜DSML｜function_calls>",
    "<function=": "</function>",
    "<function_calls>": "</function_calls>",
    "<TOOLCALL>": "</TOOLCALL>",
    "<|action_start|>": "<|action_end|>",
    "<|channel|>": "",
    "<|tool_call|>": "",
    "[TOOL_CALLS]": "",
    "<|python_tag|>": "",
    "functools[": "",
    "function call<|role_sep|>": "",
}
"""Where a tool call begins and ends: an opening tag inside one is an argument, not a thought.

Harmony's channels say themselves what is a thought.
"""


@dataclass(frozen=True, slots=True)
class SplitText:
    """``reasoning`` joins all thoughts; ``is_open`` tells that the last one is not closed."""

    reasoning: str
    rest: str
    is_open: bool = False


def tags_in(template: str) -> ReasoningTags:
    """Return the reasoning tags that a chat template mentions; ``THINK`` if none."""
    mentioned = (tags for tags in REASONING_TAGS if tags.open in template or tags.close in template)
    return next(mentioned, THINK)


def opens_thought(prompt: str, tags: ReasoningTags = THINK) -> bool:
    """Return whether a rendered prompt ends inside a thought, as templates of thinking models write it."""
    return prompt.rstrip().endswith(tags.open)


def split_reasoning(text: str, tags: ReasoningTags = THINK, *, opened: bool = False) -> SplitText:
    """Split ``text`` into its thoughts and the rest. ``opened``: the prompt opened the first thought.

    A thought that is not closed reaches to the end. A closing tag that comes first ends a thought that
    began before the text. A tag inside a tool call is an argument.
    """
    thoughts: list[str] = []
    spoken: list[str] = []
    inside = opened or _began_before(text, tags)
    at = 0
    if inside and text.startswith(tags.open, skip_space(text, 0)):
        at = skip_space(text, 0) + len(tags.open)
    while True:
        if inside:
            end = text.find(tags.close, at)
            thoughts.append(text[at : end if end >= 0 else len(text)].strip())
            if end < 0:
                return SplitText(_join(thoughts), "".join(spoken), is_open=True)
            at, inside = end + len(tags.close), False
        else:
            start = _opening(text, tags, at)
            spoken.append(text[at : start if start >= 0 else len(text)])
            if start < 0:
                return SplitText(_join(thoughts), "".join(spoken))
            at, inside = start + len(tags.open), True


def parse_text(
    parser: ToolCallParser, text: str, tools: Tools, tags: ReasoningTags = THINK, *, opened: bool = False
) -> ParsedMessage:
    """Return the parts of an assistant's ``text``: reasoning by ``tags``, the rest by ``parser``."""
    return parse_split(parser, split_reasoning(text, tags, opened=opened), tools)


def parse_split(parser: ToolCallParser, split: SplitText, tools: Tools) -> ParsedMessage:
    """Return the parts of a text whose thoughts are split off.

    With a malformed call ``content`` is all text outside of thoughts, so that the call stays readable.
    """
    parsed = parser.parse(split.rest, tools)
    return replace(
        parsed,
        content=split.rest.strip() if parsed.error else parsed.content,
        reasoning=_join([split.reasoning, parsed.reasoning]),
    )


def _began_before(text: str, tags: ReasoningTags) -> bool:
    """Return whether the first closing tag of ``text`` ends a thought that nothing in it opens.

    A tag inside a tool call ends none, unless the mark of the call is a word of the thought: then no closing
    mark, or another opening one, follows the tag.
    """
    close = text.find(tags.close)
    if close < 0 or text.find(tags.open, 0, close) >= 0:
        return False
    at, marks = 0, _marks(tags.open)
    for _ in range(MOST_FAILURES):
        mark = marks.search(text, at, close)
        if mark is None:
            break
        end = _CALLS[mark.group()]
        stop = text.find(end, mark.end()) if end else len(text)
        if stop > close and (not end or text.find(mark.group(), close, stop) < 0):
            return False
        at = mark.end() if not 0 <= stop < close else stop
    return True


def _opening(text: str, tags: ReasoningTags, at: int) -> int:
    """Return where the next thought from ``at`` on opens outside tool calls; -1 without one."""
    marks = _marks(tags.open)
    while (mark := marks.search(text, at)) is not None:
        if mark.group() == tags.open:
            return mark.start()
        end = _CALLS[mark.group()]
        at = text.find(end, mark.end()) if end else -1
        if at < 0:
            return -1
    return -1


@cache
def _marks(opening: str) -> re.Pattern[str]:
    """Return the pattern of what opens a thought or a tool call."""
    return re.compile("|".join(map(re.escape, (opening, *_CALLS))))


def _join(thoughts: list[str]) -> str:
    return "\n\n".join(thought for thought in thoughts if thought)
