"""Scorer ``environment``: score a trajectory by the ``score`` method of its task's environment."""

from __future__ import annotations

import inspect

from agentrl.environments.base import ENVIRONMENTS
from agentrl.errors import ScorerError
from agentrl.scoring.process_pool import run_in_process
from agentrl.scoring.scorers import Result, ScorerContext, scorer


@scorer("environment")
async def environment(context: ScorerContext) -> Result:
    """Return the score that the environment gives.

    A method that is not async runs in a worker process. Raises ScorerError for a task without an environment.
    """
    name = context.environment
    if name is None:
        raise ScorerError(
            "the task has the scorer 'environment' and names no environment",
            hint='give the task "environment": "NAME", or another scorer',
        )
    kind = ENVIRONMENTS.get(name)
    kind.check()
    if kind.reads_reward() or inspect.iscoroutinefunction(kind.score):
        scored = kind.score(context)
    else:
        scored = run_in_process(kind.score, context)
    result: Result = await scored if inspect.isawaitable(scored) else scored
    return result
