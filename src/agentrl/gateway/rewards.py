"""Read a reward that an agent reports: ``POST /t/TOKEN/reward``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentrl.documents.base import is_finite, replace_surrogates, sanitize_bson
from agentrl.documents.gateway import ReportedReward
from agentrl.documents.model_call import role_problem
from agentrl.gateway.errors import invalid
from agentrl.gateway.request import kind_of, short

if TYPE_CHECKING:
    from agentrl.store.client import Store

_FIELDS = ("score", "call_rewards", "role_rewards", "details")


async def read_reward(store: Store, record_id: str, body: Mapping[str, Any]) -> ReportedReward:
    """Return the reward in ``body``: ``score``, ``call_rewards`` by answer id, ``role_rewards``, ``details``.

    Raises GatewayError for a value that is not a finite number, and for the id of no answer.
    """
    unknown = sorted(set(body) - set(_FIELDS))
    if unknown:
        raise invalid(f"a reward has no field {short(unknown[0])}: {', '.join(_FIELDS)}", unknown[0])
    details = body.get("details") or {}
    rewards = body.get("call_rewards") or {}
    roles = body.get("role_rewards") or {}
    for name, value in (("details", details), ("call_rewards", rewards), ("role_rewards", roles)):
        if not isinstance(value, dict):
            raise invalid(f"{name} is {kind_of(value)}; it must be an object", name)
        for key in value:
            if replace_surrogates(key) != key:
                raise invalid(f"{name} names {short(key)}, which has a lone surrogate", name)
    by_answer = {key.rpartition("-")[2].rpartition("_")[2]: key for key in rewards}
    calls = await store.gateways.by_answer(record_id, list(by_answer))
    turn_rewards = {}
    for answer_id, key in by_answer.items():
        found = calls.get(answer_id)
        if found is None or found.call is None:
            raise invalid(
                f"call_rewards names {short(key)}, which is not the id of an answer", "call_rewards"
            )
        turn_rewards[found.call.rpartition("/")[2]] = _number(rewards[key], f"call_rewards[{short(key)}]")
    for role in roles:
        if (problem := role_problem(role)) is not None:
            raise invalid(problem, "role_rewards")
    return ReportedReward(
        score=_number(body.get("score"), "score"),
        details=sanitize_bson(details),
        turn_rewards=turn_rewards,
        role_rewards={role: _number(value, f"role_rewards[{role}]") for role, value in roles.items()},
    )


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not is_finite(value):
        raise invalid(f"{name} is {short(value)}; it must be a finite number", name)
    return float(value)
