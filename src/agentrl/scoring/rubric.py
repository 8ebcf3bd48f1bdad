"""Scorer ``rubric``: a judge decides each of a task's weighted criteria."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.chat.parsers import split_reasoning
from agentrl.documents.base import is_finite
from agentrl.errors import ScorerError
from agentrl.llm.agent_config import load_judge
from agentrl.scoring.judge import ask_judge, judge_prompt, judged_details
from agentrl.scoring.scorers import ScorerContext, ScoreResult, scorer
from agentrl.scoring.shared_answers import SharedAnswers

DEFAULT_TEMPLATE = """\
Decide which criteria an answer to a question meets.

Question: {question}
Answer: {pred_answer}
Criteria: {criteria}

Reply with one line for each criterion, and nothing else: its number, a colon, and Met or Unmet. For example:
1: Met"""

_LINE = re.compile(r"\W*(\d{1,4})\s*[.:)]\W*\s*(un|not\s)?met\W*", re.IGNORECASE)
_HINT = 'give the task a field like "rubric": [{"criterion": "names the river", "weight": 2}]'

_verdicts: SharedAnswers[tuple[bool, ...]] = SharedAnswers()


@dataclass(frozen=True, slots=True)
class Criterion:
    """What an answer should do, or with a negative weight should not do."""

    text: str
    weight: float = 1.0


@scorer("rubric")
async def rubric(context: ScorerContext) -> ScoreResult:
    """Return the weight of the criteria that are met, over the sum of all positive weights, in [0, 1].

    The criteria are the task's field ``rubric``. All are judged in one request. No answer scores 0. Raises
    ScorerError if the task has no rubric or no model judges every criterion.
    """
    criteria = read_criteria(context.meta.get("rubric"))
    if context.final_answer is None:
        return ScoreResult(0.0, {"verdict": "no answer"})
    section = load_judge(context.agent_config_path)
    template = section.rubric_prompt_template or DEFAULT_TEMPLATE
    listed = "\n".join(f"{number}: {item.text}" for number, item in enumerate(criteria, 1))
    values = {"question": context.query, "pred_answer": context.final_answer, "criteria": listed}
    answer, is_new = await _verdicts.get(
        (section.models, template, *values.values()),
        lambda: ask_judge(section, judge_prompt(template, values), _reader(len(criteria))),
    )
    met = [item for item, is_met in zip(criteria, answer.value, strict=True) if is_met]
    best = sum(item.weight for item in criteria if item.weight > 0)
    score = min(1.0, max(0.0, sum(item.weight for item in met) / best))
    return ScoreResult(score, {**judged_details(answer, is_new=is_new), "met": [item.text for item in met]})


def read_criteria(value: Any) -> list[Criterion]:
    """Return the criteria of a task: texts, or mappings with ``criterion`` and ``weight``.

    Raises ScorerError for anything else, and if no weight is positive.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise ScorerError("the task has no rubric", hint=_HINT)
    criteria = []
    for item in value:
        given = item if isinstance(item, Mapping) else {"criterion": item}
        text, weight = given.get("criterion"), given.get("weight", 1.0)
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not isinstance(text, str) or not text.strip() or not is_number or not is_finite(weight):
            raise ScorerError(f"the rubric has the criterion {str(item)[:200]!r}", hint=_HINT)
        criteria.append(Criterion(" ".join(text.split()), float(weight)))
    if not any(item.weight > 0 for item in criteria):
        raise ScorerError("the rubric has no criterion with a positive weight", hint=_HINT)
    return criteria


def verdicts_of(reply: str, count: int) -> tuple[bool, ...] | None:
    """Return whether each of ``count`` criteria is met; None unless every one has exactly one verdict."""
    found: dict[int, bool] = {}
    for line in split_reasoning(reply).rest.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        number = int(match.group(1))
        if number in found:
            return None
        found[number] = match.group(2) is None
    if set(found) != set(range(1, count + 1)):
        return None
    return tuple(found[number] for number in sorted(found))


def _reader(count: int) -> Callable[[str], tuple[bool, ...] | None]:
    return lambda reply: verdicts_of(reply, count)
