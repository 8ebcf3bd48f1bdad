"""What an agent says about its trajectory: the branches to train, and its own reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from agentrl.base.registry import Registry
from agentrl.base.user_code import contain_call, describe
from agentrl.base.validation import SettingsModel, wrong
from agentrl.data.finalize_group import TRAIN_SPLIT
from agentrl.documents.document import is_score, replace_surrogates, sanitize_bson
from agentrl.documents.model_call import (
    Branch,
    DispatchedSamplingTask,
    branches_of,
    main_branch,
    role_problem,
    same_agent,
)
from agentrl.documents.record import ReportedReward
from agentrl.documents.task import CONVERSATIONS, record_key, task_key
from agentrl.errors import (
    ConfigError,
    StoreDeniedError,
    StoreError,
    StoreUnavailableError,
    TrajectoryError,
)
from agentrl.gateway.dialects.fields import Object, checked, short
from agentrl.gateway.request import GatewayError, invalid

if TYPE_CHECKING:
    from agentrl.store.client import Store


MAX_REWARDS = 10_000
"""Most model calls, and most roles, that one body rewards."""

TrainRule = Callable[[Sequence[Branch]], Sequence[int]]
"""Returns the indexes of the model calls to train."""

TRAIN_RULES: Registry[TrainRule] = Registry("train rule", group="agentrl.train_rules")


@TRAIN_RULES.register("main")
def train_main(branches: Sequence[Branch]) -> Sequence[int]:
    """Train the main branch only: not titles, summaries, sub-agents, and not what an edit left behind."""
    main = main_branch(branches)
    return () if main is None else main.indexes


@TRAIN_RULES.register("agent")
def train_agent(branches: Sequence[Branch]) -> Sequence[int]:
    """Train every branch with the system prompt and the tools of the main branch.

    So an agent that replaces its history by a summary is trained before and after it.
    """
    return [index for branch in same_agent(branches) for index in branch.indexes]


@TRAIN_RULES.register("all")
def train_all(branches: Sequence[Branch]) -> Sequence[int]:
    """Train every call."""
    return [index for branch in branches for index in branch.indexes]


def require_rule(name: str) -> TrainRule:
    """Return a rule: main, agent, all, or module:function. Raises ConfigError."""
    return TRAIN_RULES.get(name)


def untrained(name: str, calls: Sequence[DispatchedSamplingTask]) -> list[int]:
    """Return the indexes of the calls that the rule ``name`` leaves out. Raises TrajectoryError.

    The rule chooses among the branches of each role.
    """
    rule = require_rule(name)
    chosen: list[int] = []
    for role in {call.role: None for call in calls}:
        choose = partial(_chosen, rule, [call for call in calls if call.role == role])
        chosen += contain_call(choose, f"train rule {name}", TrajectoryError)
    known = {call.index for call in calls}
    if not known.issuperset(chosen):
        raise TrajectoryError(
            f"train rule {name} returned {describe(chosen)}, and the calls are 0 to {len(known) - 1}",
            hint="return indexes of model calls, as in Branch.indexes",
        )
    return sorted(known.difference(chosen))


def _chosen(rule: TrainRule, calls: Sequence[DispatchedSamplingTask]) -> list[int]:
    return list(rule(branches_of(calls)))


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not is_score(value):
        raise wrong("a finite number")
    return float(value)


def _few(value: Any) -> Any:
    # Before the rewards are read: pydantic would list what is wrong with each of a million.
    if isinstance(value, dict) and len(value) > MAX_REWARDS:
        raise wrong(f"a mapping of at most {MAX_REWARDS}")
    return value or {}


Score = Annotated[float, BeforeValidator(_finite)]
Rewards = Annotated[Mapping[str, Score], BeforeValidator(_few)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reward(SettingsModel):
    score: Score
    call_rewards: Rewards = field(default_factory=dict)
    role_rewards: Rewards = field(default_factory=dict)
    details: Object = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Correction(SettingsModel):
    corrected: str = ""
    by: str = "user"


async def read_reward(store: Store, record_id: str, body: Mapping[str, Any]) -> ReportedReward:
    """Return the reward in ``body``: ``score``, ``call_rewards`` by answer id, ``role_rewards``, ``details``.

    Raises GatewayError for a value that is not a finite number, and for the id of no answer.
    """
    # First: pydantic cannot name a key that UTF-8 cannot hold.
    for name in (*body, *(key for value in body.values() if isinstance(value, dict) for key in value)):
        if replace_surrogates(name) != name:
            raise invalid(f"a reward has the key {short(name)}, which has a lone surrogate", "body")
    given = checked(_Reward, body)
    by_answer = {key.rpartition("-")[2].rpartition("_")[2]: key for key in given.call_rewards}
    calls = await store.gateways.by_answer(record_id, list(by_answer))
    turn_rewards = {}
    for answer_id, key in by_answer.items():
        request = calls.get(answer_id)
        if request is None or request.call is None:
            raise invalid(
                f"call_rewards names {short(key)}, which is not the id of an answer", "call_rewards"
            )
        turn_rewards[request.call.rpartition("/")[2]] = given.call_rewards[key]
    for role in given.role_rewards:
        if (problem := role_problem(role)) is not None:
            raise invalid(problem, "role_rewards")
    return ReportedReward(
        score=given.score,
        details=sanitize_bson(given.details),
        turn_rewards=turn_rewards,
        role_rewards=dict(given.role_rewards),
    )


async def give_feedback(store: Store, name: str, body: Mapping[str, Any]) -> None:
    """Store a person's feedback for the conversation ``name``, or for the Record of that ``_id``.

    ``body`` is that of ``read_reward``: ``score`` and so on. It also takes ``corrected``, the answer that a
    person would have wanted, and ``by``, the person; they are stored as a Label. The last feedback counts,
    until the trajectory is scored. Raises GatewayError for a bad value, for an unknown id, and for a
    trajectory that has a score or has failed.
    """
    own = {key: body[key] for key in ("corrected", "by") if key in body}
    said = checked(_Correction, own)
    record = name if "/" in name else record_key(task_key(TRAIN_SPLIT, CONVERSATIONS, name), 0, 1)
    rest = {key: value for key, value in body.items() if key not in own}
    reward = await read_reward(store, record, rest)
    try:
        status = await store.conversations.give_feedback(record, reward)
        if said.corrected:
            await store.labels.put(
                record, by=said.by, label="corrected", note=said.corrected, score=reward.score
            )
    except ConfigError as error:
        raise invalid(error.message, "corrected") from error
    except (StoreUnavailableError, StoreDeniedError):
        raise
    except StoreError as error:
        raise GatewayError(
            "not_found", error.message, code="no_such_trajectory", param="id", hint=error.hint
        ) from error
    if status is not None:
        raise GatewayError(
            "invalid", f"{short(name)} is {status}: it takes no more feedback", code="too_late", param="id",
            hint="a Label with a score and `agentrl db rescore --from_labels` change a score",
        )  # fmt: skip
