"""The parts of a trajectory for its pages: turns, contexts, branches, texts, times."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from snapshots import SHORT_RECORD as RECORD
from snapshots import short_call as call

from agentrl.screens.dashboard.pages.compare import pair_turns
from agentrl.screens.dashboard.pages.trajectories import waterfall_of
from agentrl.screens.trajectory_page import (
    MAX_CHARS,
    branch_views,
    call_text,
    content_text,
    contexts_of,
    part_text,
    shown,
    turns_of,
)


def test_long_text_is_cut() -> None:
    long = shown("x" * (MAX_CHARS + 1))
    assert (len(long.text), long.chars, long.is_cut) == (MAX_CHARS, MAX_CHARS + 1, True)


def test_turns_have_messages_thoughts_and_tools_and_form_contexts() -> None:
    calls = [call(0, None, tools=True), call(1, 0), call(2, None), replace(call(3, 0), role="critic")]
    turns = turns_of(RECORD, calls, calls)
    assert [turn.messages[0].text.text for turn in turns] == ["2 + 2?", "4", "2 + 2?", "2 + 2?"]
    assert [turn.messages[0].is_result for turn in turns] == [False, True, False, False]
    assert turns[0].thought is not None
    assert turns[0].tools[0].result is not None
    assert (turns[0].tools[0].arguments.text, turns[0].tools[0].result.text) == ('{"a": 2}', "4")
    assert turns[2].begins == "the context was reset: this is the whole new prompt"
    assert [turn.continues for turn in turns] == [None, None, None, 1]
    contexts = contexts_of(calls)
    assert [[each.index for each in context.calls] for context in contexts] == [[0, 1], [2], [3]]
    assert [context.branches_off for context in contexts] == [None, None, 1]
    branches = branch_views(replace(RECORD, untrained_calls=(2,)), calls)
    assert [(item.turns, item.what, item.trained) for item in branches] == [
        ([1, 2], "main", "yes"), ([3], "side", "no"), ([1, 4], "role critic", "yes")
    ]  # fmt: skip


def test_few_shot_messages_are_set_apart_from_the_turns() -> None:
    system, question = {"role": "system", "content": "s"}, {"role": "user", "content": "2 + 2?"}
    examples = ({"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"})
    first = replace(call(0, None), messages=(system, *examples, question))
    answer = {"role": "assistant", "content": "4"}
    reset = replace(call(2, None), messages=(system, *examples, question, answer))
    turns = turns_of(RECORD, [first, call(1, 0), reset], [first, call(1, 0), reset])
    given = [[message.index for message in turn.messages if message.is_given] for turn in turns]
    assert given == [[1, 2], [], [1, 2]]
    plain = replace(first, messages=(system, question))
    assert not any(message.is_given for message in turns_of(RECORD, [plain], [plain])[0].messages)


def test_each_part_of_a_turn_can_be_read_whole() -> None:
    first, second = call(0, None, tools=True), call(1, 0)
    assert part_text(first, None, "thought") == "I think"
    assert part_text(first, None, "response") == "!"
    assert part_text(second, first, "message-0") == "4"
    assert part_text(first, None, "result-0") == "4"
    assert part_text(first, None, "arguments-0") == '{"a": 2}'
    for part in ("", "result-1", "message-7", "result--1", "x-0", "message-0999999999999"):
        assert part_text(first, None, part) is None


def test_a_waterfall_places_calls_tools_and_scoring() -> None:
    at = RECORD.created_at
    record = replace(RECORD, completed_at=at + timedelta(seconds=6), scored_at=at + timedelta(seconds=10))
    waterfall = waterfall_of(record, [call(0, None, tools=True), call(1, 0)])
    assert waterfall.seconds == 10
    assert [(bar.what, bar.kind, round(bar.start, 2), round(bar.end, 2)) for bar in waterfall.bars] == [
        ("turn 1", "generate", 0.05, 0.25), ("add", "tool", 0.25, 0.3), ("turn 2", "generate", 0.4, 0.6),
        ("scoring", "score", 0.6, 1.0),
    ]  # fmt: skip
    assert waterfall_of(RECORD, []).bars == []


def test_whatever_a_client_sent_becomes_text() -> None:
    contents = (None, "a", [{"type": "text", "text": "b"}], {"x": 1}, 7)
    assert [content_text(content) for content in contents] == ["", "a", "b", '{"x": 1}', "7"]
    assert call_text({"function": {"name": "add", "arguments": '{"a": 1}'}}) == '→ add({"a": 1})'
    assert call_text({"name": "add", "arguments": {"a": 1}}) == '→ add({"a": 1})'
    assert call_text("add") == "→ ?(null)"
    strange = replace(call(0, None, ""), response={"content": {"x": 1}, "tool_calls": ["add"]})
    [pair] = pair_turns([strange], [strange])
    assert pair.left is not None
    assert pair.left.same == '{"x": 1}\n→ ?(null)'
