"""Scorers that ask no model: ``exact``, ``f1``, ``math``, ``format`` and ``tool_rewards``."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.documents.status import CallStatus
from agentrl.errors import ScorerError
from agentrl.scoring.answers import number, same, word_f1
from agentrl.scoring.process_pool import run_in_process
from agentrl.scoring.scorers import ScorerContext, ScoreResult, scorer

MATH_SECONDS = 5
"""Time limit of each parse and each comparison, in seconds."""


@scorer("exact")
async def exact(context: ScorerContext) -> float:
    """Return 1 if the answer equals an accepted one, else 0.

    Case, punctuation, English articles and thousands separators are ignored.
    """
    return _best(same, context)


@scorer("f1")
async def f1(context: ScorerContext) -> float:
    """Return the best word F1 over all accepted answers, in [0, 1] (SQuAD, arXiv 1606.05250)."""
    return _best(word_f1, context)


@scorer("math")
async def math(context: ScorerContext) -> float:
    """Return 1 if math-verify finds the answer equal to an accepted one, else 0.

    Plain numbers are compared without it. It limits its time by SIGALRM, which works only in the main thread
    of a process, where a worker of the pool runs it.
    """
    is_same, answer = _best(same, context), context.final_answer
    if is_same or answer is None or None not in map(number, (answer, *context.accepted)):
        return is_same
    return float(await run_in_process(equal, context.accepted, answer))


def _best(likeness: Callable[[str, str], float], context: ScorerContext) -> float:
    """Return the answer's largest likeness to an accepted one; 0 without an answer."""
    if not context.accepted:
        raise ScorerError("the task has no answer to compare with")
    if context.final_answer is None:
        return 0.0
    return float(max(likeness(context.final_answer, gold) for gold in context.accepted))


def equal(golds: tuple[str, ...], answer: str) -> bool:
    """Return whether math-verify finds ``answer`` equal to one of ``golds``. Call it in a main thread."""
    from math_verify import parse, verify

    def read(text: str) -> list[object]:
        marked = text if "$" in text or "\\boxed" in text else f"${text}$"
        return list(parse(marked, parsing_timeout=MATH_SECONDS) or parse(text, parsing_timeout=MATH_SECONDS))

    target = read(answer)
    return bool(target) and any(verify(read(gold), target, timeout_seconds=MATH_SECONDS) for gold in golds)


@scorer("format")
async def well_formed(context: ScorerContext) -> ScoreResult:
    """Return 1 if the answer is marked (``answer_schema``) and every tool call is well-formed, else 0."""
    malformed = [index for index, call in enumerate(context.calls) if call.status == CallStatus.FORMAT_ERROR]
    is_marked = context.final_answer is not None
    return ScoreResult(float(is_marked and not malformed), {"marked": is_marked, "malformed": malformed})


@scorer("tool_rewards")
async def tool_rewards(context: ScorerContext) -> ScoreResult:
    """Return the sum of all rewards that tools gave, to calls and to their state; 0 without one.

    The score includes every reward, so no reward is also credited to a single model call.
    """
    by_tool = {
        name: sum(given.get("calls", ())) + (given.get("state") or 0.0)
        for name, given in context.tool_rewards.items()
    }
    return ScoreResult(float(sum(by_tool.values())), {"by_tool": by_tool}, turn_rewards=())
