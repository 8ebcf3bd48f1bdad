"""Scorer ``agentcpm``: an LLM judge behind OpenAI-compatible endpoints, with failover."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from agentrl.chat.parsers import split_reasoning
from agentrl.errors import ScorerError, judge
from agentrl.llm.agent_config import AgentSection, load_judge
from agentrl.llm.ask import Answer, NoAnswerError, ask
from agentrl.llm.client import Messages
from agentrl.llm.deadline import Deadline, current_deadline
from agentrl.llm.untrusted import RULE, fenced
from agentrl.scoring.scorers import ScorerContext, ScoreResult, scorer
from agentrl.scoring.shared_answers import SharedAnswers
from agentrl.scoring.text_match import same

T = TypeVar("T")

JUDGES = frozenset({"agentcpm", "asearcher", "rubric"})
"""Names of the scorers that need the section ``scorer_agent`` of ``--agent_config_path``."""

DEFAULT_TEMPLATE = """\
Decide whether a predicted answer to a question means the same as the labeled answer.

Question: {question}
Labeled answer: {labeled_answer}
Predicted answer: {pred_answer}

The labeled answer is right, whatever you know yourself. Wording, format, units written out or not, and \
further true details do not matter; a different fact, number or name does, and so does an answer that hedges \
between several. Reply with one word: Correct or Incorrect."""

SECONDS = 120.0
"""Time limit of a judgement outside ``run_scorer``."""

_RESERVE = 0.05
"""Fraction of the scorer's time that is kept to report which models failed, and how."""

_KEPT_CHARS = 8192
"""Characters of a reply that a Record keeps: its end, where the verdict is."""

_LABEL = r"(?:final\s+)?(?:verdict|answer|judge?ment|decision|grade|result|conclusion)"
_VERDICT = re.compile(rf"(?:{_LABEL}\s*(?:is\s*)?:?\s*)?(in)?correct", re.IGNORECASE)
_MARKUP = " \t*_`\"'“”‘’.!"

_verdicts: SharedAnswers[bool] = SharedAnswers()


@scorer("agentcpm", "asearcher")
async def agentcpm(context: ScorerContext) -> ScoreResult:
    """Return 1 if the judge finds the answer correct, else 0.

    No answer scores 0 and an answer equal to an accepted one scores 1, both without a request. A question
    with the same answer is judged once in a process. Raises ScorerError if no model gives a verdict.
    """
    if not context.accepted:
        raise ScorerError("the task has no answer to judge by")
    if context.final_answer is None:
        return ScoreResult(0.0, {"verdict": "no answer"})
    if any(same(context.final_answer, answer) for answer in context.accepted):
        return ScoreResult(1.0, {"verdict": "equal"})
    section = load_judge(context.agent_config_path)
    template = section.judge_prompt_template or DEFAULT_TEMPLATE
    values = {
        "question": context.query,
        "labeled_answer": " | ".join(context.accepted),
        "pred_answer": context.final_answer,
    }
    answer, is_new = await _verdicts.get(
        (section.models, template, *values.values()),
        lambda: ask_judge(section, judge_prompt(template, values), verdict_of),
    )
    return ScoreResult(float(answer.value), judged_details(answer, is_new=is_new))


def judge_prompt(template: str, values: Mapping[str, str]) -> Messages:
    """Return the template with the fields ``{name}`` of ``values`` filled in, each as a block.

    Other braces stay unchanged.
    """
    blocks = fenced(values)
    fields = "|".join(map(re.escape, values))
    text = re.sub(rf"\{{({fields})\}}", lambda match: blocks[match.group(1)], template)
    return [{"role": "system", "content": RULE}, {"role": "user", "content": text}]


def verdict_of(reply: str) -> bool | None:
    """Return whether a reply says "Correct"; None if it says neither that nor "Incorrect", or both.

    The last line holds the verdict and nothing else, except for a label (``Verdict:``) and markup. No
    earlier line may hold the other verdict. Reasoning does not count, closed or not.
    """
    lines = [line.replace("*", "").strip(_MARKUP) for line in split_reasoning(reply).rest.splitlines()]
    found = [_VERDICT.fullmatch(line) for line in lines if line]
    verdicts = {match.group(1) is None for match in found if match}
    return verdicts.pop() if found and found[-1] and len(verdicts) == 1 else None


async def ask_judge(section: AgentSection, messages: Messages, read: Callable[[str], T | None]) -> Answer[T]:
    """Ask the judge models in order within the scorer's time. Raises ScorerError.

    The error names an outage if every model is down.
    """
    limit = current_deadline()
    seconds = SECONDS if limit is None else limit.left()
    try:
        return await ask(section, messages, read, Deadline(seconds * (1 - _RESERVE)))
    except NoAnswerError as error:
        names = ", ".join(endpoint.model for endpoint in section.models)
        raise ScorerError(
            f"no judge gave a verdict: {error}",
            hint="see scorer_agent in the agent config",
            outage=judge(names) if error.is_outage else None,
            retry_after=error.retry_after,
        ) from error


def judged_details(answer: Answer[Any], *, is_new: bool) -> dict[str, Any]:
    """Return the details of a judgement for the Record: model, reply, and the usage of this score."""
    spent = answer.spent
    reply = answer.reply if len(answer.reply) <= _KEPT_CHARS else f"…{answer.reply[-_KEPT_CHARS:]}"
    details: dict[str, Any] = {"judge": answer.model, "reply": reply, "cached": not is_new}
    if is_new:
        details |= {
            "requests": spent.requests,
            "prompt_tokens": spent.prompt_tokens,
            "completion_tokens": spent.completion_tokens,
            "cost": spent.cost,
            "seconds": spent.seconds,
        }
    return details
