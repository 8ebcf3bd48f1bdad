"""Judge a gold slice again every N steps: answers whose score people know, so that a judge's drift is seen.

The slice has one JSON object a line, with the keys of ``agentrl audit records --json``: ``query``,
``final_answer``, the ``score`` that people gave, and what the scorer needs: ``answer``, ``rubric``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.base.validation import Number, Text, check
from agentrl.config.schema import SamplingConfig
from agentrl.documents.record import judged
from agentrl.documents.run import GoldScore
from agentrl.errors import ConfigError, ScorerError
from agentrl.scoring.judge import judging_anew
from agentrl.scoring.scorers import ScorerContext, require_scorer, run_scorer
from agentrl.store.mechanics.retry import log_store_errors

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

MAX_GOLD = 200
"""Rows of a slice: each costs a request to the judge every time."""
_AT_ONCE = 4
_LOOK_SECONDS = 60.0
_REST_SECONDS = 1.0
_PROBLEM_CHARS = 300
_HINT = 'write {"query": …, "final_answer": …, "answer": …, "score": 1.0} on each line: docs/scoring.md'


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldRow:
    """An answer and the score that people gave it."""

    query: Text
    score: Number
    final_answer: str | None = None
    """The answer that is judged."""
    answer: Any = None
    """The labeled answer, for a judge that compares."""
    rubric: Any = None
    scorer: Text = "agentcpm"


@dataclass(frozen=True, slots=True)
class GoldSlice:
    """The rows of a file; ``digest`` tells another file, or the same one with another row."""

    rows: Sequence[GoldRow]
    digest: str


def read_gold(path: str | None) -> GoldSlice | None:
    """Return the slice of ``--judge_gold``; None without a path. Raises ConfigError."""
    if path is None:
        return None
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--judge_gold {path} cannot be read: {error}", hint=_HINT) from error
    # Not splitlines: JSON may hold U+2028 and U+0085 as they are.
    lines = enumerate(text.split("\n"), 1)
    rows = [_row(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if not 0 < len(rows) <= MAX_GOLD:
        raise ConfigError(
            f"--judge_gold {path} has {len(rows)} rows, and may have 1 to {MAX_GOLD}",
            hint="each is judged every --judge_gold_every steps: choose some that tell good from bad",
        )
    for name in {row.scorer for row in rows}:
        require_scorer(name)
    return GoldSlice(rows, hashlib.sha256(text.encode()).hexdigest()[:12])


def _row(line: str, where: str) -> GoldRow:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}", hint=_HINT) from error
    if not isinstance(given, dict):
        raise ConfigError(f"{where} is no JSON object", hint=_HINT)
    known = {item.name: given[item.name] for item in fields(GoldRow) if item.name in given}
    return check(GoldRow, known, lambda problem: ConfigError(f"{where}: {problem.text}", hint=_HINT))


async def watch_gold(store: Store, gold: GoldSlice | None, sampling: SamplingConfig, owner: str) -> None:
    """Judge the slice before the first step and after every ``--judge_gold_every``; return without a slice.

    One process of the run does so for each such step. What a judge does not answer is no score of it.
    """
    if gold is None:
        return
    rounds = math.ceil(len(gold.rows) / _AT_ONCE)
    lease = rounds * sampling.scorer_timeout_seconds + _LOOK_SECONDS
    done = -1
    while True:
        with log_store_errors(logger, "the gold slice could not be judged", outages=True):
            last = await store.steps.last()
            step = 0 if last is None else last.step
            step -= step % sampling.judge_gold_every
            if step != done:
                key = f"{gold.digest}/{step}"
                if await store.judge_checks.begin(key, gold.digest, step, owner=owner, lease_seconds=lease):
                    scores = await judge_rows(gold.rows, sampling)
                    await store.judge_checks.finish(key, owner, scores)
                    logger.info("gold slice judged", extra={"step": step, "rows": len(scores)})
                    done = step  # where another process judges, look again: it may die before it has
            await store.wait_for_change("TrainStep", timeout=_LOOK_SECONDS)
        await asyncio.sleep(_REST_SECONDS)


async def judge_rows(rows: Sequence[GoldRow], sampling: SamplingConfig) -> tuple[GoldScore, ...]:
    """Return the scores of the rows, judged without this process's cache; those that failed have none."""
    turn = asyncio.Semaphore(_AT_ONCE)

    async def judge(row: GoldRow) -> GoldScore:
        context = ScorerContext(
            query=row.query, final_answer=row.final_answer, answer=row.answer, meta={"rubric": row.rubric},
            agent_config_path=sampling.agent_config_path,
        )  # fmt: skip
        async with turn:
            try:
                result = await run_scorer(row.scorer, context, sampling.scorer_timeout_seconds)
            except (ScorerError, ConfigError) as error:
                return GoldScore(
                    scorer=row.scorer, expected=row.score, problem=error.message[:_PROBLEM_CHARS]
                )
        asked = [each for each in _parts(result.details) if isinstance(each.get("judge"), str)]
        took = judged(result.details)
        return GoldScore(
            scorer=row.scorer,
            expected=row.score,
            score=result.score,
            model=", ".join(sorted({each["judge"] for each in asked})) or None,
            tokens=int(took["judge_tokens"]),
            seconds=took["judge_seconds"],
            cost=took["judge_cost"],
        )

    with judging_anew():
        return tuple(await asyncio.gather(*map(judge, rows)))


def _parts(details: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the details of a score, and of a sum those of its parts."""
    parts = details.get("parts")
    own = parts.values() if isinstance(parts, Mapping) else ()
    return [details, *(each for each in own if isinstance(each, Mapping))]
