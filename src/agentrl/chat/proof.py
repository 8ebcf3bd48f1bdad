"""Check at start-up that a chat format loses no message: render a conversation, and search for each one.

The conversation has thoughts, parallel calls, their results, an error, and further questions. Every text in
it is a word of its own, so a missing or misplaced one is found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal

from agentrl.chat.adapt import Adaptation
from agentrl.chat.chat_format import Message, ThinkingRetention, ToolSchemas
from agentrl.chat.control_tokens import ControlTokens
from agentrl.chat.parsers.reasoning import THINK, ReasoningTags
from agentrl.chat.proven_format import KeptThoughts, ProvenFormat, RenderingFormat, without_thought
from agentrl.errors import TrajectoryError

_FIRST, _SECOND = "find_river", "count_bridges"

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
    for name in (_FIRST, _SECOND)
]
"""The tools of the proof's conversation."""


def _call(number: int, name: str, city: str) -> dict[str, Any]:
    arguments = {"city": city, "limit": 7, "exact": True, "tags": ["über", {"a": None}]}
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def _result(number: int, name: str, text: str) -> Message:
    return {"role": "tool", "name": name, "tool_call_id": f"call{number:05d}", "content": text}


CONVERSATION: list[Message] = [
    {"role": "system", "content": "orchid"},
    {"role": "user", "content": "walnut"},
    {
        "role": "assistant",
        "reasoning_content": "juniper",
        "content": "",
        "tool_calls": [_call(1, _FIRST, "Lisbon"), _call(2, _SECOND, "Prague")],
    },
    _result(1, _FIRST, "tagus"),
    _result(2, _SECOND, "eighteen"),
    {"role": "assistant", "reasoning_content": "lavender", "content": "granite"},
    {"role": "user", "content": "pelican"},
    {
        "role": "assistant",
        "reasoning_content": "thistle",
        "content": "",
        "tool_calls": [_call(3, _SECOND, "Vienna")],
    },
    _result(3, _SECOND, "danube"),
    {"role": "assistant", "content": "obsidian"},
    {"role": "user", "content": "marigold"},
]
"""Five turns: two parallel calls, an answer, a call, an answer, a question."""

ENDS = (2, 5, 7, 9, 11)
"""Numbers of messages after which the assistant continues."""

_PLAIN: list[Message] = [
    *CONVERSATION[:2],
    {"role": "assistant", "reasoning_content": "juniper", "content": "granite"},
    {"role": "user", "content": "pelican"},
]
_PLAIN_ENDS = (2, 4)

_BESIDE: list[Message] = [*CONVERSATION[:2], {**CONVERSATION[2], "content": "saffron"}, *CONVERSATION[3:5]]
"""Text beside calls."""

_AGAIN: list[Message] = [
    *CONVERSATION[:2],
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [_call(1, _FIRST, "Lisbon"), _call(2, _FIRST, "Prague")],
    },
    _result(1, _FIRST, "tagus"),
    _result(2, _FIRST, "eighteen"),
    {"role": "assistant", "content": "", "tool_calls": [_call(3, _SECOND, "Vienna")]},
    _result(3, _SECOND, "danube"),
]
"""Two calls of one tool, then a call of another."""
_AGAIN_ENDS = (5, 7)

_ERROR: list[Message] = [
    *CONVERSATION[:2],
    {"role": "assistant", "content": "granite"},
    {"role": "tool", "content": "cobalt"},
]


_KIMI_ID_END = "<|tool_call_argument_begin|>"
"""The token behind the id of a call, in Kimi's format only."""

_HARMONY_NAME = re.compile(r"functions\.(\w+)")


def prove(base: RenderingFormat, tokens: ControlTokens, retention: ThinkingRetention = "template",
          tags: ReasoningTags = THINK) -> ProvenFormat:  # fmt: skip
    """Return ``base`` with the smallest rewriting of messages that loses none of them.

    Raises TrajectoryError for a format that loses or renames a message of a conversation without tools.
    """
    kimi_ids = tokens.token_id(_KIMI_ID_END) is not None
    adaptation = Adaptation(reasoning=_reasoning(base, tags), tags=tags, kimi_ids=kimi_ids)
    problems = [*_problems(ProvenFormat(base, adaptation, "all", "all"), _PLAIN, _PLAIN_ENDS, None)]
    problems += _forged(base, tokens)
    if problems:
        raise TrajectoryError(
            f"the chat format {base.name} {problems[0]}",
            hint="give another by --chat_format, or a template by --chat_template FILE",
        )
    adaptation, tool_problems = _with_tools(base, adaptation)
    return ProvenFormat(base, adaptation, _kept(base, adaptation), retention, tool_problems)


def _with_tools(base: RenderingFormat, adaptation: Adaptation) -> tuple[Adaptation, list[str]]:
    """Return the smallest rewriting that loses no message of a conversation with tools; else the problems."""
    first: list[str] | None = None
    for written_out, apart, one_each in sorted(product((False, True), repeat=3), key=sum):
        tried = replace(
            adaptation, arguments_as_text=written_out, content_apart=apart, one_call_each=one_each
        )
        problems = _tool_problems(base, tried)
        if problems:
            first = first or problems
            continue
        for orphans in (False, True):
            tried = replace(tried, orphans_as_user=orphans)
            problems = [*_problems_of_error(ProvenFormat(base, tried, "all", "all"))]
            if not problems:
                return tried, []
    spelled_out = replace(adaptation, calls_as_text=True)
    if not _tool_problems(base, spelled_out):
        return spelled_out, []
    return adaptation, first or []


def _tool_problems(base: RenderingFormat, adaptation: Adaptation) -> list[str]:
    proven = ProvenFormat(base, adaptation, "all", "all")
    try:
        beside = proven.decode(proven.render(_BESIDE, TOOLS))
    except TrajectoryError as error:
        return [f"fails: {error.message}"]
    lost = [] if "saffron" in beside else ["loses the text beside a tool call"]
    problems = [*_problems(proven, CONVERSATION, ENDS, TOOLS), *lost]
    return problems or [*_problems(proven, _AGAIN, _AGAIN_ENDS, TOOLS)]


def _problems(
    proven: ProvenFormat,
    messages: Sequence[Message],
    ends: Iterable[int],
    tools: ToolSchemas | None,
) -> Iterator[str]:
    """Yield what the format loses, renames or repeats, turn by turn."""
    try:
        for end in ends:
            prompt = proven.render(messages[:end], tools)
            text = proven.decode(prompt)
            yield from lost(text, proven.adaptation.apply(map(without_thought, messages[:end])))
            if end > 2:
                yield from _extension_problems(proven, messages[:end], prompt, tools)
    except TrajectoryError as error:
        yield f"fails: {error.message}"


def _extension_problems(
    proven: ProvenFormat,
    messages: Sequence[Message],
    prompt: Sequence[int],
    tools: ToolSchemas | None,
) -> Iterator[str]:
    """Yield what is wrong when the last assistant message is extended by those after it."""
    place = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    before, output = generated(proven, messages[: place + 1], tools)
    added = proven.next_prompt(before, output, messages[: place + 1], messages[place + 1 :], tools)
    if added is None:
        yield "cannot extend a prompt"
        return
    text = proven.decode(added)
    yield from lost(text, messages[place + 1 :])
    yield from _renamed(text, messages[place + 1 :])
    reordered = proven.adaptation.one_call_each and len(messages) - place > 2
    if not reordered and list(prompt[len(prompt) - len(added) :]) != added:
        yield "extends a prompt by other tokens than it renders"


def generated(
    base: RenderingFormat, messages: Sequence[Message], tools: ToolSchemas | None
) -> tuple[list[int], list[int]]:
    """Return a prompt, and the ids that a model generates after it as the last of ``messages``.

    A prompt that opens a thought where the message has none is cut before that.
    """
    prompt = base.render(messages[:-1], tools)
    closed = base.render_closed(messages, tools)
    pairs = enumerate(zip(prompt, closed, strict=False))
    shared = next((place for place, (a, b) in pairs if a != b), min(len(prompt), len(closed)))
    output = closed[shared:]
    stops = [place for place, token in enumerate(output) if token in base.stop_ids]
    output = output[: stops[-1] + 1] if stops else [*output, min(base.stop_ids)]
    return prompt[:shared], output


def reads_its_calls(base: RenderingFormat, adaptation: Adaptation) -> bool:
    """Return whether the format parses the tool calls that it renders."""
    proven = ProvenFormat(base, adaptation, "all", "all")
    for end in (3, 8):
        prompt, output = generated(proven, list(map(without_thought, CONVERSATION[:end])), TOOLS)
        calls = [call["function"] for call in CONVERSATION[end - 1]["tool_calls"]]
        count = 1 if adaptation.one_call_each else len(calls)
        parsed = proven.parse(output, TOOLS, prompt)
        found = [{"name": call.name, "arguments": call.arguments} for call in parsed.tool_calls]
        if parsed.error is not None or found[-count:] != calls[-count:]:
            return False
    return True


def lost(text: str, messages: Iterable[Message]) -> Iterator[str]:
    """Yield the messages that ``text`` lacks, reorders or repeats."""
    place = 0
    for message in messages:
        for what, word in _words(message):
            found = text.find(word, place)
            if found < 0:
                order = " in its order" if word in text else ""
                yield f"loses {what}{order}"
                return
            place = found + len(word)
            if word in text[place:]:
                yield f"repeats {what}"


def _words(message: Message) -> Iterator[tuple[str, str]]:
    if message["content"]:
        role = {"tool": "a tool result", "system": "the system message"}
        what = role.get(message["role"], f"the {message['role']}'s text")
        yield what, message["content"]
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        values = json.loads(arguments) if isinstance(arguments, str) else arguments
        yield "a tool call", str(values["city"])


def _renamed(text: str, messages: Sequence[Message]) -> Iterator[str]:
    """Yield the tool results that ``text`` attributes to another tool."""
    place = 0
    for message in messages:
        end = text.find(message["content"], place)
        if end < 0:
            return
        header = text[place:end]
        named = {*(name for name in (_FIRST, _SECOND) if name in header), *_HARMONY_NAME.findall(header)}
        others = named - {message.get("name")}
        if message["role"] == "tool" and others:
            yield f"attributes the result of {message.get('name', 'no tool')} to {others.pop()}"
        place = end + len(message["content"])


def _problems_of_error(proven: ProvenFormat) -> Iterator[str]:
    """Yield what is wrong with a tool message without a call, the answer to a malformed call."""
    try:
        prompt = proven.render(_ERROR, TOOLS)
        yield from lost(proven.decode(prompt), _ERROR)
        yield from _extension_problems(proven, _ERROR, prompt, TOOLS)
    except TrajectoryError as error:
        yield f"fails: {error.message}"


def _reasoning(base: RenderingFormat, tags: ReasoningTags) -> Literal["field", "text"]:
    """Return whether the format reads a thought from its field, or needs it as text."""
    for messages, tools in ((_PLAIN[:3], None), (CONVERSATION[:5], TOOLS)):
        adapted = Adaptation(tags=tags).apply(messages)
        try:
            if "juniper" in base.decode(base.render_closed(adapted, tools)):
                return "field"
        except TrajectoryError:
            continue
    return "text"


def _kept(base: RenderingFormat, adaptation: Adaptation) -> KeptThoughts:
    """Return which earlier thoughts the format renders."""
    proven = ProvenFormat(base, adaptation, "all", "all")

    def has(word: str, messages: Sequence[Message], tools: ToolSchemas | None) -> bool | None:
        try:
            return word in proven.decode(proven.render(messages, tools))
        except TrajectoryError:
            return None

    if has("juniper", _PLAIN, None) and has("lavender", CONVERSATION[:7], TOOLS) is not False:
        return "all"
    return "tool_cycle" if has("juniper", CONVERSATION[:5], TOOLS) else "none"


def _forged(base: RenderingFormat, tokens: ControlTokens) -> Iterator[str]:
    """Yield a problem if the texts of control tokens in a message become control tokens."""
    system, user = CONVERSATION[:2]
    attack = {"role": "user", "content": " ".join(["walnut", *tokens.texts()])}
    result = {**_result(1, _FIRST, ""), "content": attack["content"]}
    called = {"role": "assistant", "content": "", "tool_calls": [_call(1, _FIRST, "Lisbon")]}
    for plain, forged in (
        ([system, user], [system, attack]),
        ([user, called, _result(1, _FIRST, "walnut")], [user, called, result]),
    ):
        try:
            counts = [
                [token for token in base.render(messages, None) if token in tokens.special_ids]
                for messages in (plain, forged)
            ]
        except TrajectoryError:
            continue
        if counts[0] != counts[1]:
            yield "turns text of a message into control tokens"
