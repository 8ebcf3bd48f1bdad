"""Extract the final answer from a text, score it without a model, and check tasks whose answer cannot score.

Scorers: ``exact``, ``f1``, ``math``, ``format``, ``tool_rewards`` and ``feedback``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from agentrl.base.process_pool import run_in_process
from agentrl.chat.parsers.parser import split_reasoning
from agentrl.documents.status import CallStatus
from agentrl.documents.task import FEEDBACK, Task, scorer_weights
from agentrl.documents.task_json import BadTaskError, amount, kind_of
from agentrl.documents.task_presets import asked_schema, last_braced
from agentrl.errors import ConfigError, FailureError, ScorerError
from agentrl.scoring.math_equality import equal, number, same, word_f1
from agentrl.scoring.scorers import ScorerContext, ScoreResult, check_answer, run_scorer, scorer

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
    golds = _golds(task)
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


def _golds(task: Task) -> list[Any]:
    """Return the answers that count as right."""
    answers = task.answer if isinstance(task.answer, (list, tuple)) else (task.answer,)
    return [gold for gold in (*answers, *task.aug_answers) if gold is not None]


LINE = "Answer:"
"""The schema of a last line ``Answer: 34``, as DAPO's and simple-evals' prompts ask for it."""
_WORD = re.compile(rf"[A-Za-z_][A-Za-z0-9_.-]*|####|{LINE}")
_LINE = re.compile(r"\banswer[ \t*_]*[:：][\s*_]*(\S[^\n]*)", re.IGNORECASE)
_HASHES = re.compile(r"####(?!#)[ \t]*(?:\n[ \t]*)?([^\s#][^\n#]*)")


def check_schema(schema: str) -> None:
    """Raise ConfigError unless ``schema`` is ``boxed``, ``####``, ``Answer:`` or the name of a tag."""
    if not _WORD.fullmatch(schema):
        raise ConfigError(
            f"answer_schema is {schema!r}; it must be one word",
            hint="use 'answer' for <answer>…</answer>, 'boxed' for \\boxed{…}, '####' for #### 72, 'Answer:'"
            " for a line Answer: 72, or a tag",
        )


def extract_answer(text: str, schema: str) -> str | None:
    """Return the last marked answer outside of ``<think>…</think>``, stripped; None without one.

    ``Answer:`` is what follows the last ``Answer:``, without ``$…$`` and ``\\boxed{…}`` around it.
    ``boxed`` is the last ``\\boxed{…}``, else the last ``\\fbox{…}``, with nested braces. ``####`` is the
    rest of the line behind the last ``####``, as in GSM8K, of a number without its currency and unit. Any
    other word X is the last ``<X>…</X>``.
    """
    check_schema(schema)
    spoken = split_reasoning(text).rest
    if schema == "boxed":
        boxed = last_braced(spoken, "\\boxed")
        return boxed if boxed is not None else last_braced(spoken, "\\fbox")
    if schema in ("####", LINE):
        lines = (_LINE if schema == LINE else _HASHES).findall(spoken)
        line = _bare(lines[-1]) if lines else None
        return line if line is None or schema == LINE else amount(line)
    tag = re.escape(schema)
    # Match no opening tag inside: one that is never closed would swallow the answer behind it.
    matches = re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", spoken, re.DOTALL)
    return matches[-1].strip() if matches else None


def _bare(text: str) -> str | None:
    """Return the answer of a line as math and Markdown decorate it; None for an empty one."""
    boxed = last_braced(text, "\\boxed")
    inner = text.strip(" \t*_").removesuffix(".") if boxed is None else boxed
    dollars = re.fullmatch(r"\$+([^$]+)\$+|\\[(\[](.+)\\[)\]]", inner)
    return (inner if dollars is None else dollars[1] or dollars[2]).strip() or None


def marked(answer: str, schema: str) -> str:
    """Return ``answer`` as a model would mark it."""
    if schema == "boxed":
        return f"\\boxed{{{answer}}}"
    if schema in ("####", LINE):
        return f"{schema} {answer}"
    return f"<{schema}>{answer}</{schema}>"


def require_readable(task: Task) -> None:
    """Raise BadTaskError if a model that gives the task's own answer would not score 1.

    Checks the scorers that compare, which need an answer; of a judge, that it would get the task's own; of
    others, what they declare (``check_answer``).
    """
    try:
        check_answer(task)
    except ScorerError as error:
        raise BadTaskError(str(error)) from error
    judged = dict.fromkeys(("agentcpm", "asearcher"), lambda given, gold: 1.0)
    likenesses = {"exact": same, "f1": word_f1, "math": same, **judged}
    golds = _golds(task)
    for name in likenesses.keys() & scorer_weights(task.scorer).keys():
        if not golds and name in judged:
            continue
        if not golds:
            raise BadTaskError(
                f"scorer {name} compares with an answer, and the task has none: give it one, or leave the"
                " scorer out, and a judge decides by the question alone"
            )
        problems = [_unreadable(gold, task.answer_schema, name, likenesses[name]) for gold in golds]
        # Let one readable answer do: the others are alternatives, any of which may be given.
        if all(problems):
            raise BadTaskError(f"scorer {name} cannot read the answer: {problems[0]}")


def _unreadable(gold: Any, schema: str, name: str, likeness: Callable[[str, str], float]) -> str | None:
    """Return why a reference answer does not score 1 against itself; None if it does."""
    if isinstance(gold, (dict, list)):
        return f"it is {kind_of(gold)}, and text or a number is compared: --task_fields answer=answer.KEY"
    text = str(gold)
    if not text.strip():
        return "it is empty"
    try:
        given = extract_answer(marked(text, schema), schema)
    except ConfigError:
        return None  # the schema is refused by name
    if given is not None and likeness(given, text) == 1:
        return None
    read = "nothing" if given is None else repr(given[:80])
    return f"of {marked(text, schema)[:80]!r}, answer_schema {schema} reads {read}"


@scorer("exact")
async def exact(context: ScorerContext) -> float:
    """Return 1 if the answer equals an accepted one, else 0.

    What cannot change its meaning is ignored (``normal_form``): in words case, articles and punctuation, in
    numbers thousands separators and the sign of dollars, in TeX fonts and spaces.
    """
    return _best(same, context)


@scorer("f1")
async def f1(context: ScorerContext) -> float:
    """Return the best word F1 over all accepted answers, in [0, 1] (SQuAD, arXiv 1606.05250)."""
    return _best(word_f1, context)


@scorer("math")
async def math(context: ScorerContext) -> float:
    """Return 1 if math-verify finds the answer equal to an accepted one, else 0.

    An equal text and plain numbers are compared without it. A signal bounds its time, which works only in the
    main thread of a process, where a worker of the pool runs it.
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


@scorer("format")
async def well_formed(context: ScorerContext) -> ScoreResult:
    """Return 1 if the answer is marked (``answer_schema``) and every tool call is well-formed, else 0."""
    malformed = [
        index
        for index, call in enumerate(context.calls)
        if call.status == CallStatus.FORMAT_ERROR and not call.dropped
    ]
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


@scorer(FEEDBACK)
async def feedback(context: ScorerContext) -> float:
    """Raise ScorerError: people score the trajectory later, and runs hand it back (``columns.scores``)."""
    raise ScorerError(
        "the trajectory has no feedback",
        hint="`agentrl gateway` takes it by POST /feedback; an evaluation needs a scorer that computes",
    )
