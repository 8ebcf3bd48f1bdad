"""Check, before tasks are loaded, that a right answer in the form that a prompt asks for would score 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from agentrl.documents.task import Task, scorer_weights
from agentrl.documents.task_rows import asked_schema
from agentrl.errors import ConfigError, FailureError
from agentrl.scoring.answers import extract_answer, marked
from agentrl.scoring.scorers import ScorerContext, run_scorer

CHECKED: Final = frozenset({"agentcpm", "asearcher", "exact", "f1", "math"})
"""Scorers that compare with the answer. The judge gives 1 to an equal answer without a request."""
_SECONDS: Final = 60.0
_NO_CONFIG: Final = "/nonexistent/agent_config.yml"
"""No such file: a judge that would need a request fails, and the failure is not counted against the task."""


async def unscorable(tasks: Sequence[Task]) -> list[str]:
    """Return why tasks would not score 1 with their own answer, marked as their prompts ask: a text for each.

    Runs each task's own ``answer_schema`` and scorer on the text that a right model would write. Tasks whose
    scorers ask a model, run code or are a user's own are left out: ``unchecked``.
    """
    return [problem for task in tasks if (problem := await _problem(task)) is not None]


def unchecked(tasks: Sequence[Task]) -> list[str]:
    """Return the scorers of tasks that ``unscorable`` leaves out."""
    return sorted({name for task in tasks for name in scorer_weights(task.scorer)} - CHECKED)


async def _problem(task: Task) -> str | None:
    golds = [gold for gold in (*_listed(task.answer), *task.aug_answers) if gold is not None]
    names = CHECKED.intersection(scorer_weights(task.scorer))
    if not golds or not names:
        return None
    asked = asked_schema(prompt_texts(task)) or task.answer_schema
    text = marked(str(golds[0]), asked)
    try:
        given = extract_answer(text, task.answer_schema)
        if given is None:
            return (
                f"task {task.task_id}: the prompt asks for {marked('…', asked)}, of which answer_schema"
                f" {task.answer_schema} reads nothing, so such an answer scores 0: give answer_schema {asked}"
                f" (--task_fields answer_schema:={asked}), or ask for {marked('…', task.answer_schema)}"
            )
        context = ScorerContext(
            query=task.query, final_answer=given, answer=task.answer, aug_answers=task.aug_answers,
            meta=task.meta, agent_config_path=_NO_CONFIG,
        )  # fmt: skip
        for name in sorted(names):
            score = (await run_scorer(name, context, _SECONDS)).score
            if score != 1:
                return (
                    f"task {task.task_id}: its own answer, written as {text[:80]!r} and read as"
                    f" {given[:80]!r}, scores {score:g} with the scorer {name}"
                )
    except (ConfigError, FailureError):
        return None  # the schema is refused by name; a judge is not asked
    return None


def prompt_texts(task: Task) -> Iterator[str]:
    """Yield the texts of a task that may say how to mark the answer."""
    yield from filter(None, (task.query, task.query_prompt, task.system_prompt))
    for message in task.messages:
        if message.get("role") in ("system", "user"):
            yield str(message.get("content") or "")


def _listed(answer: object) -> Sequence[object]:
    return answer if isinstance(answer, (list, tuple)) else (answer,)
