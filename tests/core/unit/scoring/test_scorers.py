"""Test the built-in scorers, failures of scorers, and what a scorer of a stored trajectory is shown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_calls import TASK, model_call, record
from waiting import until

from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.errors import ConfigError, ScorerError, judge
from agentrl.scoring.scorers import (
    SCORERS,
    ScoredCall,
    ScorerContext,
    ScoreResult,
    run_scorer,
    scorer,
    stored_context,
)


def context(final_answer: str | None, answer: Any, *more: Any) -> ScorerContext:
    return ScorerContext(query="q", final_answer=final_answer, answer=answer, aug_answers=more)


def asks(query: str) -> ScorerContext:
    return ScorerContext(query=query, final_answer="4", answer="4")


async def score(name: str, given: ScorerContext, timeout: float = 60) -> float:
    return (await run_scorer(name, given, timeout)).score


@pytest.mark.parametrize(
    ("given", "gold", "expected"),
    [
        ("1,000", 1000, 1.0),
        ("1,0,0", "100", 0.0),
        ("Lyon", ["Paris", "Lyon"], 1.0),
        (None, "Paris", 0.0),
    ],
)
async def test_exact(given: str | None, gold: Any, expected: float) -> None:
    assert await score("exact", context(given, gold)) == expected


async def test_further_answers_are_accepted() -> None:
    assert await score("exact", context("NYC", "New York", "nyc")) == 1.0


@pytest.mark.parametrize(
    ("given", "gold", "expected"),
    [("a big red dog", "the red dog", 0.8), ("cat", "dog", 0.0), ("", "dog", 0.0), (None, "dog", 0.0)],
)
async def test_f1(given: str | None, gold: str, expected: float) -> None:
    assert await score("f1", context(given, gold)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given", "gold", "expected"),
    [
        (r"\frac{1}{2}", "0.5", 1.0),
        ("(x+1)^2", "x^2+2x+1", 1.0),
        ("12", "13", 0.0),
        ("banana", "3", 0.0),
        (None, "3", 0.0),
        ("x" * 10_000, "3", 0.0),
    ],
)
async def test_math(given: str | None, gold: str, expected: float) -> None:
    assert await score("math", context(given, gold)) == expected


@pytest.mark.parametrize("name", ["exact", "f1", "math"])
async def test_a_task_without_an_answer_cannot_be_scored(name: str) -> None:
    with pytest.raises(ScorerError, match="the task has no answer"):
        await score(name, context("4", None))


def waits_without_await(_: ScorerContext) -> float:
    time.sleep(0.3)
    return 1.0


def names_its_process(context: ScorerContext) -> ScoreResult:
    return ScoreResult(1.0, {"pid": os.getpid(), "messages": len(context.messages)})


@scorer("blocks-in-await", blocking=True)
async def blocks_in_await(_: ScorerContext) -> float:
    time.sleep(0.3)  # noqa: ASYNC251  what the test is about
    return 0.5


def breaks(context: ScorerContext) -> Any:
    """Go wrong in a process, as the query says."""
    match context.query:
        case "exits":
            raise SystemExit(3)
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "names an outage":
            raise ScorerError("the simulator is gone", outage=judge("simulator"), retry_after=3)
        case "returns a generator":
            return (number for number in ())
        case "never ends":
            subprocess.Popen(["sleep", "987654"])
            while True:
                pass
    return 1.0


def alive_in_group(group: int) -> list[str]:
    """Return the ids of a process group's members that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of = path.read_text().rpartition(") ")[2].split()[:3]
            found += [path.parent.name] if int(of) == group and state not in "ZX" else []
    return found


@pytest.mark.parametrize("name", ["waits_without_await", "blocks_in_await"])
async def test_a_blocking_scorer_leaves_the_event_loop_free(name: str) -> None:
    await score(f"{__name__}:names_its_process", context("4", "4"))  # the worker has started
    task = asyncio.ensure_future(score(f"{__name__}:{name}", context("4", "4")))
    turns = 0
    while not task.done():
        await asyncio.sleep(0.005)
        turns += 1
    assert await task in (1.0, 0.5)
    assert turns > 20


async def test_a_synchronous_scorer_runs_in_another_process_which_is_used_again() -> None:
    given = ScorerContext(query="q", final_answer="4", messages=({"role": "user", "content": "q"},))
    results = [await run_scorer(f"{__name__}:names_its_process", given, 60) for _ in range(2)]
    pids = {result.details["pid"] for result in results}
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert results[0].details["messages"] == 1


async def test_a_time_out_kills_the_process_and_its_children() -> None:
    before = (await run_scorer(f"{__name__}:names_its_process", context("4", "4"), 60)).details["pid"]
    with pytest.raises(ScorerError, match=r"breaks took longer than 0\.5 s"):
        await score(f"{__name__}:breaks", asks("never ends"), timeout=0.5)
    await until(lambda: not alive_in_group(before), 10)
    assert await score(f"{__name__}:names_its_process", context("4", "4")) == 1.0


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("exits", "scorer .*breaks: raised SystemExit: 3"),
        ("dies", "a scorer's worker process died"),
        ("returns a generator", "cannot pickle 'generator' object"),
    ],
)
async def test_what_goes_wrong_in_a_process_has_a_name(name: str, problem: str) -> None:
    with pytest.raises(ScorerError, match=problem):
        await score(f"{__name__}:breaks", asks(name))


async def test_an_outage_that_a_process_reports_stays_one() -> None:
    with pytest.raises(ScorerError, match="the simulator is gone") as caught:
        await score(f"{__name__}:breaks", asks("names an outage"))
    assert (caught.value.outage, caught.value.retry_after) == (judge("simulator"), 3)


async def test_a_function_that_no_process_can_import_is_named() -> None:
    SCORERS.add(lambda _: 1.0, "nameless")
    with pytest.raises(ConfigError, match="cannot be sent to a worker process") as caught:
        await score("nameless", context("4", "4"))
    assert "top level of a module" in str(caught.value)
    unpicklable = ScorerContext(query="q", final_answer="4", meta={"lock": threading.Lock()})
    with pytest.raises(ScorerError, match="a trajectory cannot be sent to a worker process"):
        await score(f"{__name__}:names_its_process", unpicklable)


async def fails(context: ScorerContext) -> Any:
    """Go wrong, as the query says."""
    match context.query:
        case "hangs":
            await asyncio.Event().wait()
        case "text":
            return "good"
        case "nan":
            return float("nan")
    raise ZeroDivisionError("oops")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("raises", "raised ZeroDivisionError: oops"),
        ("hangs", "longer than 0.05 s"),
        ("text", "returned 'good'"),
        ("nan", "returned nan"),
    ],
)
async def test_what_goes_wrong_is_a_failure_and_never_a_zero(name: str, problem: str) -> None:
    with pytest.raises(ScorerError, match=problem):
        await score(f"{__name__}:fails", asks(name), timeout=0.05)


async def test_a_scorer_that_cannot_be_imported_is_no_failure_of_a_trajectory() -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        await score(f"{__name__}:not_there", context("4", "4"), timeout=0.05)


@scorer("of two")
def of_two(model_answer: str, ground_truth: dict[str, Any]) -> float:
    """A scorer as the original system registers it."""
    return float(model_answer == ground_truth["answer"] and ground_truth["query"] == "q")


@scorer("of three")
async def of_three(model_answer: str, ground_truth: dict[str, Any], scorer_agent_config: Any = None) -> float:
    """A scorer with the section ``scorer_agent``."""
    return float(model_answer == ground_truth["answer"]) * scorer_agent_config.get("weight", 1)


async def test_scorers_of_the_original_take_two_and_three_arguments(tmp_path: Path) -> None:
    path = tmp_path / "agent_config.yml"
    path.write_text("scorer_agent: {weight: 0.5, models: []}")
    for config, right in ((str(path), 0.5), (str(tmp_path / "none.yml"), 1.0)):
        for answer in ("4", None):
            asked = ScorerContext(query="q", final_answer=answer, answer="4", agent_config_path=config)
            wanted = answer is not None
            assert (await run_scorer("of two", asked, 60)).score == wanted
            assert (await run_scorer("of three", asked, 60)).score == wanted * right
            assert (await run_scorer(f"{__name__}:of_three", asked, 60)).score == wanted * right
    with pytest.raises(TypeError, match="it takes 4 arguments"):
        scorer("of four")(lambda a, b, c, d: 1.0)


async def test_the_example_scorer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("assets/examples")
    name = "custom_scorer:close_number"
    assert await score(name, context("42", "42")) == 1.0
    assert await score(name, context("21", "42")) == 0.5
    details = (await run_scorer(name, context("many", "42"), 5)).details
    assert details == {"why": "no number", "scorer": name}


async def half(_: ScorerContext) -> ScoreResult:
    return ScoreResult(0.5, {"why": "half"}, [1.0, 0.0])


async def gives_by_index(_: ScorerContext) -> ScoreResult:
    return ScoreResult(1.0, {}, {1: 2.0})


def call(*tool_rewards: float, status: str = "completed") -> ScoredCall:
    return ScoredCall(content="", tool_calls=(), status=status, tool_rewards=tool_rewards)


async def test_a_weighted_sum_runs_every_scorer() -> None:
    given = ScorerContext(query="q", final_answer="5", answer="4", calls=(call(),))
    result = await run_scorer("0.8*exact + 0.2*format", given, 10)
    assert result.score == pytest.approx(0.2)
    marks = {"weight": 0.2, "score": 1.0, "marked": True, "malformed": []}
    parts = {"exact": {"weight": 0.8, "score": 0.0}, "format": marks}
    assert result.details == {"scorer": "0.8*exact + 0.2*format", "parts": parts}


async def test_one_scorer_that_fails_fails_the_sum() -> None:
    with pytest.raises(ScorerError, match="raised ZeroDivisionError"):
        await run_scorer(f"0.5*exact + 0.5*{__name__}:fails", context("4", "4"), 10)


@pytest.mark.parametrize(
    ("given", "calls", "expected"),
    [("<answer>", (call(),), 1.0), (None, (call(),), 0.0), ("4", (call(), call(status="formaterror")), 0.0)],
)
async def test_format(given: str | None, calls: tuple[ScoredCall, ...], expected: float) -> None:
    assert await score("format", ScorerContext(query="q", final_answer=given, calls=calls)) == expected


async def scores_the_tools(context: ScorerContext) -> ScoreResult:
    return ScoreResult(sum(sum(call.tool_rewards) for call in context.calls), turn_rewards=())


async def test_turn_rewards_come_from_the_scorer_or_else_from_the_tools() -> None:
    given = ScorerContext(query="q", final_answer="4", calls=(call(0.25), call(1.0, -0.5)))
    result = await run_scorer(f"{__name__}:half", given, 10)
    assert result.details == {"why": "half", "turn_rewards": [1.0, 0.0], "scorer": f"{__name__}:half"}
    by_index = await run_scorer(f"{__name__}:gives_by_index", given, 10)
    assert by_index.details["turn_rewards"] == [0.0, 2.0]
    both = await run_scorer(f"0.5*{__name__}:half + 2.0*{__name__}:gives_by_index", given, 10)
    assert both.details["turn_rewards"] == [0.5 * 1.0, 2.0 * 2.0]
    only_tools = await run_scorer("format", given, 10)
    assert only_tools.details["turn_rewards"] == [0.25, 0.5]
    not_twice = await run_scorer(f"{__name__}:scores_the_tools", given, 10)
    assert (not_twice.score, "turn_rewards" in not_twice.details) == (0.75, False)
    summed = await run_scorer(f"1.0*format + 1.0*{__name__}:scores_the_tools", given, 10)
    assert "turn_rewards" not in summed.details
    without = await run_scorer("format", ScorerContext(query="q", final_answer="4", calls=(call(),)), 10)
    assert "turn_rewards" not in without.details


async def test_a_dropped_call_keeps_its_index_and_gets_nothing() -> None:
    dropped = replace(call(status="formaterror"), dropped=True)
    given = ScorerContext(query="q", final_answer="4", calls=(call(), dropped))
    assert (await run_scorer(f"{__name__}:gives_by_index", given, 10)).details["turn_rewards"] == [0.0, 0.0]
    assert await score("format", given) == 1.0


async def test_the_example_rewards_calls_whose_tools_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("assets/examples")
    calls = tuple(
        ScoredCall(content="", tool_calls=tools, status=status, tool_rewards=())
        for tools, status in ((("add",), "completed"), (("add",), "toolfailed"), ((), "completed"))
    )
    given = ScorerContext(query="q", final_answer="4", answer="4", calls=calls)
    result = await run_scorer("1.0*exact + 0.5*custom_turn_rewards:tool_use", given, 10)
    assert (result.score, result.details["turn_rewards"]) == (1.0, [0.5, -0.5, 0.0])


async def test_turn_rewards_for_other_calls_than_there_are_fail() -> None:
    given = ScorerContext(query="q", final_answer="4", calls=(call(),))
    with pytest.raises(ScorerError, match=r"returned the turn rewards \[1.0, 0.0\] for 1 model calls"):
        await run_scorer(f"{__name__}:half", given, 10)
    with pytest.raises(ScorerError, match="rewards the model call 1 of 1"):
        await run_scorer(f"{__name__}:gives_by_index", given, 10)


def made(index: int, parent: int | None, text: str) -> DispatchedSamplingTask:
    messages = ({"role": "user", "content": f"ask {text}"},)
    return model_call(record().id, index, parent, messages=messages,
                      response={"role": "assistant", "content": text})  # fmt: skip


def shown(*calls: DispatchedSamplingTask) -> list[str]:
    return [message["content"] for message in stored_context(TASK, record(), calls, "").messages]


def test_calls_in_a_row_are_one_conversation_from_the_last_reset_on() -> None:
    rows = made(0, None, "a"), made(1, 0, "b"), made(2, None, "c"), made(3, 2, "d")
    assert shown(*rows) == ["ask c", "c", "ask d", "d"]


def test_of_branches_the_longest_is_shown_and_a_trajectory_may_have_no_calls() -> None:
    branches = made(0, None, "a"), made(1, 0, "b"), made(2, 0, "aside"), made(3, 1, "c")
    assert shown(*branches) == ["ask a", "a", "ask b", "b", "ask c", "c"]
    assert shown() == []
