"""A client that asks for greedy answers is named at its first request, not when nothing can be trained."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from agentrl.gateway.dialects import fields
from agentrl.gateway.dialects.openai_chat import ChatCompletions

# What aider 0.86 sends.
AIDER = {"model": "policy", "stream": True, "temperature": 0, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(("temperature", "warnings"), [(0, 1), (0.001, 1), (0.01, 0), (None, 0)])
def test_a_temperature_that_cannot_be_trained_is_logged_once(
    temperature: float | None, warnings: int, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(fields, "_warned", set())
    with caplog.at_level(logging.WARNING, fields.__name__):
        for _ in range(2):
            ChatCompletions().parse({**AIDER, "temperature": temperature})
    assert len(caplog.records) == warnings
    for record in caplog.records:
        assert "no answer can be trained" in record.message
        assert record.temperature == temperature  # type: ignore[attr-defined]
