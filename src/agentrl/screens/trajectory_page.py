"""Arrange a trajectory for people (turns, branches, contexts), and show it on a terminal."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from agentrl.columns.pool import host_of
from agentrl.data.finalize_group import describe_share, mask_reason, why_untrained
from agentrl.documents.conversation import divergences
from agentrl.documents.document import now
from agentrl.documents.images import ImageRef, image_refs, text_of
from agentrl.documents.model_call import (
    STEP,
    TOOL,
    Branch,
    DispatchedSamplingTask,
    Event,
    ToolExecution,
    branches_of,
    full_messages,
    main_branch,
    strip_tool_results,
)
from agentrl.documents.record import CommandRun, Ending, HarnessRun, Ownership, Record
from agentrl.documents.status import CallStatus, RecordStatus
from agentrl.documents.task import record_key
from agentrl.observe.terminal import MISSING, age, clean, excerpt, fixed, plain, table_of, versions
from agentrl.screens.views.pipelines import TrajectoryRow
from agentrl.screens.views.read import WholeTrajectory
from agentrl.store.records import LEASE, RELEASED, RESTARTED

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
class EventView:
    """What came back after a model call other than from a tool."""

    what: str
    arguments: Shown | None
    result: Shown
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """One model call: what it read, thought, said and called."""

    call: DispatchedSamplingTask
    number: int
    begins: str | None
    """Why it begins a context or a branch; None if it goes on with one."""
    continues: int | None
    """The number of the turn that it continues, if that is not the one before."""
    messages: Sequence[MessageView]
    thought: Shown | None
    text: Shown | None
    tools: Sequence[ToolView]
    events: Sequence[EventView]
    owner: int | None
    """The number of the owner that made it; None if the trajectory has one owner, or it is unknown."""
    notes: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerView:
    """One process that sampled the trajectory."""

    ownership: Ownership
    number: int
    """From 1."""
    host: str | None
    until: datetime | None
    """When it ended; None if it holds the trajectory."""
    ended: str
    """Why it ended."""
    saved: str | None
    """What came from the journal; None: nothing did."""
    diverged: str | None
    """Where it went another way than the journal, and what that dropped; None: it did not."""
    kept_as: str | None
    """The Record of what it dropped; None: it dropped nothing, or that stays in this Record."""


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
    given, left = _given(all_calls), divergences(all_calls)
    return [
        _turn_view(record, call, by_id.get(call.parent) if call.parent else None, given, left.get(call.index))
        for call in calls
    ]


def _given(calls: Sequence[DispatchedSamplingTask]) -> Sequence[Mapping[str, Any]]:
    """Return what precedes the question in the first prompt, where no message is the model's own yet."""
    first = next((call.messages for call in calls if call.index == 0), ())
    return first[:-1] if any(message.get("role") == "assistant" for message in first) else ()


def _turn_view(
    record: Record,
    call: DispatchedSamplingTask,
    parent: DispatchedSamplingTask | None,
    given: Sequence[Mapping[str, Any]],
    divergence: str | None,
) -> TurnView:
    continues = _turn_of(call.parent or call.follows)
    thought, text = (content_text(call.response.get(key)) for key in ("reasoning_content", "content"))
    return TurnView(
        call=call,
        number=call.index + 1,
        begins=beginning_of(call, divergence),
        continues=None if continues == call.index else continues,
        messages=list(_messages(call, parent, given)),
        thought=shown(thought) if thought.strip() else None,
        text=shown(text) if text.strip() else None,
        tools=list(_tools(call)),
        events=[event_view(event) for event in call.events],
        owner=_owner_number(record, call.attempt),
        notes=list(_notes(record, call)),
    )


def _owner_number(record: Record, attempt: int | None) -> int | None:
    attempts = [owner.attempt for owner in record.owners]
    return attempts.index(attempt) + 1 if len(attempts) > 1 and attempt in attempts else None


def event_view(event: Event) -> EventView:
    """Return an event for a page."""
    # Leave out what the environment was told: it is the text of the turn.
    told = None if event.name == STEP else event.arguments
    kinds = {STEP: "environment step", TOOL: "tool run of no open model call"}
    return EventView(
        what=kinds.get(event.name, f"once {event.name}"),
        arguments=None if told is None else shown(json_text(told)),
        result=shown(json_text(event.result)), seconds=event.seconds,
    )  # fmt: skip


_ENDED = {
    RELEASED: "released: it stopped, was drained, or something was down",
    LEASE: "its lease ran out: it died or fell silent",
    RESTARTED: "begun anew: its tools could not be restored",
}


def owner_views(record: Record) -> list[OwnerView]:
    """Return who sampled a trajectory, in order."""
    return [_owner_view(record, number, owner) for number, owner in enumerate(record.owners, 1)]


def _owner_view(record: Record, number: int, owner: Ownership) -> OwnerView:
    is_last = number == len(record.owners)
    until, ended = owner.until, owner.ended
    if ended is None and not is_last:
        ended = "another took the trajectory over"
    elif ended is None and record.failure is not None:
        until, ended = record.failure.at, f"failed: {record.failure.kind}"
    elif ended is None and record.stop_reason is not None:
        until, ended = record.completed_at, f"ended the trajectory: {record.stop_reason}"
    seconds = f" and {owner.tool_seconds:,.1f} s of tools" if owner.tool_seconds else ""
    return OwnerView(
        ownership=owner, number=number, host=host_of(owner.owner), until=until,
        ended="holds the trajectory" if ended is None else _ENDED.get(ended, ended),
        saved=f"{owner.replayed} turns, {owner.tokens:,} tokens{seconds}" if owner.replayed else None,
        diverged=None if owner.diverged_at is None
        else f"diverged at turn {owner.diverged_at + 1}, {owner.dropped} turns dropped",
        # A gateway's stay in the Record, as calls that are not trained.
        kept_as=record_key(record.task, record.traj_id, owner.attempt)
        if owner.dropped and record.train_rule is None
        else None,
    )  # fmt: skip


def other_text(other: Record) -> str:
    """Return what another Record of the slot is: a failure, a branch that was dropped, or an earlier try."""
    if other.failure is not None:
        return f"{other.failure.kind}: {other.failure.message}"
    if other.status is RecordStatus.RELEASED and not other.owners:
        return "a branch that a divergence dropped; never trained"
    if other.status is RecordStatus.RELEASED:
        return _ENDED.get(other.owners[-1].ended or "", "released")
    return f"score {fixed(other.score)}" if other.score is not None else str(other.status)


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
                server=execution.server, reward=execution.reward, note=tool_note(execution),
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
    if call.index in record.dropped_calls:
        yield "not trained: the program that went on with the trajectory did not ask for it again"
    elif call.index in record.untrained_calls:
        yield f"not trained: the rule {record.train_rule} leaves it out"
    if call.error:
        yield call.error


def branch_views(record: Record, calls: Sequence[DispatchedSamplingTask]) -> list[BranchView]:
    """Return the conversations of a trajectory; the main one is named."""
    branches = branches_of(calls)
    main = main_branch([each for each in branches if each.indexes[-1] not in record.dropped_calls])
    left_out = record.untrained_calls
    untrained = {call.index for call in calls if why_untrained(call, record.train_rule, left_out)}
    return [
        BranchView(
            turns=[index + 1 for index in branch.indexes],
            what=_what(record, branch, is_main=branch is main),
            trained=_trained(branch, untrained),
            request=next(filter(str.strip, map(_text, branch.calls[-1].messages)), ""),
        )
        for branch in branches
    ]


def _what(record: Record, branch: Branch, *, is_main: bool) -> str:
    if branch.indexes[-1] in record.dropped_calls:
        return "dropped"
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


def beginning_of(call: DispatchedSamplingTask, divergence: str | None) -> str | None:
    """Return why a call begins a context or a branch; None if it does not, or is the trajectory's first.

    ``divergence``: see ``divergences``.
    """
    if call.index == 0:
        return None
    if call.parent is not None:
        return None if divergence is None else f"a new branch: {divergence}"
    if call.drops_thoughts:
        begins = "earlier thoughts are dropped: this is the whole new prompt"
    elif call.follows is not None:
        begins = "the chat format cannot go on from the sampled tokens: this is the whole new prompt"
    elif call.opens_branch:
        begins = "a new branch: this is the whole prompt"
    else:
        begins = "the context was reset: this is the whole new prompt"
    return begins if divergence is None else f"{begins}; {divergence}"


def tool_note(execution: ToolExecution) -> str | None:
    """Return that a tool call was interrupted, or how models condensed its result; None for others."""
    if not execution.finished:
        return "not ended: it had begun, and may have taken effect; it is never made again"
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
    """Why it begins; None for the first one, and where nothing is known of one that branches off."""
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
    left = divergences(calls)
    return [
        ContextView(
            calls=chain,
            begins=beginning_of(chain[0], left.get(chain[0].index)),
            branches_off=_turn_of(chain[0].parent),
        )
        for chain in chains
    ]


def _turn_of(call_id: str | None) -> int | None:
    return None if call_id is None else int(call_id.rpartition("/")[2]) + 1


def part_text(call: DispatchedSamplingTask, parent: DispatchedSamplingTask | None, part: str) -> str | None:
    """Return the whole text that ``part`` of a turn names; None if there is no such part.

    Parts are ``thought``, ``response``, ``message-N``, ``arguments-N``, ``result-N``, ``told-N`` and
    ``event-N``, with N from 0.
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
    if kind in ("told", "event") and index < len(call.events):
        event = call.events[index]
        return json_text(event.arguments if kind == "told" else event.result)
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


_TRAINED_SPLITS = ("train", "try")
"""Splits whose trajectories are trained, and that of ``agentrl try``, whose task would be."""
_FILES = 20
_FILE_CHARACTERS = 400
_ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


def render_rows(
    rows: Sequence[TrajectoryRow], *, order: str = "newest", with_step: bool = False
) -> RenderableType:
    """Return a table of trajectories: state, reason, answer, score, length, policy versions.

    ``with_step`` adds the age of the oldest token when a step trained it, in steps.
    """
    at = now()
    return table_of(
        f"{len(rows)} Records, {order} first", rows,
        ("id", lambda row: row.id),
        ("status", lambda row: row.shown_status),
        ("why", _reason),
        ("answer", lambda row: excerpt(MISSING if row.final_answer is None else row.final_answer, 30)),
        ("score", lambda row: fixed(row.score)),
        ("advantage", lambda row: fixed(row.advantage, sign=True)),
        ("turns", lambda row: row.turns),
        ("tokens", lambda row: row.generated_tokens),
        ("versions", lambda row: versions(row.min_version, row.max_version)),
        *([("stale", lambda row: MISSING if row.staleness is None else row.staleness)] if with_step else []),
        ("created", lambda row: age(row.created_at, at)),
        text=4,
    )  # fmt: skip


def _reason(row: TrajectoryRow) -> str:
    if row.quarantined_because is not None:
        return excerpt(f"quarantined: {row.quarantined_because}", 90)
    if row.failure:
        return excerpt(f"{row.failure.kind}: {row.failure.message}", 60)
    return excerpt(row.abandoned_because or row.stop_reason or "", 60)


def render_trajectory(trajectory: WholeTrajectory) -> RenderableType:
    """Return the page of one trajectory. Text of a model or a tool is cleaned of control characters."""
    record, calls = trajectory.record, trajectory.calls
    by_id = {call.id: call for call in calls}
    parts: list[RenderableType] = [_header(record, calls, trajectory.trained_at_steps)]
    parts += _owners(record)
    parts += _branches(record, calls)
    left = divergences(calls)
    for call in calls:
        parent, begins = by_id.get(call.parent or ""), beginning_of(call, left.get(call.index))
        parts += _turn(call, parent, begins, _call_notes(call, record))
    if record.harness is not None:
        parts += _harness(record.harness)
    parts += _ending(record, calls)
    parts += _reported_reward(record)
    parts += _history(trajectory.others)
    return Group(*parts)


def _header(record: Record, calls: Sequence[DispatchedSamplingTask], trained_at_steps: Sequence[int]) -> Text:
    steps = ", ".join(map(str, trained_at_steps))
    ended_at = record.failure.at if record.failure else record.first_scored_at or record.completed_at
    lines = [
        f"task {record.task} · trajectory {record.traj_id} · attempt {record.attempt} · epoch {record.epoch}"
        f" · by {record.owner or 'nobody'} · {record.created_at:%Y-%m-%d %H:%M:%S} UTC"
        f" · {fixed(_seconds(record.created_at, ended_at), 1)} s",
        f"{record.turns} turns · {record.tool_calls} tool calls · {record.context_resets} context resets"
        f" · {record.generated_tokens} generated tokens · last prompt {record.prompt_tokens} tokens"
        f" · policy version {versions(record.min_version, record.max_version)}",
        f"model calls {sum(call.generate_seconds for call in calls):.2f} s"
        f" · tools {sum(call.tool_seconds for call in calls):.2f} s"
        f" · scoring {fixed(_seconds(record.completed_at, record.first_scored_at), 2)} s"
        + (
            f" · other models {record.api_tokens:,} tokens, {record.api_cost:.4g}"
            if record.api_tokens
            else ""
        ),
        f"advantage {fixed(record.advantage, sign=True)} · "
        + (f"trained at step {steps}" if steps else "not trained"),
    ]
    if record.trace_id is not None:
        lines.append(f"trace {record.trace_id}")
    header = plain(record.id, "bold")
    header.append(f"  {record.shown_status.upper()}", style="bold")
    header.append(f"  score {fixed(record.score)}\n", style="bold")
    return header.append(clean("\n".join(lines)))


def _seconds(begin: datetime | None, end: datetime | None) -> float | None:
    """Return the seconds between two times, which two clocks may have given; None if one is unknown."""
    return None if begin is None or end is None else max(0.0, (end - begin).total_seconds())


def _turn(
    call: DispatchedSamplingTask, parent: DispatchedSamplingTask | None, begins: str | None, notes: str
) -> Iterator[RenderableType]:
    spans = ", ".join(
        str(span.version) if len(call.versions) == 1 else f"{span.version} [{span.start}, {span.end})"
        for span in call.versions
    )
    role = f" · role {call.role}" if call.role else ""
    if call.fixed is not None:
        made = (
            f"fixed model {call.fixed.model} · {call.fixed.prompt_tokens} prompt tokens"
            f" + {call.fixed.completion_tokens} generated"
        )
    else:
        made = (
            f"version {spans or '–'} · {call.prompt_tokens} prompt tokens"
            f" ({call.cached_tokens} cached) + {call.generated_tokens} generated"
        )
    title = f"turn {call.index + 1}{role} · {made} in {call.generate_seconds:.2f} s · {call.finish_reason}"
    if call.status is not CallStatus.COMPLETED:
        title += f" · {call.status}"
    yield Rule(plain(title + notes), align="left", style="dim")
    if begins is not None:
        yield plain(begins, "dim italic")
    for message in strip_tool_results(call.messages, parent.tool_executions if parent else ()):
        if "execution" not in message:
            yield from _message(message)
    yield from _message({"role": "assistant", **call.response}, skip_calls=bool(call.tool_executions))
    for execution in call.tool_executions:
        yield from _execution(execution)
    for event in map(event_view, call.events):
        told = "" if event.arguments is None else f"({event.arguments.text})"
        yield _indented(plain(f"→ {event.what}{told}", "yellow"))
        yield _indented(plain(f"← in {event.seconds:.3f} s", "dim"))
        yield _indented(plain(event.result.text), 4)
    if call.error:
        yield plain(f"  {call.error}", "red")
    if call.fixed is None and (parameter := mask_reason(call)) is not None:
        yield plain(f"  cannot be trained: sampled with {parameter}", "yellow")


def _message(message: Mapping[str, Any], *, skip_calls: bool = False) -> Iterator[RenderableType]:
    role = clean(message.get("role", "?"))
    yield Text(role, style=f"bold {_ROLE_STYLES.get(role, '')}".strip())
    reasoning = _content(message.get("reasoning_content"))
    if reasoning.strip():
        yield _indented(plain(reasoning.strip("\n"), "dim italic"))
    content = _content(message.get("content"))
    if content.strip():
        yield _indented(plain(content.strip("\n")))
    for call in () if skip_calls else message.get("tool_calls") or ():
        function = call.get("function", call)
        yield _indented(
            plain(f"→ {function.get('name', '?')}({_arguments(function.get('arguments'))})", "yellow")
        )


def _execution(execution: ToolExecution) -> Iterator[RenderableType]:
    yield _indented(plain(f"→ {execution.name}({_arguments(execution.arguments)})", "yellow"))
    where = f" from {execution.server}" if execution.server else ""
    what = "error" if execution.error else "result"
    style = "red" if execution.error else "dim"
    yield _indented(plain(f"← {what}{where} in {execution.seconds:.3f} s", style))
    if (note := tool_note(execution)) is not None:
        yield _indented(plain(note, "yellow" if note.startswith("not ") else "dim"))
    yield _indented(plain(execution.result), 4)


def _branches(record: Record, calls: Sequence[DispatchedSamplingTask]) -> Iterator[RenderableType]:
    """Yield the rule of training and a row for each branch, if the model calls form a tree of branches."""
    is_tree = record.train_rule is not None or any(call.role or call.opens_branch for call in calls)
    if not is_tree or not calls:
        return
    if record.train_rule is not None:
        chosen = len(calls) - len(record.untrained_calls)
        yield plain(f"train rule {record.train_rule}: it chooses {chosen} of {len(calls)} model calls")
    yield table_of(
        "Branches", enumerate(branch_views(record, calls), 1),
        ("branch", lambda row: row[0]),
        ("turns", lambda row: " ".join(map(str, row[1].turns))),
        ("what", lambda row: row[1].what),
        ("can train", lambda row: row[1].trained),
        ("last request", lambda row: excerpt(row[1].request, 60)),
        text=4,
    )  # fmt: skip


def _call_notes(call: DispatchedSamplingTask, record: Record) -> str:
    """Return what the title of a turn says about who made it, and about its place in the tree."""
    owner = _owner_number(record, call.attempt)
    notes = [] if owner is None else [f"by owner {owner}"]
    before = _turn_of(call.parent or call.follows)
    if before not in (None, call.index):
        notes.append(f"continues turn {before}")
    if call.index in record.untrained_calls:
        notes.append("not trained")
    return "".join(f" · {note}" for note in notes)


def _reported_reward(record: Record) -> Iterator[RenderableType]:
    """Yield the reward that the agent reported through its gateway, if any."""
    reward = record.reported_reward
    if reward is None:
        return
    by_call = sorted((int(call), value) for call, value in reward.turn_rewards.items())
    calls = "".join(f", turn {call + 1} {value:+g}" for call, value in by_call)
    details = f"  {_json(reward.details)}" if reward.details else ""
    yield plain(f"reported   score {fixed(reward.score)} by the agent{calls}{details}")


def _harness(harness: HarnessRun) -> Iterator[RenderableType]:
    """Yield what the harness of a trajectory did. Its output is cleaned of control characters."""
    if harness.run is not None:
        yield from _command("harness", harness.run)
    names = ", ".join(excerpt(name, 80) for name in harness.changed_files[:_FILES])
    more = f" and {harness.changes - _FILES} more" if harness.changes > _FILES else ""
    yield plain(f"{harness.changes} files changed{': ' if names else ''}{names}{more}")
    if harness.diff:
        yield _indented(plain(harness.diff.rstrip("\n")))
    if harness.scoring is not None:
        yield from _command("score command", harness.scoring)
    for name, text in harness.files.items():
        yield plain(f"{excerpt(name, 80)}: {excerpt(text, _FILE_CHARACTERS)}")


def _command(title: str, run: CommandRun) -> Iterator[RenderableType]:
    ended = f"{run.ended} · exit code {run.exit_code} · {run.seconds:.1f} s · {run.memory_mb:.0f} MiB"
    yield Rule(Text(title), align="left", style="dim")
    yield plain(ended, "" if run.ended is Ending.EXITED else "red")
    outputs = (("stdout", run.stdout, run.stdout_bytes), ("stderr", run.stderr, run.stderr_bytes))
    for name, text, size in outputs:
        if text.strip():
            yield plain(f"{name}, {size:,} bytes", "dim")
            yield _indented(plain(text.rstrip("\n")))


def _ending(record: Record, calls: Sequence[DispatchedSamplingTask]) -> Iterator[RenderableType]:
    yield Rule(Text("end"), align="left", style="dim")
    yield plain(f"stopped    {record.stop_reason or '–'}")
    yield plain(f"answer     {'–' if record.final_answer is None else record.final_answer}", "bold")
    yield plain(f"expected   {'–' if record.answer is None else record.answer}")
    details = f"  {_json(record.score_details)}" if record.score_details else ""
    yield plain(f"score      {fixed(record.score)}{details}")
    if calls and record.split in _TRAINED_SPLITS:
        share = describe_share(calls, record.train_rule, record.untrained_calls)
        is_whole = "; not: " not in share
        yield plain(f"tokens     {share}", "" if is_whole else "yellow")
    if record.abandoned_because:
        yield plain(f"abandoned  {record.abandoned_because}", "yellow")
    if record.failure:
        yield plain(f"failed     {record.failure.kind}: {record.failure.message}", "red")


def _owners(record: Record) -> Iterator[RenderableType]:
    """Yield two lines for each owner of a trajectory that went on in another process."""
    if len(record.owners) < 2:
        return
    yield Rule(Text("owners"), align="left", style="dim")
    for view in owner_views(record):
        owner, host = view.ownership, "" if view.host is None else f" on {view.host}"
        until = "now" if view.until is None else f"{view.until:%H:%M:%S}"
        yield plain(
            f"owner {view.number}  {owner.owner}{host} · attempt {owner.attempt}"
            f" · {owner.since:%Y-%m-%d %H:%M:%S} to {until} UTC · {view.ended}"
        )
        if view.saved is not None:
            yield _indented(plain(f"from the journal: {view.saved}"), 9)
        if view.diverged is not None:
            kept = "" if view.kept_as is None else f", kept as {view.kept_as}"
            yield _indented(plain(f"{view.diverged}{kept}", "yellow"), 9)


def _history(others: Sequence[Record]) -> Iterator[RenderableType]:
    """Yield a line for each other Record of the trajectory's slot."""
    if not others:
        return
    yield Rule(Text("other Records of this slot"), align="left", style="dim")
    for other in others:
        ended = other.failure.at if other.failure else other.created_at
        when, who = f"{ended:%Y-%m-%d %H:%M:%S} UTC", other.owner or "nobody"
        yield plain(f"{other.id}  {other.turns} turns  {when}  by {who}  {other_text(other)}")


def _content(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        return "\n".join(
            str(part["text"]) if isinstance(part, Mapping) and "text" in part else _json(part)
            for part in content
        )
    return str(content)


def _arguments(arguments: object) -> str:
    if isinstance(arguments, Mapping):
        return ", ".join(f"{excerpt(key, 80)}={_json(value)}" for key, value in arguments.items())
    return "" if arguments is None else str(arguments)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _indented(text: Text, by: int = 2) -> Padding:
    return Padding(text, (0, 0, 0, by), expand=False)
