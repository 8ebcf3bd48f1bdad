"""The plain fields of a request: what is taken, and what is named with its value and the limit."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

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
        ("chat", {"stop": ""}, "stop[0] is ''; it must be text that is not empty"),
        ("chat", {"stop": ["\ud83d"]}, "stop[0] is '\\ud83d'; it must be text without a lone surrogate"),
        ("messages", {"top_k": 0}, "top_k is 0; it must be at least 1"),
        ("messages", {"tool_choice": [1]}, "tool_choice is [1]; it must be a mapping"),
        ("messages", {"output_config": "text"}, "output_config is 'text'; it must be a mapping"),
        ("responses", {"input": 3}, "input is 3; it must be a list"),
        ("responses", {"previous_response_id": 5}, "previous_response_id is 5; it must be text"),
        ("responses", {"text": [1]}, "text is [1]; it must be a mapping"),
    ],
)
def test_a_wrong_field_of_one_dialect_is_named(dialect: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(GatewayError) as caught:
        parse(dialect, **changes)
    assert problem in caught.value.message


@pytest.mark.attack
@pytest.mark.parametrize(
    ("dialect", "field", "most"),
    [
        ("chat", "stop", 16), ("messages", "stop_sequences", 16), ("chat", "tools", 512),
        ("chat", "messages", 10_000), ("messages", "messages", 10_000), ("responses", "input", 10_000),
    ],
)  # fmt: skip
def test_a_list_that_is_too_long_is_refused_before_its_items(dialect: str, field: str, most: int) -> None:
    with pytest.raises(GatewayError, match=f"{field} is .* a list of at most {most}$") as caught:
        parse(dialect, **{field: [1] * (most + 1)})
    cause = caught.value.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() == 1


@pytest.mark.parametrize("empty", [None, {}, [], "", False])
@pytest.mark.parametrize(
    ("dialect", "field"), [("messages", "tool_choice"), ("messages", "output_config"), ("responses", "text")]
)
def test_an_empty_object_may_be_written_as_clients_write_it(dialect: str, field: str, empty: Any) -> None:
    assert parse(dialect, **{field: empty}) == parse(dialect)


@pytest.mark.attack
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_field_that_nobody_knows_is_ignored_also_if_utf8_cannot_hold_its_name(dialect: str) -> None:
    assert parse(dialect, **{"\ud83d": "x"}) == parse(dialect)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("dialect", "field"), [("chat", "stop"), ("chat", "temperature"), ("chat", "n"), ("chat", "tool_choice"),
                           ("chat", "response_format"), ("messages", "container")],
)  # fmt: skip
def test_a_value_that_is_nested_too_deeply_is_a_wrong_one(dialect: str, field: str) -> None:
    nested: dict[str, Any] = {}
    for _ in range(100_000):
        nested = {"a": nested}
    with pytest.raises(GatewayError, match="nested too deeply"):
        parse(dialect, **{field: nested})


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
