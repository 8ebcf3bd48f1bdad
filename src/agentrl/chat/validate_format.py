"""Validate at start-up that a chat format loses no message: render a conversation, and search for each.

It has thoughts, parallel calls, their results, an error, and further questions. Every text in it is a word of
its own, so a missing or misplaced one is found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal

from agentrl.chat.chat_format import ChatFormat, KeptThoughts, ThinkingRetention, without_thought
from agentrl.chat.parsers.parser import THINK, ReasoningTags
from agentrl.chat.renderer import Adaptation, Message, Renderer, TemplateRenderer, ToolSchemas
from agentrl.errors import ModelError, TrajectoryError

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


_KIMI_ID_END = "<|tool_call_argument_begin|>"
"""The token behind the id of a call, in Kimi's format only."""

_HARMONY_NAME = re.compile(r"functions\.(\w+)")


def validate_format(
    renderer: Renderer, retention: ThinkingRetention = "template", tags: ReasoningTags = THINK
) -> ChatFormat:
    """Return the format with the smallest rewriting of messages that loses none of them.

    Raises ModelError for a renderer that loses or renames a message of a conversation without tools.
    """
    kimi_ids = renderer.tokens.token_id(_KIMI_ID_END) is not None
    adaptation = Adaptation(reasoning=_reasoning(renderer, tags), tags=tags, kimi_ids=kimi_ids)
    plain = ChatFormat(renderer, adaptation)
    problems = [*_problems(plain, PLAIN, PLAIN_ENDS, None), *_forged(renderer)]
    if problems:
        raise ModelError(
            f"the chat format {renderer.name} {problems[0]}",
            hint="give another by --chat_format, or a template by --chat_template FILE",
        )
    whole, tool_problems = _with_tools(plain)
    cycles, shown = _may_skip(whole) if isinstance(renderer, TemplateRenderer) else (False, False)
    return replace(
        whole, template_keeps=_kept(whole), retention=retention, tool_problems=tuple(tool_problems),
        skips_cycles=cycles, skips_tools=shown,
    )  # fmt: skip


def _with_tools(plain: ChatFormat) -> tuple[ChatFormat, list[str]]:
    """Return the smallest rewriting that loses no message of a conversation with tools; else the problems."""
    first: list[str] | None = None

    def rewritten(**changes: Any) -> ChatFormat:
        return replace(plain, adaptation=replace(plain.adaptation, **changes))

    for as_text, apart, one_each in sorted(product((False, True), repeat=3), key=sum):
        changes = {"arguments_as_text": as_text, "content_apart": apart, "one_call_each": one_each}
        if problems := _tool_problems(rewritten(**changes)):
            first = first or problems
            continue
        for orphans in (False, True):
            tried = rewritten(**changes, orphans_as_user=orphans)
            if not any(_problems(tried, ERROR, (len(ERROR),), TOOLS)):
                return tried, []
    spelled_out = rewritten(calls_as_text=True)
    if not _tool_problems(spelled_out):
        return spelled_out, []
    return plain, first or []


def _tool_problems(chat_format: ChatFormat) -> list[str]:
    try:
        beside = chat_format.decode(chat_format.render(BESIDE, TOOLS))
    except TrajectoryError as error:
        return [f"fails: {error.message}"]
    lost_text = [] if "saffron" in beside else ["loses the text beside a tool call"]
    problems = [*_problems(chat_format, CONVERSATION, ENDS, TOOLS), *lost_text]
    return problems or [*_problems(chat_format, AGAIN, AGAIN_ENDS, TOOLS)]


def _problems(
    chat_format: ChatFormat, messages: Sequence[Message], ends: Iterable[int], tools: ToolSchemas | None
) -> Iterator[str]:
    """Yield what the format loses, renames or repeats, turn by turn."""
    try:
        for end in ends:
            prompt = chat_format.render(messages[:end], tools)
            text = chat_format.decode(prompt)
            yield from lost(text, chat_format.adaptation.apply(map(without_thought, messages[:end])))
            if end > 2:
                yield from _extension_problems(chat_format, messages[:end], prompt, tools)
    except TrajectoryError as error:
        yield f"fails: {error.message}"


def _extension_problems(
    chat_format: ChatFormat, messages: Sequence[Message], prompt: Sequence[int], tools: ToolSchemas | None
) -> Iterator[str]:
    """Yield what is wrong when the last assistant message is extended by those after it."""
    index = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    before, output = generated(chat_format, messages[: index + 1], tools)
    added = chat_format.next_prompt(before, output, messages[: index + 1], messages[index + 1 :], tools)
    if added is None:
        yield "cannot extend a prompt"
        return
    text = chat_format.decode(added)
    yield from lost(text, messages[index + 1 :])
    yield from _renamed(text, messages[index + 1 :])
    reordered = chat_format.adaptation.one_call_each and len(messages) - index > 2
    if not reordered and list(prompt[len(prompt) - len(added) :]) != added:
        yield "extends a prompt by other tokens than it renders"


def generated(
    chat_format: ChatFormat, messages: Sequence[Message], tools: ToolSchemas | None
) -> tuple[list[int], list[int]]:
    """Return a prompt, and the ids that a model generates after it as the last of ``messages``.

    A prompt that opens a thought where the message has none is cut before that.
    """
    prompt = chat_format.render(messages[:-1], tools)
    closed = chat_format.render(messages, tools, add_generation_prompt=False)
    pairs = enumerate(zip(prompt, closed, strict=False))
    shared = next((index for index, (a, b) in pairs if a != b), min(len(prompt), len(closed)))
    output = closed[shared:]
    stops = [index for index, token in enumerate(output) if token in chat_format.stop_ids]
    output = output[: stops[-1] + 1] if stops else [*output, min(chat_format.stop_ids)]
    return prompt[:shared], output


def reads_its_calls(renderer: Renderer, adaptation: Adaptation) -> bool:
    """Return whether a renderer parses the tool calls that it writes."""
    chat_format = ChatFormat(renderer, adaptation)
    for end in (3, 8):
        prompt, output = generated(chat_format, list(map(without_thought, CONVERSATION[:end])), TOOLS)
        calls = [call["function"] for call in CONVERSATION[end - 1]["tool_calls"]]
        count = 1 if adaptation.one_call_each else len(calls)
        parsed = chat_format.parse(output, TOOLS, prompt)
        read = [{"name": call.name, "arguments": call.arguments} for call in parsed.tool_calls]
        if parsed.error is not None or read[-count:] != calls[-count:]:
            return False
    return True


def lost(text: str, messages: Iterable[Message]) -> Iterator[str]:
    """Yield the messages that ``text`` lacks, reorders or repeats."""
    index = 0
    for message in messages:
        for what, word in _words(message):
            start = text.find(word, index)
            if start < 0:
                order = " in its order" if word in text else ""
                yield f"loses {what}{order}"
                return
            index = start + len(word)
            if word in text[index:]:
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
    index = 0
    for message in messages:
        end = text.find(message["content"], index)
        if end < 0:
            return
        header = text[index:end]
        named = {*(name for name in (FIRST, SECOND) if name in header), *_HARMONY_NAME.findall(header)}
        others = named - {message.get("name")}
        if message["role"] == "tool" and others:
            yield f"attributes the result of {message.get('name', 'no tool')} to {others.pop()}"
        index = end + len(message["content"])


def _shows(
    chat_format: ChatFormat, word: str, messages: Sequence[Message], tools: ToolSchemas | None,
    *, closed: bool = False,
) -> bool | None:  # fmt: skip
    """Return whether ``word`` stands in the rendered messages; None if they cannot be rendered."""
    try:
        ids = chat_format.render(messages, tools, add_generation_prompt=not closed)
        return word in chat_format.decode(ids)
    except TrajectoryError:
        return None


def _reasoning(renderer: Renderer, tags: ReasoningTags) -> Literal["field", "text"]:
    """Return whether the renderer reads a thought from its field, or needs it as text."""
    plain = ChatFormat(renderer, Adaptation(tags=tags))
    is_read = (
        _shows(plain, "juniper", messages, tools, closed=True)
        for messages, tools in ((PLAIN[:3], None), (CONVERSATION[:5], TOOLS))
    )
    return "field" if any(is_read) else "text"


def _kept(chat_format: ChatFormat) -> KeptThoughts:
    """Return which earlier thoughts the renderer writes."""
    after_call = _shows(chat_format, "lavender", CONVERSATION[:7], TOOLS)
    if _shows(chat_format, "juniper", PLAIN, None) and after_call is not False:
        return "all"
    return "tool_cycle" if _shows(chat_format, "juniper", CONVERSATION[:5], TOOLS) else "none"


def _forged(renderer: Renderer) -> Iterator[str]:
    """Yield a problem if the texts of control tokens in a message become control tokens."""
    tokens = renderer.tokens
    system, user = CONVERSATION[:2]
    attack = {"role": "user", "content": " ".join(["walnut", *tokens.texts()])}
    result = {**make_result(1, FIRST, ""), "content": attack["content"]}
    called = {"role": "assistant", "content": "", "tool_calls": [make_call(1, FIRST, "Lisbon")]}
    for plain, forged in (
        ([system, user], [system, attack]),
        ([user, called, make_result(1, FIRST, "walnut")], [user, called, result]),
    ):
        try:
            counts = [
                [token for token in renderer.render(messages, None) if token in tokens.special_ids]
                for messages in (plain, forged)
            ]
        except TrajectoryError:
            continue
        if counts[0] != counts[1]:
            yield "turns text of a message into control tokens"


def _may_skip(whole: ChatFormat) -> tuple[bool, bool]:
    """Return whether the ids after a generation are the same without the cycle before it, and without tools.

    Then a turn renders neither, and costs the same however long the cycle is and however many the tools are.
    """

    def extension(
        before: Sequence[Message], last: Message, new: Sequence[Message], tools: ToolSchemas | None
    ) -> tuple[int, ...] | None:
        try:
            return tuple(whole.next_prompt([], [min(whole.stop_ids)], [*before, last], new, tools) or ())
        except TrajectoryError:
            return None

    with_tools, without = (
        [
            {extension([*head, *cycle], last, new, tools) for cycle in CYCLES}
            for head, (last, *new) in product(HEADS, LAST_TURNS)
        ]
        for tools in (TOOLS, None)
    )
    return all(len(found) == 1 for found in (*with_tools, *without)), with_tools == without
