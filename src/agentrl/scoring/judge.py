"""Scorers ``agentcpm`` and ``rubric``: an LLM judge behind OpenAI-compatible endpoints, with failover."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from pydantic import BeforeValidator

from agentrl.base.concurrency import Deadline, clock_stopped, current_deadline
from agentrl.base.validation import Number, Text, check
from agentrl.chat.parsers.parser import split_reasoning
from agentrl.errors import ScorerError, judge
from agentrl.llm.agent_config import AgentSection, load_judge
from agentrl.llm.chat import RULE, ChatAnswer, Messages, NoAnswerError, ask, fenced
from agentrl.scoring.math_equality import same
from agentrl.scoring.scorers import ScorerContext, ScoreResult, scorer

T = TypeVar("T")

_KEPT = 10_000


class SharedAnswers(Generic[T]):
    """The answers of this process, by a digest of the question; the oldest are dropped."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._answers: OrderedDict[bytes, ChatAnswer[T]] = OrderedDict()
        self._asking: WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[bytes, asyncio.Task[ChatAnswer[T]]]
        ] = WeakKeyDictionary()

    async def get(
        self, key: object, ask: Callable[[], Awaitable[ChatAnswer[T]]]
    ) -> tuple[ChatAnswer[T], bool]:
        """Return the answer to the question ``key``, and whether this call asked for it.

        Calls at the same time share one ``ask``, and its exception. It goes on when a caller is cancelled.
        The caller's clock stops while it waits: ``ask`` has a time limit of its own.
        """
        digest = hashlib.blake2b(repr(key).encode("utf-8", "replace"), digest_size=16).digest()
        if digest in self._answers:
            self._answers.move_to_end(digest)
            return self._answers[digest], False
        asking = self._asking.setdefault(asyncio.get_running_loop(), {})
        task = asking.get(digest)
        is_new = task is None
        if task is None:
            task = asking[digest] = asyncio.ensure_future(self._ask(digest, ask))
            task.add_done_callback(lambda done: _forget(asking, digest, done))
        with clock_stopped():
            return await asyncio.shield(task), is_new

    async def _ask(self, digest: bytes, ask: Callable[[], Awaitable[ChatAnswer[T]]]) -> ChatAnswer[T]:
        answer = await ask()
        self._answers[digest] = answer
        while len(self._answers) > self._kept:
            self._answers.popitem(last=False)
        return answer


def _forget(asking: dict[bytes, asyncio.Task[T]], digest: bytes, task: asyncio.Task[T]) -> None:
    asking.pop(digest, None)
    if not task.cancelled():
        task.exception()  # every caller may have been cancelled; then nobody reads it


JUDGES = frozenset({"agentcpm", "asearcher", "rubric"})
"""Names of the scorers that need the section ``scorer_agent`` of ``--agent_config_path``."""

JUDGE_TEMPLATE = """\
Decide whether a predicted answer to a question means the same as the labeled answer.

Question: {question}
Labeled answer: {labeled_answer}
Predicted answer: {pred_answer}

The labeled answer is right, whatever you know yourself. Wording, format, units written out or not, and \
further true details do not matter; a different fact, number or name does, and so does an answer that hedges \
between several. Reply with one word: Correct or Incorrect."""

QUESTION_TEMPLATE = """\
Decide whether an answer to a question is right.

Question: {question}
Answer: {pred_answer}

There is no labeled answer: work the question out yourself first. An answer that hedges between several, \
evades, or does only a part of what is asked is wrong. End with a line of one word: Correct or Incorrect."""
"""The prompt for a task without an answer."""

SECONDS = 120.0
"""Time limit of a judgement outside ``run_scorer``."""

_RESERVE = 0.05
"""Fraction of the scorer's time that is kept to report which models failed, and how."""

_KEPT_CHARS = 8192
"""Characters of a reply that a Record keeps: its end, where the verdict is."""

_LABEL = r"(?:final\s+)?(?:verdict|answer|judge?ment|decision|grade|result|conclusion)"
_VERDICT = re.compile(rf"(?:{_LABEL}\s*+(?:is\s*+)?(?::\s*+)?)?(in)?correct", re.IGNORECASE)
_MARKUP = " \t*_`\"'“”‘’.!"

_answers: SharedAnswers[Any] = SharedAnswers()
_anew: ContextVar[bool] = ContextVar("agentrl_judging_anew", default=False)


@contextmanager
def judging_anew() -> Iterator[None]:
    """Ask the models in the block, also what this process has asked before."""
    token = _anew.set(True)
    try:
        yield
    finally:
        _anew.reset(token)


@scorer("agentcpm", "asearcher")
async def agentcpm(context: ScorerContext) -> ScoreResult:
    """Return 1 if the judge finds the answer correct, else 0.

    No answer scores 0 and an answer equal to an accepted one scores 1, both without a request. A question
    with the same answer is judged once in a process. A task without an answer is scored by its rubric, or
    else by the question alone. Raises ScorerError if no model gives a verdict.
    """
    if not context.accepted and context.meta.get("rubric"):
        return await rubric(context)
    if context.final_answer is None:
        return ScoreResult(0.0, {"verdict": "no answer"})
    if any(same(context.final_answer, answer) for answer in context.accepted):
        return ScoreResult(1.0, {"verdict": "equal"})
    section = load_judge(context.agent_config_path)
    template, values = QUESTION_TEMPLATE, {"question": context.query, "pred_answer": context.final_answer}
    if context.accepted:
        template = section.judge_prompt_template or JUDGE_TEMPLATE
        values["labeled_answer"] = " | ".join(context.accepted)
    is_correct, details = await _judge(section, template, values, verdict_of)
    return ScoreResult(float(is_correct), details)


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
    matches = [_VERDICT.fullmatch(line) for line in lines if line]
    verdicts = {match.group(1) is None for match in matches if match}
    return verdicts.pop() if matches and matches[-1] and len(verdicts) == 1 else None


async def _judge(
    section: AgentSection, template: str, values: Mapping[str, str], read: Callable[[str], T | None]
) -> tuple[T, dict[str, Any]]:
    """Return what ``read`` finds in a judge's reply, and the details for the Record: model, reply and usage.

    The models are asked in order within the scorer's time. Raises ScorerError, which names an outage if every
    model is down.
    """

    async def ask_models() -> ChatAnswer[T]:
        limit = current_deadline()
        seconds = SECONDS if limit is None else limit.left()
        try:
            return await ask(
                section, judge_prompt(template, values), read, Deadline(seconds * (1 - _RESERVE))
            )
        except NoAnswerError as error:
            names = ", ".join(endpoint.model for endpoint in section.models)
            raise ScorerError(
                f"no judge gave a verdict: {error}",
                hint="see scorer_agent in the agent config",
                outage=judge(names) if error.is_outage else None,
                retry_after=error.retry_after,
            ) from error

    if _anew.get():
        answer, is_new = await ask_models(), True
    else:
        answer, is_new = await _answers.get((section.models, template, *values.items()), ask_models)
    reply = answer.reply if len(answer.reply) <= _KEPT_CHARS else f"…{answer.reply[-_KEPT_CHARS:]}"
    details = {"judge": answer.model, "reply": reply, "cached": not is_new}
    return answer.value, {**details, **(asdict(answer.spent) if is_new else {})}


RUBRIC_TEMPLATE = """\
Decide which criteria an answer to a question meets.

Question: {question}
Answer: {pred_answer}
Criteria: {criteria}

Reply with one line for each criterion, and nothing else: its number, a colon, and Met or Unmet. For example:
1: Met"""

_LINE = re.compile(r"\W*+(\d{1,4})\s*+[.:)]\W*+(un|not\s)?met\W*+", re.IGNORECASE)
_HINT = 'give the task a field like "rubric": [{"criterion": "names the river", "weight": 2}]'


def _criterion(item: Any) -> Any:
    return {"criterion": item} if isinstance(item, str) else item


@dataclass(frozen=True, slots=True)
class Criterion:
    """What an answer should do, or with a negative weight should not do."""

    criterion: Text
    weight: Number = 1.0


_Criteria = tuple[Annotated[Criterion, BeforeValidator(_criterion)], ...]


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
    template = section.rubric_prompt_template or RUBRIC_TEMPLATE
    texts = [" ".join(item.criterion.split()) for item in criteria]
    listed = "\n".join(f"{number}: {text}" for number, text in enumerate(texts, 1))
    values = {"question": context.query, "pred_answer": context.final_answer, "criteria": listed}
    verdicts, details = await _judge(
        section, template, values, lambda reply: verdicts_of(reply, len(criteria))
    )
    gained = sum(item.weight for item, is_met in zip(criteria, verdicts, strict=True) if is_met)
    best = sum(item.weight for item in criteria if item.weight > 0)
    met = [text for text, is_met in zip(texts, verdicts, strict=True) if is_met]
    return ScoreResult(min(1.0, max(0.0, gained / best)), {**details, "met": met})


def read_criteria(value: Any) -> Sequence[Criterion]:
    """Return the criteria of a task: texts, or mappings with ``criterion`` and ``weight``.

    Raises ScorerError for anything else, and if no weight is positive.
    """
    if not value:
        raise ScorerError("the task has no rubric", hint=_HINT)
    criteria = check(_Criteria, value, lambda problem: ScorerError(problem.text, hint=_HINT), "rubric")
    if not any(item.weight > 0 for item in criteria):
        raise ScorerError("the rubric has no criterion with a positive weight", hint=_HINT)
    return criteria


def verdicts_of(reply: str, count: int) -> tuple[bool, ...] | None:
    """Return whether each of ``count`` criteria is met; None unless every one has exactly one verdict."""
    verdicts: dict[int, bool] = {}
    for line in split_reasoning(reply).rest.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        number = int(match.group(1))
        if number in verdicts:
            return None
        verdicts[number] = match.group(2) is None
    if set(verdicts) != set(range(1, count + 1)):
        return None
    return tuple(verdicts[number] for number in sorted(verdicts))
