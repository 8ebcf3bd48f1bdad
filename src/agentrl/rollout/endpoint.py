"""Describe the base URL of one trajectory, and what a gateway returns when the agent is done with it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol
from urllib.parse import quote

from agentrl.chat.chat_format import Message
from agentrl.documents.gateway import ReportedReward
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.task import Claim


@dataclass(slots=True, kw_only=True)
class GatewayResult:
    """The model calls of a trajectory that a gateway served; complete when its endpoint is closed."""

    calls: Sequence[DispatchedSamplingTask] = ()
    """All model calls, by index."""
    messages: list[Message] = field(default_factory=list)
    """The conversation of the main branch."""
    reward: ReportedReward | None = None
    stopped_by: str | None = None
    """Why a request was refused: ``turns``, ``length``, or ``unavailable`` if no engine answered it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an unmodified client finds the policy, for one trajectory.

    ``base_url`` ends in ``/v1``, as OpenAI clients want it; ``api_key`` is the token in it. The URL is dead
    when the trajectory ends.
    """

    base_url: str
    api_key: str
    model: str
    result: GatewayResult = field(default_factory=GatewayResult)

    @property
    def root_url(self) -> str:
        """Return the base URL without ``/v1``, as Anthropic clients want it."""
        return self.base_url.removesuffix("/v1")

    def role(self, name: str) -> Endpoint:
        """Return the endpoint at which requests are calls of a role of the trajectory."""
        return replace(self, base_url=f"{self.root_url}/role/{quote(name, safe='')}/v1")


class Gateway(Protocol):
    """Opens base URLs for trajectories: ``GatewayHost``."""

    def open(self, claim: Claim, *, train: str, max_calls: int) -> AbstractAsyncContextManager[Endpoint]:
        """Return the endpoint of a trajectory; ``train`` says which branches are trained."""
        ...
