"""Scorer ``math``: mathematical equality by math-verify, in worker processes with a time limit.

math-verify limits its time by SIGALRM, which works only in the main thread of a process, where a worker of
the pool runs it.
"""

from __future__ import annotations

from agentrl.errors import ScorerError
from agentrl.scoring.process_pool import run_in_process
from agentrl.scoring.scorers import ScorerContext, scorer
from agentrl.scoring.text_match import number, same

SECONDS = 5
"""Time limit of each parse and each comparison, in seconds."""


@scorer("math")
async def math(context: ScorerContext) -> float:
    """Return 1 if the answer equals an accepted one, else 0. Plain numbers are compared without a worker."""
    if not context.accepted:
        raise ScorerError("the task has no answer to compare with")
    if context.final_answer is None:
        return 0.0
    for gold in context.accepted:
        if same(context.final_answer, gold):
            return 1.0
    if number(context.final_answer) is not None and all(
        number(gold) is not None for gold in context.accepted
    ):
        return 0.0
    return float(await run_in_process(equal, context.accepted, context.final_answer))


def equal(golds: tuple[str, ...], answer: str) -> bool:
    """Return whether math-verify finds ``answer`` equal to one of ``golds``. Call it in a main thread."""
    from math_verify import parse, verify

    def read(text: str) -> list[object]:
        marked = text if "$" in text or "\\boxed" in text else f"${text}$"
        return list(parse(marked, parsing_timeout=SECONDS) or parse(text, parsing_timeout=SECONDS))

    target = read(answer)
    return bool(target) and any(verify(read(gold), target, timeout_seconds=SECONDS) for gold in golds)
