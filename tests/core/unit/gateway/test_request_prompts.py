"""What a gateway keeps of conversations in memory."""

from __future__ import annotations

from typing import Any, cast

import pytest

from agentrl.calls.prompts import Chain
from agentrl.gateway import answerer
from agentrl.gateway.answerer import Chains

pytestmark = pytest.mark.attack


@pytest.mark.parametrize("tokens", [1, 400])
def test_many_short_conversations_are_bounded_as_few_long_ones_are(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    monkeypatch.setattr(answerer, "_CACHED_TOKENS", 10_000)
    cache = Chains(cast("Any", None))
    for number in range(1000):
        cache.add(Chain(str(number), [1] * tokens, [2], []), ("record", str(number)))
    assert 0 < len(cache._cached) <= 100
    assert len(cache._ends) == len(cache._keys) == len(cache._cached)
