"""What an agent gets and gives back: its YAML file, its base URL, its outcome and its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, Protocol
from urllib.parse import quote

from agentrl.base.user_code import describe, file_name, require_allowed
from agentrl.base.validation import read_settings
from agentrl.chat.chat_format import Message
from agentrl.documents.document import replace_surrogates
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.status import StopReason
from agentrl.documents.task import Claim
from agentrl.errors import (
    ENGINES,
    ConfigError,
    ContextFullError,
    EngineError,
    FailureError,
    TrajectoryError,
    TurnsLimitError,
)
from agentrl.scoring.scorers import ScoreResult


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trajectory ended."""

    stop_reason: StopReason
    final_answer: str | None = None
    score: float | ScoreResult | None = None
    """The agent's own score, instead of the task's scorer; None leaves scoring to the scorer."""
    rewards: Mapping[str, float] | None = None
    """Rewards of roles, {role: reward}. Without ``score`` the score is the mean of those of the policy."""


def checked_outcome(agent: str, value: object) -> Outcome:
    """Return the outcome of ``agent``, storable. Raises TrajectoryError if it is not an outcome."""
    if not isinstance(value, Outcome):
        raise TrajectoryError(
            f"agent {agent} returned {describe(value)}", hint="return Outcome(stop_reason, final_answer)"
        )
    if not isinstance(value.final_answer, (str, NoneType)):
        raise TrajectoryError(
            f"agent {agent} returned the final answer {describe(value.final_answer)}",
            hint="an answer is a string, or None",
        )
    try:
        reason = StopReason(value.stop_reason)
    except ValueError as error:
        raise TrajectoryError(
            f"agent {agent} returned the stop reason {describe(value.stop_reason)}",
            hint=f"known: {', '.join(StopReason)}",
        ) from error
    return Outcome(reason, replace_surrogates(value.final_answer), value.score, value.rewards)


def checked_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages of an extension in the form that templates and documents need.

    Raises TrajectoryError for values that are not messages.
    """
    if not isinstance(messages, (list, tuple)):
        raise TrajectoryError(f"messages are {describe(messages)}", hint="give a list of messages")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TrajectoryError(
                f"a message is {describe(message)}", hint="a message is a mapping with a text 'role'"
            )
    return [dict(replace_surrogates(dict(message))) for message in messages]


def agent_cfg_path(of_task: str | None, of_flag: str | None) -> Path | None:
    """Return the YAML file of an agent; None without one. Raises ConfigError for a path that is not allowed.

    A task comes from the database, so it may name only files below the folder in which this process was
    started, and of these the ones that the operator allowed: ``permissions``.
    """
    if of_task is None:
        return None if of_flag is None else Path(of_flag)
    path = Path(of_task)
    if path.is_absolute() or ".." in path.parts:
        raise ConfigError(
            f"agent_cfg_path {of_task!r} of a task is not below the folder in which this process was started",
            hint="give a relative path without '..', or use --agent_cfg_path",
        )
    require_allowed(file_name(of_task), "agent_cfg_path of a task")
    return path


class AgentCfg(dict[str, Any]):
    """The settings of an agent's YAML file: ``cfg.name``, ``cfg["name"]``, ``cfg.get("name")``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            # Raise AttributeError in place of KeyError: hasattr, copy and pickle rely on it.
            known = ", ".join(map(str, self)) or "nothing"
            raise AttributeError(f"the agent's cfg has no {name!r}; it has {known}") from None


def read_agent_cfg(path: Path | None) -> AgentCfg:
    """Return the settings in a YAML file; empty without one. Raises ConfigError for other files."""
    if path is None:
        return AgentCfg()
    file = read_settings(path, what="the agent's file", hint="write name: value lines")
    if not isinstance(file.content, dict | None):
        raise file.error(f"the file is {type(file.content).__name__}, not a mapping")
    return AgentCfg({str(key): _cfg(item) for key, item in (file.content or {}).items()})


def _cfg(value: Any) -> Any:
    if isinstance(value, dict):
        return AgentCfg({str(key): _cfg(item) for key, item in value.items()})
    return [_cfg(item) for item in value] if isinstance(value, list) else value


@dataclass(slots=True, kw_only=True)
class GatewayResult:
    """The model calls of a trajectory that a gateway served; complete when its endpoint is closed."""

    calls: Sequence[DispatchedSamplingTask] = ()
    """All model calls, by index."""
    dropped: tuple[int, ...] = ()
    """Indexes of those that are no part of the trajectory: ``Record.dropped_calls``."""
    messages: list[Message] = field(default_factory=list)
    """The conversation of the main branch."""
    reward: ScoreResult | None = None
    """The reward that the agent reported."""
    stopped_by: str | None = None
    """Why a request was refused: ``turns``, ``length``, or ``unavailable`` if no engine answered it."""

    def limit(self, max_turns: int) -> FailureError | None:
        """Return the error of a trajectory that ends because a request was refused; None if none was."""
        match self.stopped_by:
            case "turns":
                return TurnsLimitError(f"the trajectory made its {max_turns} model calls")
            case "length":
                return ContextFullError("a request did not fit into the context")
            case "unavailable":
                return EngineError("no engine answered a request to the gateway", outage=ENGINES)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an unmodified client finds the policy, for one trajectory.

    ``base_url`` ends in ``/v1``, as OpenAI clients want it; ``api_key`` is the token in it. The URL is dead
    when the trajectory ends.
    """

    base_url: str
    api_key: str
    model: str
    reward_key: str | None = field(default=None, repr=False)
    """The key that a POST to ``root_url`` + ``/reward`` needs. Give it to whoever scores, not to the tools of
    the model. None: the tests of the task score the trajectory."""
    result: GatewayResult = field(default_factory=GatewayResult)

    @property
    def root_url(self) -> str:
        """Return the base URL without ``/v1``, as Anthropic clients want it."""
        return self.base_url.removesuffix("/v1")

    def role(self, name: str) -> Endpoint:
        """Return the endpoint at which requests are calls of a role of the trajectory."""
        # Quote slashes too: the name is one part of the path.
        return replace(self, base_url=f"{self.root_url}/role/{quote(name, safe='')}/v1")


class Gateway(Protocol):
    """Opens base URLs for trajectories: ``GatewayHost``."""

    def open(
        self, claim: Claim, *, train: str, max_calls: int, takes_reward: bool = True,
        volatile: Sequence[str] = (),
    ) -> AbstractAsyncContextManager[Endpoint]:  # fmt: skip
        """Return the endpoint of a trajectory; ``train`` says which branches are trained.

        ``volatile`` are patterns of text that does not count where requests of its owners are compared.
        """
        ...
