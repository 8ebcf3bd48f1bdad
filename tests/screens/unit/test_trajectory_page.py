"""A trajectory arranged for people, and its pages on a terminal: a list, and one turn by turn."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import snapshots as documents
from snapshots import SHORT_RECORD as RECORD
from snapshots import printed, rows
from snapshots import short_call as call

from agentrl.documents.model_call import STEP, BrowseCall, Condensed, DispatchedSamplingTask, Event
from agentrl.documents.record import (
    CommandRun,
    Ending,
    Failure,
    HarnessRun,
    Ownership,
    Record,
    ReportedReward,
)
from agentrl.documents.status import CallStatus, RecordStatus, StopReason
from agentrl.screens.dashboard.pages.compare import pair_turns
from agentrl.screens.dashboard.pages.trajectories import waterfall_of
from agentrl.screens.trajectory_page import (
    MAX_CHARS,
    branch_views,
    call_text,
    content_text,
    contexts_of,
    other_text,
    part_text,
    render_rows,
    render_trajectory,
    shown,
    turns_of,
)
from agentrl.screens.views.read import WholeTrajectory


def event(name: str, arguments: Any, result: Any) -> Event:
    """What came back after a model call."""
    return Event(
        name=name, arguments=arguments, result=result, started_at=RECORD.created_at, seconds=0.25, attempt=1
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
    left = replace(RECORD, untrained_calls=(1,), dropped_calls=(1,))
    assert [item.what for item in branch_views(left, calls)] == ["dropped", "side", "role critic"]


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
    asked = replace(first, events=(event("now", None, "noon"), event(STEP, "hello", {"text": "hi"})))
    assert part_text(asked, None, "event-0") == "noon"
    assert part_text(asked, None, "told-1") == "hello"
    assert part_text(asked, None, "event-1") == '{"text": "hi"}'
    assert part_text(asked, None, "event-2") is None
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


def test_a_waterfall_shows_tools_and_events_where_they_began() -> None:
    made = call(0, None, tools=True)
    began = made.created_at + timedelta(seconds=4)  # under another owner, after the first one died
    late = replace(made.tool_executions[0], started_at=made.created_at)
    asked = replace(event("now", None, "noon"), started_at=began, seconds=1.0)
    turn = replace(made, tool_executions=(late,), events=(asked,), created_at=began + timedelta(seconds=1))
    bars = waterfall_of(RECORD, [turn]).bars
    assert [(bar.what, bar.kind, round(bar.seconds, 2)) for bar in bars] == [
        ("turn 1", "generate", 2.0), ("add", "tool", 5.0), ("once now", "tool", 1.0)
    ]  # fmt: skip


def test_whatever_a_client_sent_becomes_text() -> None:
    contents = (None, "a", [{"type": "text", "text": "b"}], {"x": 1}, 7)
    assert [content_text(content) for content in contents] == ["", "a", "b", '{"x": 1}', "7"]
    assert call_text({"function": {"name": "add", "arguments": '{"a": 1}'}}) == '→ add({"a": 1})'
    assert call_text({"name": "add", "arguments": {"a": 1}}) == '→ add({"a": 1})'
    assert call_text("add") == "→ ?(null)"
    strange = replace(call(0, None, ""), response={"content": {"x": 1}, "tool_calls": ["add"]})
    [pair] = pair_turns([strange], [strange])
    assert pair.left.same == '{"x": 1}\n→ ?(null)'


RED = {"stdout": "hi \x1b[31mred\n", "stdout_bytes": 9}
RUN = CommandRun(ended=Ending.EXITED, exit_code=0, seconds=2.5, memory_mb=100.0, **RED)  # type: ignore[arg-type]
FAILED = {"stdout": "", "stderr": "1 test failed", "stderr_bytes": 13}
TESTS = replace(RUN, ended=Ending.NONZERO_EXIT, exit_code=1, **FAILED)  # type: ignore[arg-type]


def page_of(record: Record, *calls: DispatchedSamplingTask, **fields: Any) -> str:
    """The printed page of a trajectory."""
    return printed(render_trajectory(WholeTrajectory(record=record, calls=calls, **fields)))


def test_a_trajectory_reads_turn_by_turn() -> None:
    page = page_of(documents.record(), *documents.two_turns(), trained_at_steps=(6,))
    expected = [
        "train/0/task_001/3/1  TRAINED  score 1.000",
        "2 turns · 1 tool calls · 0 context resets · 42 generated tokens · last prompt 140 tokens · policy"
        " version 4–5",
        "model calls 2.50 s · tools 0.02 s · scoring 0.75 s",
        "advantage +0.500 · trained at step 6",
        "turn 1 · version 4 · 100 prompt tokens (0 cached) + 20 generated in 1.25 s · stop",
        "system",
        "  You may calculate.",
        "user",
        "  What is 17 * 23?",
        "assistant",
        "  I use the tool.",
        '  → calculate(expression="17 * 23")',
        "  ← result from calc in 0.012 s",
        "    391",
        "turn 2 · version 4 [0, 5), 5 [5, 22)",
        "  <answer>391</answer>",
        "stopped    answered",
        "answer     391",
        'score      1.000  {"verdict": "equal"}',
    ]
    places = [page.find(line) for line in expected]
    assert -1 not in places, expected[places.index(-1)]
    assert places == sorted(places)
    assert page.count("calculate(") == 1
    assert "tool\n" not in page.split("turn 2")[1]


def test_a_failed_attempt_says_why() -> None:
    failed = documents.record(
        status=RecordStatus.FAILED, score=None, advantage=None, final_answer=None,
        stop_reason=StopReason.FAILED,
        failure=Failure(kind="tool", message="the server went away"), completed_at=None, score_details={},
    )  # fmt: skip
    page = page_of(failed)
    assert "other Records" not in page
    scored = page_of(documents.record(attempt=2), others=[failed])
    assert f"{failed.id}  2 turns" in scored
    assert "tool: the server went away" in scored
    assert "FAILED  score –" in page
    assert "not trained" in page
    assert "failed     tool: the server went away" in page
    assert "answer     –" in page


def test_owners_are_shown_in_order_with_what_each_took_over() -> None:
    since = documents.record().created_at
    owners = (
        Ownership(owner="node-a-71-0a1b2c", attempt=1, since=since, until=since, ended="lease"),
        Ownership(
            owner="node-b-5-0a1b2c", attempt=2, since=since, until=since, ended="released", replayed=1,
            tokens=20, tool_seconds=0.5,
        ),
        Ownership(owner="other", attempt=4, since=since, replayed=2, tokens=1042, diverged_at=2, dropped=3),
    )  # fmt: skip
    turns = [
        replace(turn, attempt=attempt) for turn, attempt in zip(documents.two_turns(), (1, 4), strict=True)
    ]
    record = documents.record(owners=owners)
    page = page_of(record, *turns)
    expected = [
        "owner 1  node-a-71-0a1b2c on node-a · attempt 1 ·", "its lease ran out: it died or fell silent",
        "owner 2  node-b-5-0a1b2c on node-b · attempt 2", "released: it stopped, was drained",
        "from the journal: 1 turns, 20 tokens and 0.5 s of tools",
        "owner 3  other · attempt 4", "ended the trajectory: answered",
        "from the journal: 2 turns, 1,042 tokens",
        "diverged at turn 3, 3 turns dropped, kept as train/0/task_001/3/4",
        "turn 1 ·", "by owner 1", "turn 2 ·", "by owner 3",
    ]  # fmt: skip
    places = [page.find(line) for line in expected]
    assert -1 not in places, expected[places.index(-1)]
    assert places == sorted(places)
    assert [turn.owner for turn in turns_of(record, turns, turns)] == [1, 3]
    alone = documents.record(owners=owners[:1])
    assert "owner 1" not in page_of(alone, *turns)
    assert "holds the trajectory" in page_of(documents.record(owners=owners, stop_reason=None))


def test_what_else_happened_is_shown_in_its_turn() -> None:
    step = event(STEP, "the text of the turn", {"text": "you lose", "done": True})
    turn = replace(documents.call(0), events=(event("today", None, "2026-11-29"), step))
    page = page_of(documents.record(), turn)
    assert "→ once today" in page
    assert "    2026-11-29" in page
    assert "→ environment step\n" in page
    assert '"text": "you lose"' in page
    (shown_turn,) = turns_of(RECORD, [turn], [turn])
    assert [item.what for item in shown_turn.events] == ["once today", "environment step"]


def test_a_tool_call_that_was_begun_and_not_ended_may_have_taken_effect() -> None:
    whole = documents.two_turns()[0]
    begun = replace(whole, tool_executions=(replace(whole.tool_executions[0], finished=False),))
    note = "it had begun, and may have taken effect"
    assert note in page_of(documents.record(), begun)
    assert note not in page_of(documents.record(), whole)
    (turn,) = turns_of(RECORD, [begun], [begun])
    assert note in (turn.tools[0].note or "")


def test_other_records_of_the_slot_say_what_they_are() -> None:
    branch = documents.record(attempt=3, status=RecordStatus.RELEASED, score=None, owners=())
    owner = Ownership(owner="a", attempt=1, ended="restarted")
    anew = replace(branch, owners=(owner,))
    assert other_text(branch) == "a branch that a divergence dropped; never trained"
    assert other_text(anew) == "begun anew: its tools could not be restored"


def test_malformed_calls_and_context_resets_are_shown() -> None:
    broken = documents.call(
        1, parent=None, status=CallStatus.FORMAT_ERROR, error="arguments are no JSON",
        response={"content": None, "tool_calls": [{"name": "calculate", "arguments": "{17"}]},
        messages=({"role": "user", "content": [{"type": "text", "text": "part one"}]},),
    )  # fmt: skip
    page = page_of(documents.record(), documents.call(0), broken)
    assert "the context was reset" in page
    assert "formaterror" in page
    assert "→ calculate({17)" in page
    assert "arguments are no JSON" in page
    assert "  part one" in page


def test_what_a_model_writes_cannot_touch_the_terminal() -> None:
    evil = "[red]markup[/] \x1b[2J\x1b]0;title\x07 \x1b]8;;http://x\x1b\\link \x9b31m \u202e :smile: \x00"
    message = {"role": evil, "content": evil}
    turn = documents.call(0, response={"content": evil}, messages=(message,), error=evil)
    page = page_of(documents.record(query=evil, final_answer=evil, owner=evil), turn)
    assert not [letter for letter in page if ord(letter) < 32 and letter != "\n"]
    assert not {"\x7f", "\x9b", "\u202e"} & set(page)
    assert "[red]markup[/]" in page
    assert ":smile:" in page
    assert "title" not in page


def test_a_trajectory_of_a_client_shows_branches_roles_and_rewards() -> None:
    main, side = documents.call(0), documents.call(1, parent=None, opens_branch=True, role="critic")
    again = documents.call(2, parent=main.id, messages=({"role": "user", "content": "and now"},))
    record = documents.record(
        train_rule="main", untrained_calls=(1,), trace_id="ab" * 16,
        reported_reward=ReportedReward(score=0.75, details={"by": "me"}, turn_rewards={"2": 0.5, "0": -1}),
    )  # fmt: skip
    page = page_of(record, main, side, again)
    for line in (
        f"trace {'ab' * 16}",
        "train rule main: it chooses 2 of 3 model calls",
        "turn 2 · role critic ·",
        "stop · not trained",
        "a new branch: this is the whole prompt",
        "stop · continues turn 1",
        'reported   score 0.750 by the agent, turn 1 -1, turn 3 +0.5  {"by": "me"}',
    ):
        assert line in page, line
    assert rows(page, "1 ") == [["1", "2", "role", "critic", "no"]]
    assert rows(page, "2 ")[-1] == ["2", "1", "3", "main", "yes", "and", "now"]
    assert "context was reset" not in page
    assert page.count("role critic") == 2, "once in the title of its turn, and in the list of branches"


def test_a_branch_names_what_its_request_changed() -> None:
    question, told = {"role": "user", "content": "2 + 2?"}, {"role": "tool", "content": "4"}
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
    spoken = {"content": "I add.", "tool_calls": called["tool_calls"]}
    first = documents.call(0, messages=(question,), response=spoken, tool_executions=())
    more = (called, told)
    changed = "the request has the answer of turn 1 without its text"
    for begins, place in (
        ("a new branch: this is the whole prompt", {"messages": (question, *more), "opens_branch": True}),
        ("earlier thoughts are dropped: this is the whole new prompt",
         {"messages": (question, *more), "drops_thoughts": True}),
    ):  # fmt: skip
        branch = documents.call(1, parent=None, **place)
        assert f"{begins}; {changed}" in " ".join(page_of(documents.record(), first, branch).split())
        assert contexts_of([first, branch])[1].begins == f"{begins}; {changed}"
    said = documents.call(1, parent=first.id, messages=(told,), response=spoken, tool_executions=())
    behind = documents.call(2, parent=first.id, messages=(told, called, told))
    branch = "a new branch: the request has the answer of turn 2 without its text"
    assert branch in page_of(documents.record(), first, said, behind)
    turns = turns_of(RECORD, [behind], [first, said, behind])
    assert (turns[0].begins, turns[0].continues) == (branch, 1)
    anew = documents.call(2, parent=None, follows=said.id, opens_branch=True, messages=())
    assert "cannot go on from the sampled tokens" in page_of(documents.record(), first, said, anew)


def test_a_condensed_result_says_by_whom() -> None:
    first, *rest = documents.two_turns()
    asked = BrowseCall(model="a", reply="short", seconds=0.5)
    condensed = Condensed(
        purpose="find", original="long", chars=9000, tokens=2072, calls=(asked,), result="short"
    )
    executions = tuple(replace(each, condensed=condensed) for each in first.tool_executions)
    page = page_of(documents.record(), replace(first, tool_executions=executions), *rest)
    assert "condensed from 2,072 tokens by a" in page


def test_records_are_listed_with_their_reasons() -> None:
    failed = documents.row(
        id="train/0/a/0/1", status=RecordStatus.FAILED, failure=Failure(kind="engine", message="gone"),
        score=None, advantage=None, final_answer=None, min_version=None, max_version=None,
    )  # fmt: skip
    unused = documents.row(id="train/0/b/0/1", status=RecordStatus.ABANDONED, abandoned_because="zero_spread")
    page = printed(render_rows([documents.row(), failed, unused]))
    assert rows(page, "train/0/task_001")[0][1:6] == ["trained", "answered", "391", "1.000", "+0.500"]
    assert rows(page, "train/0/a")[0][1:5] == ["failed", "engine:", "gone", "–"]
    assert rows(page, "train/0/b")[0][1:3] == ["abandoned", "zero_spread"]


def test_a_harness_shows_ending_output_diff_and_tests() -> None:
    diff = "--- a/a.py\n+++ b/a.py\n"
    harness = HarnessRun(run=RUN, changed_files=("a.py",), changes=1, diff=diff, scoring=TESTS)
    shown = replace(documents.record(), harness=HarnessRun.from_document(harness.to_document()))
    assert shown.harness == harness
    text = printed(render_trajectory(WholeTrajectory(record=shown)), 100)
    assert "\x1b" not in text
    ended, changed = "exited · exit code 0 · 2.5 s", "1 files changed: a.py"
    for part in (ended, changed, "+++ b/a.py", "1 test failed", "hi "):
        assert part in text
