"""Scorer ``math``: mathematical equality by math-verify, in worker processes with a time limit.

math-verify limits its time by SIGALRM, which works only in the main thread of a process. The workers of the
pool run it there, and end with the process that started them.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache

from agentrl.errors import ScorerError
from agentrl.scoring.scorers import ScorerContext, scorer
from agentrl.scoring.text_match import number, same

SECONDS = 5
"""Time limit of each parse and each comparison, in seconds."""

_WORKERS = 2
_PR_SET_PDEATHSIG = 1


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
    try:
        future = _pool().submit(equal, context.accepted, context.final_answer)
        matched: bool = await asyncio.wrap_future(future)
    except BrokenProcessPool as error:
        _pool.cache_clear()
        raise ScorerError(f"a math worker died: {error}") from error
    return float(matched)


def equal(golds: tuple[str, ...], answer: str) -> bool:
    """Return whether math-verify finds ``answer`` equal to one of ``golds``. Call it in a main thread."""
    from math_verify import parse, verify

    def read(text: str) -> list[object]:
        marked = text if "$" in text or "\\boxed" in text else f"${text}$"
        return list(parse(marked, parsing_timeout=SECONDS) or parse(text, parsing_timeout=SECONDS))

    target = read(answer)
    return bool(target) and any(verify(read(gold), target, timeout_seconds=SECONDS) for gold in golds)


@cache
def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(_WORKERS, multiprocessing.get_context("spawn"), initializer=_prepare_worker)


def _prepare_worker() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
