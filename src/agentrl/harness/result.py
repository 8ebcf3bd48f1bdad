"""Read the score of what a harness leaves in its working directory."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from agentrl.documents.base import is_score, sanitize_bson
from agentrl.documents.record import CommandRun, Ending
from agentrl.errors import HarnessError
from agentrl.harness.config import HarnessConfig, HarnessFile, ScoreCommand
from agentrl.harness.session import Session
from agentrl.harness.workspace import read_file, restore
from agentrl.scoring.scorers import ScoreResult

_FILE_BYTES: Final = 1 << 20
_SCORING: Final = {
    "PYTHONNOUSERSITE": "1",
    "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.bareRepository", "GIT_CONFIG_VALUE_0": "explicit",
}  # fmt: skip
"""Settings of the command that scores: no packages of HOME, no folder that poses as a bare repository."""


async def score_files(
    config: HarnessConfig, session: Session, run: CommandRun, environment: dict[str, str]
) -> tuple[ScoreResult | None, CommandRun | None]:
    """Return the score, and the command that gave it; None for a score that comes from elsewhere.

    Raises HarnessError for a file or an output without a number.
    """
    if config.score == "exit_code":
        passed = run.ended is Ending.EXITED
        return ScoreResult(float(passed), {"exit_code": run.exit_code, "ended": run.ended.value}), None
    if isinstance(config.score, HarnessFile):
        name = config.score.file
        text = await asyncio.to_thread(read_file, session.archive, name, _FILE_BYTES)
        if text is None:
            raise HarnessError(
                f"the harness has not written {name!r}, the file with its score",
                hint="write a number, or JSON with 'score', into it",
            )
        return _read_score(text, f"the file {name!r}"), None
    if isinstance(config.score, ScoreCommand):
        return await _run_command(config.score, session, environment)
    return None, None


async def _run_command(
    command: ScoreCommand, session: Session, environment: dict[str, str]
) -> tuple[ScoreResult, CommandRun]:
    """Run the command on the working directory, with nothing else that the harness has left."""
    await asyncio.to_thread(restore, session.archive, session.before, command.restore)
    done = await session.run(
        command.command, {**_SCORING, **environment}, seconds=command.seconds, calls_model=False
    )
    if command.result == "stdout" and done.ended is Ending.EXITED:
        lines = done.stdout.strip().splitlines()
        return _read_score(lines[-1] if lines else "", "the last line of score.command"), done
    score = float(done.ended is Ending.EXITED)
    return ScoreResult(score, {"exit_code": done.exit_code, "ended": done.ended.value}), done


def _read_score(text: str, where: str) -> ScoreResult:
    """Read a number, or a JSON object with ``score`` and ``details``."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    details = value.get("details") if isinstance(value, dict) else None
    score = value.get("score") if isinstance(value, dict) else value
    if isinstance(score, bool) or not is_score(score):
        raise HarnessError(
            f"{where} holds {text[:100]!a}, not a score", hint='write a number, or {"score": 1.0}'
        )
    return ScoreResult(float(score), sanitize_bson(details) if isinstance(details, dict) else {})
