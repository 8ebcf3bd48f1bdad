"""Find the rollout that the running code works for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from agentrl.errors import TrajectoryError
from agentrl.rollout.rollout import Rollout

_current: ContextVar[Rollout | None] = ContextVar("agentrl_rollout", default=None)


def current_rollout() -> Rollout:
    """Return the rollout whose agent calls this, also in tasks and threads that the agent started.

    Raises TrajectoryError outside an agent.
    """
    rollout = _current.get()
    if rollout is None:
        raise TrajectoryError(
            "no agent of AgentRL runs here, so there is no rollout",
            hint="call it in an agent, or give the rollout explicitly",
        )
    return rollout


@contextmanager
def working_on(rollout: Rollout) -> Iterator[None]:
    """Make ``rollout`` the current one in the block."""
    token = _current.set(rollout)
    try:
        yield
    finally:
        _current.reset(token)
