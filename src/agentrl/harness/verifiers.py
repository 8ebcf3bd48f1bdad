"""Define the agent ``verifiers``: an environment of verifiers runs the rollout, and scores it."""

from __future__ import annotations

from agentrl.documents.status import StopReason
from agentrl.environments.verifiers import Verifiers
from agentrl.errors import ENGINES, EngineError, TaskEnvironmentError, TrajectoryError
from agentrl.harness.agent import STOPPED, is_up
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.agents import agent
from agentrl.rollout.rollout import Rollout
from agentrl.scoring.scorers import ScoreResult


@agent("verifiers")
async def verifiers(rollout: Rollout) -> Outcome:
    """Give the environment a base URL of this trajectory; its reward is the score."""
    environment = rollout.environment
    if not isinstance(environment, Verifiers):
        raise TrajectoryError("the task is not of an environment of verifiers", hint="env:verifiers?id=…")
    async with rollout.gateway() as endpoint:
        try:
            done = await environment.play(
                base_url=endpoint.base_url, api_key=endpoint.api_key, model=endpoint.model
            )
        except TaskEnvironmentError as error:
            if not await is_up(endpoint.base_url):
                raise EngineError(f"the gateway did not answer: {error.message}", outage=ENGINES) from error
            raise
    details = {"metrics": done["metrics"], "stop": done["stop"]}
    stopped = STOPPED.get(endpoint.result.stopped_by or "", StopReason.ANSWERED)
    return Outcome(stopped, done["answer"], ScoreResult(float(done["reward"]), details))
