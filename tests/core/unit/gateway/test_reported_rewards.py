"""Read the reward that an agent reports: numbers and names that nothing can hold are bad input."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.gateway.dialects.fields import load_body
from agentrl.gateway.feedback import read_reward
from agentrl.gateway.request import GatewayError


class Gateways:
    async def by_answer(self, record_id: str, answers: list[str]) -> dict[str, Any]:
        return {answer: SimpleNamespace(call=f"{record_id}/0") for answer in answers}


STORE: Any = SimpleNamespace(gateways=Gateways())
BIG = b"9" * 311


@pytest.mark.attack
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"score": %b}' % BIG, "score is 9{200}…; it must be a finite number"),
        (b'{"score": 1, "call_rewards": {"a": %b}}' % BIG, "must be a finite number"),
        (b'{"score": 1, "role_rewards": {"a": %b}}' % BIG, "must be a finite number"),
        (b'{"score": 1, "call_rewards": {"\\ud800": 1}}', "has the key .*ud800.*a lone surrogate"),
        (b'{"score": 1, "role_rewards": {"\\ud800": 1}}', "has the key .*ud800.*a lone surrogate"),
        (b'{"\\ud800": 1}', "has the key .*ud800.*a lone surrogate"),
        (b'{"score": 1, "reward": 2}', "unknown key 'reward' .did you mean"),
        (b"[" * 200_000, "the body is not JSON"),
    ],
)
async def test_what_nothing_can_hold_is_bad_input(body: bytes, words: str) -> None:
    with pytest.raises(GatewayError, match=words) as caught:
        await read_reward(STORE, "r", load_body(body))
    assert caught.value.status == 400
