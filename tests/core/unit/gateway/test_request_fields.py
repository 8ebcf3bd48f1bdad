"""The plain fields of a request: what is taken, and what is named with its value and the limit."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.gateway.dialects.anthropic_messages import Messages
from agentrl.gateway.dialects.openai_chat import ChatCompletions
from agentrl.gateway.dialects.openai_responses import Responses
from agentrl.gateway.request import GatewayError, GatewayRequest

ASKED = [{"role": "user", "content": "hi"}]
DIALECTS = {
    "chat": (ChatCompletions, {"messages": ASKED}), "messages": (Messages, {"messages": ASKED}),
    "responses": (Responses, {"input": ASKED}),
}  # fmt: skip


def parse(dialect: str, **changes: Any) -> GatewayRequest:
    kind, body = DIALECTS[dialect]
    return kind().parse({"model": "policy", **body, **changes})


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": None}, "model is None; it must be text"),
        ({"temperature": 9}, "temperature is 9; it must be at most 2"),
        ({"temperature": True}, "temperature is True; it must be a number"),
        ({"temperature": float("nan")}, "temperature is nan; it must be a finite number"),
        ({"top_p": 0}, "top_p is 0; it must be at least 1e-06"),
        ({"stream": "yes"}, "stream is 'yes'; it must be true or false"),
        ({"tools": {}}, "tools is {}; it must be a list"),
        ({"tools": [0] * 513}, "it must be a list of at most 512"),
    ],
)
def test_a_wrong_field_is_named_in_every_dialect(dialect: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(GatewayError) as caught:
        parse(dialect, **changes)
    assert problem in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, next(iter(changes)))


@pytest.mark.parametrize(
    ("dialect", "changes", "problem"),
    [
        ("chat", {"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ("chat", {"max_completion_tokens": 2**31}, "it must be at most 2147483647"),
        ("chat", {"seed": 5.5}, "seed is 5.5; it must be a whole number"),
        ("chat", {"stop": ["a", ""]}, "stop[1] is ''; it must be text that is not empty"),
        ("chat", {"stop": ["a"] * 17}, "it must be a list of at most 16"),
        ("chat", {"messages": []}, "messages is []; it must be a list of at least 1"),
        ("chat", {"messages": "hi"}, "messages is 'hi'; it must be a list"),
        ("messages", {"top_k": 0}, "top_k is 0; it must be at least 1"),
        ("messages", {"tool_choice": []}, "tool_choice is []; it must be a mapping"),
        ("responses", {"input": 3}, "input is 3; it must be a list"),
        ("responses", {"previous_response_id": 5}, "previous_response_id is 5; it must be text"),
        ("responses", {"text": []}, "text is []; it must be a mapping"),
    ],
)
def test_a_wrong_field_of_one_dialect_is_named(dialect: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(GatewayError) as caught:
        parse(dialect, **changes)
    assert problem in caught.value.message


def test_null_is_none_and_one_stop_may_be_a_line_end() -> None:
    nulls = dict.fromkeys(("temperature", "stop", "stream", "max_tokens", "tools", "seed", "logprobs"))
    plain = parse("chat", **nulls)
    assert (plain.changes, plain.stop, plain.stream, plain.max_tokens, plain.logprobs) == (
        {}, (), False, None, False,
    )  # fmt: skip
    given = parse("chat", temperature=1, stop="\n", seed=-1, max_completion_tokens=7, max_tokens=9)
    assert (given.changes, given.stop, given.max_tokens) == (
        {"temperature": 1.0, "seed": 2**31 - 1},
        ("\n",),
        7,
    )
    assert parse("responses", input="hi").messages == ASKED
