"""Extract the final answer from a text, score it without a model, check tasks whose answer cannot score.

Also look for the task's answer in the results of tools.

Scorers: ``exact``, ``f1``, ``math``, ``format``, ``tool_rewards`` and ``feedback``.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
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


def leaked_in(task: Task) -> str | None:
    """Return where the prompt of a task gives its answer: the question, or a message before; None: nowhere.

    An answer counts if it is marked in the question as the model shall mark it, or is long enough: two words
    or ``_TOLD_WORD`` characters. A message counts too if it has the question.
    """
    answers = list(map(str, _golds(task)))
    long = [
        text for text in told(answers)
        if len(text) >= _TOLD_WORD or (" " in text and not _CHARACTER.search(text))
    ]  # fmt: skip
    asked = normalized_text(task.query)
    with suppress(ConfigError):  # the schema is refused by name
        given = extract_answer(task.query, task.answer_schema)
        if given is not None and any(same(given, answer) for answer in answers):
            return "the question"
    if any(stands_in(text, asked) for text in long):
        return "the question"
    before = {f"message {place}": message.get("content") for place, message in enumerate(task.messages, 1)}
    for where, content in {"the system prompt": task.system_prompt, **before}.items():
        read = normalized_text(str(content or ""))
        repeats = len(asked.split()) >= _ASKED_WORDS and stands_in(asked, read)
        if repeats or any(stands_in(text, read) for text in long):
            return where
    return None


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


_MARKS = re.compile(r"[.,;:!?\"'’“”()\[\]。、·「」『』《》〈〉【】]+")
_UNSPACED = (
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
"""A character of a script that writes words without spaces, or with endings, as Korean does."""
_CHARACTER = re.compile(_UNSPACED)
_PAIR = re.compile(f"(?=({_UNSPACED} {_UNSPACED}))")


def normalized_text(text: str) -> str:
    """Return a text in lower case and NFKC, with single spaces and without punctuation of sentences.

    Each character of a script without spaces becomes a word.
    """
    spaced = _MARKS.sub(" ", unicodedata.normalize("NFKC", text).casefold())
    return " ".join((spaced if spaced.isascii() else _CHARACTER.sub(r" \g<0> ", spaced)).split())


SHORTEST_TOLD: Final = 5
"""Characters, normalized, of an answer that is looked for elsewhere: a shorter one is there by chance."""
_TOLD_WORD = 12
"""Characters of a single word that a prompt has not by chance, or as one of the things to choose from."""
_ASKED_WORDS = 4
"""Words of a question from which on a message that has it repeats it."""
COPIED_WORDS: Final = 8
"""Words of a question, in a row, that show a copy of it; of a script without spaces twice as many."""


def stands_in(needle: str, text: str) -> bool:
    """Return whether a normalized text has whole words that are ``needle``."""
    return f" {needle} " in f" {text} "


def told(answers: Sequence[str]) -> list[str]:
    """Return the answers, normalized, of which each is too long to stand in a text by chance."""
    return [text for answer in answers if len(text := normalized_text(answer)) >= SHORTEST_TOLD]


def word_runs(text: str, words: int) -> set[str]:
    """Return all runs of so many words of a normalized text; of a shorter one the text."""
    found = text.split()
    return {" ".join(found[at : at + words]) for at in range(max(1, len(found) - words + 1))}


def copied_words(question: str) -> int:
    """Return how many words of a normalized question, in a row, show a copy of it."""
    is_unspaced = 2 * len(_CHARACTER.findall(question)) > len(question.split())
    return COPIED_WORDS * (2 if is_unspaced else 1)


def answer_seen_in(context: ScorerContext, watched: str) -> str | None:
    """Return the tool whose result had the task's answer before the model wrote a part of it; None: none had.

    ``watched`` is ``--watch_answers``. With ``auto`` the result has the question too, which the model had not
    sent: a copy of the data set. A source that has the answer alone is what a search looks for.
    """
    asked = normalized_text(context.query) if watched != "none" else ""
    answers = [answer for answer in told(context.accepted) if asked and not stands_in(answer, asked)]
    tools = None if watched == "auto" else {name.strip() for name in watched.split(",")}
    own, unread, names = "", "", dict[str, str]()
    for message in context.messages if answers else ():
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content, default=str)
        if message.get("role") != "tool":
            calls = message.get("tool_calls") or ()
            names |= {
                str(call.get("id")): str((call.get("function") or {}).get("name"))
                for call in calls
                if isinstance(call, dict)
            }
            if message.get("role") == "assistant":
                unread += f" {text} {message.get('reasoning_content') or ''} {json.dumps(calls, default=str)}"
            continue
        name = message.get("name") or names.get(str(message.get("tool_call_id"))) or "a tool"
        if tools is not None and name not in tools:
            continue
        # Look for one word first: most results have none, and to normalize them all takes a thousand times.
        lowered = unicodedata.normalize("NFKC", text).casefold()
        if not any(answer.rpartition(" ")[2] in lowered for answer in answers):
            continue
        result, own, unread = normalized_text(text), f"{own} {normalized_text(unread)}", ""
        seen = [answer for answer in answers if stands_in(answer, result) and not _shares(answer, own)]
        if seen and (tools is not None or _copies(asked, result, own)):
            return name
    return None


def _shares(answer: str, text: str) -> bool:
    """Return whether a text has a word of the answer that is long enough to tell something.

    Of a script without spaces that is a pair of characters.
    """
    words = [word for word in answer.split() if len(word) >= SHORTEST_TOLD - 1]
    return any(stands_in(word, text) for word in (*words, *_PAIR.findall(answer)))


def _copies(asked: str, text: str, own: str) -> bool:
    """Return whether a text has words of the question in a row that ``own`` has not."""
    words = min(copied_words(asked), len(asked.split()))
    return any(not stands_in(run, own) for run in word_runs(asked, words) & word_runs(text, words))


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
