"""Environment ``demo.sums:Sums``: sums that a Python program computes, as in the example of the sandbox."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from agentrl import Environment, ScorerContext, ScoreResult, TaskRequest
from demo.arithmetic import evaluate
from demo.tasks import QUESTION, tiny_expressions


class Sums(Environment):
    """Sums of two numbers; the tool is one of ``--tool_config_path``."""

    task_defaults = {"tools": ["code_interpreter"]}  # noqa: RUF012

    @classmethod
    def tasks(cls, request: TaskRequest) -> Iterator[dict[str, Any]]:
        """Yield ``request.n`` random sums."""
        for expression in islice(tiny_expressions(request.random_seed), request.n):
            yield {"query": QUESTION.format(expression), "answer": evaluate(expression)}

    @classmethod
    def score(cls, context: ScorerContext) -> ScoreResult:
        """Return whether the answer is the sum."""
        return ScoreResult(float((context.final_answer or "").strip() == context.answer))
