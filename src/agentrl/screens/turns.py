"""Arrange a trajectory for its pages: turns with messages, thoughts and tools; branches and contexts."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentrl.data.finalize_group import mask_reason, why_untrained
from agentrl.documents.images import ImageRef, image_refs, text_of
from agentrl.documents.model_call import (
    Branch,
    DispatchedSamplingTask,
    ToolExecution,
    branches_of,
    full_messages,
    main_branch,
)
from agentrl.documents.record import Record
from agentrl.documents.status import CallStatus

THOUGHT: Final = "thought"
RESPONSE: Final = "response"
_SHORT_RESULT: Final = 1000
"""Characters of a tool result up to which the page shows it unfolded."""
MAX_CHARS: Final = 20_000
"""Characters of one text on a page; a link leads to the whole."""
_LINE = 100


@dataclass(frozen=True, slots=True)
class Shown:
    """The beginning of a text. ``chars`` counts the characters of the whole."""

    text: str
    chars: int

    @property
    def is_cut(self) -> bool:
        """Return whether the page shows only the beginning."""
        return self.chars > len(self.text)


def shown(value: object) -> Shown:
    """Return the beginning of a text for a page."""
    text = str(value)
    return Shown(text[:MAX_CHARS], len(text))


def content_text(content: Any) -> str:
    """Return the text of a message's content, whatever a client has sent."""
    if content is None or isinstance(content, (str, list)):
        return text_of(content)
    return json_text(content)


def call_text(call: Any) -> str:
    """Return a tool call as ``→ name(arguments)``."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    return f"→ {function.get('name', '?')}({json_text(function.get('arguments'))})"


def json_text(value: Any) -> str:
    """Return a text as it is, and any other value as JSON: on one line if it is short."""
    if isinstance(value, str):
        return value
    is_short = len(str(value)) < _LINE
    return json.dumps(value, ensure_ascii=False, default=str, indent=None if is_short else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageView:
    """A message that the model read."""

    index: int
    """Its index in the messages of the call."""
    role: str
    text: Shown
    images: Sequence[ImageRef] = ()
    is_given: bool = False
    """A message that the task puts before the question: few-shot, never the model's own."""
    is_result: bool = False
    """The result of a tool, which the turn before shows in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolView:
    """A tool call with its result; ``result`` is None if the tool was not executed."""

    name: str
    arguments: Shown
    result: Shown | None = None
    is_error: bool = False
    seconds: float | None = None
    server: str | None = None
    reward: float | None = None
    note: str | None = None
    images: Sequence[ImageRef] = ()

    @property
    def is_short(self) -> bool:
        """Return whether the page shows the result unfolded."""
        return self.result is not None and self.result.chars <= _SHORT_RESULT


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """One model call: what it read, thought, said and called."""

    call: DispatchedSamplingTask
    number: int
    begins: str | None
    """Why its prompt continues no other: a new context, a new branch; None if it continues one."""
    continues: int | None
    """The number of the turn that it continues, if that is not the one before."""
    messages: Sequence[MessageView]
    thought: Shown | None
    text: Shown | None
    tools: Sequence[ToolView]
    notes: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchView:
    """One conversation of the trajectory."""

    turns: Sequence[int]
    """The numbers of its turns."""
    what: str
    """``main``, ``side`` or its role."""
    trained: str
    """``yes``, ``no``, or the turns that cannot be trained."""
    request: str
    """The first text that its last turn adds: branches that share their beginning differ there."""


def turns_of(
    record: Record, calls: Sequence[DispatchedSamplingTask], all_calls: Sequence[DispatchedSamplingTask]
) -> list[TurnView]:
    """Return the turns of ``calls``, in their order; ``all_calls`` has their parents."""
    by_id = {call.id: call for call in all_calls}
    given = _given(all_calls)
    return [_turn(record, call, by_id.get(call.parent) if call.parent else None, given) for call in calls]


def _given(calls: Sequence[DispatchedSamplingTask]) -> Sequence[Mapping[str, Any]]:
    """Return what precedes the question in the first prompt, where no message is the model's own yet."""
    first = next((call.messages for call in calls if call.index == 0), ())
    return first[:-1] if any(message.get("role") == "assistant" for message in first) else ()


def _turn(
    record: Record,
    call: DispatchedSamplingTask,
    parent: DispatchedSamplingTask | None,
    given: Sequence[Mapping[str, Any]],
) -> TurnView:
    continues = _turn_of(call.parent or call.follows)
    thought, text = (content_text(call.response.get(key)) for key in ("reasoning_content", "content"))
    return TurnView(
        call=call,
        number=call.index + 1,
        begins=beginning_of(call),
        continues=None if continues == call.index else continues,
        messages=list(_messages(call, parent, given)),
        thought=shown(thought) if thought.strip() else None,
        text=shown(text) if text.strip() else None,
        tools=list(_tools(call)),
        notes=list(_notes(record, call)),
    )


def _messages(
    call: DispatchedSamplingTask, parent: DispatchedSamplingTask | None, given: Sequence[Mapping[str, Any]]
) -> Iterator[MessageView]:
    whole = full_messages(call, parent)
    repeats_given = call.parent is None and list(call.messages[: len(given)]) == list(given)
    for index, (stored, message) in enumerate(zip(call.messages, whole, strict=True)):
        role = str(message.get("role", "?"))
        yield MessageView(
            index=index,
            role=role,
            is_given=repeats_given and index < len(given) and role != "system",
            text=shown(whole_message(message)),
            images=_images([message]),
            is_result="execution" in stored,
        )


def _tools(call: DispatchedSamplingTask) -> Iterator[ToolView]:
    if call.tool_executions:
        for execution in call.tool_executions:
            yield ToolView(
                name=execution.name, arguments=shown(json_text(execution.arguments)),
                result=shown(execution.result), is_error=execution.error, seconds=execution.seconds,
                server=execution.server, reward=execution.reward, note=condensed_note(execution),
                images=execution.images,
            )  # fmt: skip
        return
    for each in call.response.get("tool_calls") or ():
        function = each.get("function", each) if isinstance(each, Mapping) else {}
        yield ToolView(
            name=str(function.get("name", "?")), arguments=shown(json_text(function.get("arguments")))
        )


def _notes(record: Record, call: DispatchedSamplingTask) -> Iterator[str]:
    if call.status is not CallStatus.COMPLETED:
        yield f"status {call.status}"
    if call.fixed is not None:
        yield f"answered by {call.fixed.model}, not by the policy: never trained"
    elif (parameter := mask_reason(call)) is not None:
        yield f"cannot be trained: sampled with {parameter}"
    if call.index in record.untrained_calls:
        yield f"not trained: the rule {record.train_rule} leaves it out"
    if call.error:
        yield call.error


def branch_views(record: Record, calls: Sequence[DispatchedSamplingTask]) -> list[BranchView]:
    """Return the conversations of a trajectory; the main one is named."""
    branches = branches_of(calls)
    main = main_branch(branches)
    left_out = record.untrained_calls
    untrained = {call.index for call in calls if why_untrained(call, record.train_rule, left_out)}
    return [
        BranchView(
            turns=[index + 1 for index in branch.indexes],
            what=_what(branch, is_main=branch is main),
            trained=_trained(branch, untrained),
            request=next(filter(str.strip, map(_text, branch.calls[-1].messages)), ""),
        )
        for branch in branches
    ]


def _what(branch: Branch, *, is_main: bool) -> str:
    role = branch.calls[-1].role
    if role is not None:
        return f"role {role}"
    return "main" if is_main else "side, with tools" if branch.has_tools else "side"


def _trained(branch: Branch, untrained: Collection[int]) -> str:
    left_out = [index for index in branch.indexes if index in untrained]
    if not left_out:
        return "yes"
    if len(left_out) == len(branch.calls):
        return "no"
    return "not turns " + " ".join(str(index + 1) for index in left_out)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def beginning_of(call: DispatchedSamplingTask) -> str | None:
    """Return why the prompt of a call continues no other; None if it does, or is the trajectory's first."""
    if call.index == 0 or call.parent is not None:
        return None
    if call.drops_thoughts:
        return "earlier thoughts are dropped: this is the whole new prompt"
    if call.opens_branch:
        return "a new branch: this is the whole prompt"
    return "the context was reset: this is the whole new prompt"


def condensed_note(execution: ToolExecution) -> str | None:
    """Return how models condensed a tool's result; None if they did not."""
    if (condensed := execution.condensed) is None:
        return None
    if condensed.problem is not None:
        return f"not condensed: {condensed.problem}"
    models = ", ".join(sorted({call.model or "?" for call in condensed.calls}))
    return f"condensed from {condensed.tokens:,} tokens by {models}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextView:
    """A chain of model calls, each of which continues the one before it."""

    calls: Sequence[DispatchedSamplingTask]
    begins: str | None
    """Why it continues no other; None for the first one and for one that branches off."""
    branches_off: int | None
    """The number of the turn that it branches off from."""


def contexts_of(calls: Sequence[DispatchedSamplingTask]) -> list[ContextView]:
    """Return the contexts of a trajectory, in the order in which they begin."""
    chains: list[list[DispatchedSamplingTask]] = []
    ends: dict[str, list[DispatchedSamplingTask]] = {}
    for call in calls:
        chain = ends.pop(call.parent, None) if call.parent else None
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(call)
        ends[call.id] = chain
    return [
        ContextView(calls=chain, begins=beginning_of(chain[0]), branches_off=_turn_of(chain[0].parent))
        for chain in chains
    ]


def _turn_of(call_id: str | None) -> int | None:
    return None if call_id is None else int(call_id.rpartition("/")[2]) + 1


def part_text(call: DispatchedSamplingTask, parent: DispatchedSamplingTask | None, part: str) -> str | None:
    """Return the whole text that ``part`` of a turn names; None if there is no such part.

    Parts are ``thought``, ``response``, ``message-N``, ``arguments-N`` and ``result-N``, with N from 0.
    """
    if part in (THOUGHT, RESPONSE):
        return content_text(call.response.get("reasoning_content" if part == THOUGHT else "content"))
    kind, _, number = part.rpartition("-")
    if not number.isdecimal() or len(number) > 6:
        return None
    index = int(number)
    if kind == "message":
        messages = full_messages(call, parent)
        return whole_message(messages[index]) if index < len(messages) else None
    if kind in ("arguments", "result") and index < len(call.tool_executions):
        execution = call.tool_executions[index]
        return json_text(execution.arguments) if kind == "arguments" else execution.result
    return None


def whole_message(message: Mapping[str, Any]) -> str:
    """Return the thoughts, the content and the tool calls of a message as one text."""
    parts = [content_text(message.get("reasoning_content")), content_text(message.get("content"))]
    parts += map(call_text, message.get("tool_calls") or ())
    return "\n".join(filter(None, parts))


def _images(messages: Sequence[Mapping[str, Any]]) -> list[ImageRef]:
    try:
        return image_refs(messages)
    except (TypeError, KeyError):
        return []
