"""Scorer ``agentcpm``: an LLM judge behind OpenAI-compatible endpoints, with failover."""

from __future__ import annotations

import asyncio
import logging
import re

from agentrl.errors import ScorerError
from agentrl.scoring.agent_config import AgentSection, ModelEndpoint, load_section
from agentrl.scoring.scorers import ScorerContext, ScoreResult, scorer
from agentrl.scoring.text_match import same

logger = logging.getLogger(__name__)

JUDGES = ("agentcpm", "asearcher")
"""Names of this scorer. It needs the section ``scorer_agent`` of ``--agent_config_path``."""

DEFAULT_TEMPLATE = """\
Decide whether a predicted answer to a question means the same as the labeled answer.

Question: {question}
Labeled answer: {labeled_answer}
Predicted answer: {pred_answer}

The labeled answer is right, whatever you know yourself. Wording, format, units written out or not, and \
further true details do not matter; a different fact, number or name does, and so does an answer that hedges \
between several. Reply with one word: Correct or Incorrect."""

_VERDICT = re.compile(r"\b(in)?correct\b", re.IGNORECASE)
_FIELD = re.compile(r"\{(question|labeled_answer|pred_answer)\}")


class NoVerdictError(Exception):
    """One request to one model gave no verdict."""


@scorer(*JUDGES)
async def agentcpm(context: ScorerContext) -> ScoreResult:
    """Return 1 if the judge finds the answer correct, else 0.

    No answer scores 0 and an answer equal to an accepted one scores 1, both without a request. Each model of
    the section ``scorer_agent`` gets ``max_retries`` requests. Raises ScorerError if none gives a verdict.
    """
    if not context.accepted:
        raise ScorerError("the task has no answer to judge by")
    if context.final_answer is None:
        return ScoreResult(0.0, {"verdict": "no answer"})
    if any(same(context.final_answer, answer) for answer in context.accepted):
        return ScoreResult(1.0, {"verdict": "equal"})
    section = load_section(context.agent_config_path, "scorer_agent")
    prompt = judge_prompt(section, context)
    problems = []
    for endpoint in section.models:
        try:
            correct, reply = await _ask(endpoint, section, prompt)
        except NoVerdictError as problem:
            problems.append(f"{endpoint.model}: {problem}")
            logger.warning(
                "the judge brought no verdict", extra={"model": endpoint.model, "why": str(problem)}
            )
            continue
        return ScoreResult(float(correct), {"judge": endpoint.model, "reply": reply})
    raise ScorerError(
        f"no judge gave a verdict: {'; '.join(problems)}", hint="see scorer_agent in the agent config"
    )


def judge_prompt(section: AgentSection, context: ScorerContext) -> str:
    """Return the template with its three fields filled in; other braces stay unchanged."""
    template = str(section.settings.get("judge_prompt_template") or DEFAULT_TEMPLATE)
    values = {
        "question": context.query,
        "labeled_answer": " | ".join(context.accepted),
        "pred_answer": context.final_answer or "",
    }
    return _FIELD.sub(lambda match: values[match.group(1)], template)


def verdict_of(reply: str) -> bool | None:
    """Return whether the last "Correct" or "Incorrect" in a reply is "Correct"; None without one."""
    found = list(_VERDICT.finditer(reply.rpartition("</think>")[2]))
    return found[-1].group(1) is None if found else None


async def _ask(endpoint: ModelEndpoint, section: AgentSection, prompt: str) -> tuple[bool, str]:
    problem = "it was not asked (max_retries is 0)"
    for attempt in range(section.max_retries):
        if attempt:
            await asyncio.sleep(section.retry_delay * section.backoff_factor ** (attempt - 1))
        try:
            reply = await _complete(endpoint, section.timeout, prompt)
        except NoVerdictError as error:
            problem = str(error)
            continue
        verdict = verdict_of(reply)
        if verdict is not None:
            return verdict, reply
        problem = f"neither Correct nor Incorrect in: {reply[:200]!r}"
    raise NoVerdictError(problem)


async def _complete(endpoint: ModelEndpoint, timeout: float, prompt: str) -> str:
    from openai import AsyncOpenAI, OpenAIError

    async with AsyncOpenAI(
        api_key=endpoint.api_key, base_url=endpoint.base_url, timeout=timeout, max_retries=0
    ) as client:
        try:
            answer = await client.chat.completions.create(
                model=endpoint.model, messages=[{"role": "user", "content": prompt}], temperature=0.0
            )
        except OpenAIError as error:
            raise NoVerdictError(f"{type(error).__name__}: {error}") from error
    if not answer.choices:
        raise NoVerdictError("the reply has no choices")
    return answer.choices[0].message.content or ""
