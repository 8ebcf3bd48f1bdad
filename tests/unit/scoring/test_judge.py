"""Test the LLM judge against a local OpenAI-compatible server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from agentrl.errors import ConfigError, ScorerError
from agentrl.scoring.agent_config import load_section
from agentrl.scoring.judge import judge_prompt, verdict_of
from agentrl.scoring.scorers import ScorerContext, run_scorer


class Endpoint(ThreadingHTTPServer):
    """Answers by model name; ``asked`` is every request body with its key."""

    replies: dict[str, list[str | int]]
    asked: list[tuple[dict[str, Any], str]]


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((body, self.headers["Authorization"]))
        queue = self.server.replies[body["model"]]
        reply = queue.pop(0) if len(queue) > 1 else queue[0]
        status = reply if isinstance(reply, int) else 200
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": reply}}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        data = json.dumps(answer if status == 200 else {"error": {"message": "no"}}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint(("127.0.0.1", 0), Handler)
    server.replies, server.asked = {}, []
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join(10)
    server.server_close()


def write_config(tmp_path: Path, endpoint: Endpoint, *models: str, **settings: Any) -> str:
    url = f"http://127.0.0.1:{endpoint.server_address[1]}/v1"
    entries = [{"model": model, "base_url": url, "api_key": "${JUDGE_KEY}"} for model in models]
    section = {"models": entries, "retry_delay": 0.01, "max_retries": 2, "timeout": 10, **settings}
    path = tmp_path / "agent_config.yml"
    path.write_text(yaml.safe_dump({"scorer_agent": section}))
    return str(path)


def context(path: str, final_answer: str | None = "the city of light") -> ScorerContext:
    return ScorerContext(query="Capital?", final_answer=final_answer, answer="Paris", agent_config_path=path)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")


@pytest.mark.parametrize(("reply", "expected"), [("Correct", 1.0), ("I say: INCORRECT.", 0.0)])
async def test_a_verdict_is_a_score(tmp_path: Path, endpoint: Endpoint, reply: str, expected: float) -> None:
    endpoint.replies = {"a": [reply]}
    result = await run_scorer("agentcpm", context(write_config(tmp_path, endpoint, "a")), 30)
    assert result.score == expected
    assert result.details == {"judge": "a", "reply": reply, "scorer": "agentcpm"}
    ((body, authorization),) = endpoint.asked
    assert authorization == "Bearer secret"
    assert "the city of light" in body["messages"][0]["content"]


async def test_no_answer_and_an_equal_answer_ask_nobody(tmp_path: Path, endpoint: Endpoint) -> None:
    path = write_config(tmp_path, endpoint, "a")
    assert (await run_scorer("asearcher", context(path, None), 5)).score == 0.0
    assert (await run_scorer("asearcher", context(path, "paris."), 5)).score == 1.0
    assert endpoint.asked == []


async def test_the_next_model_is_asked_when_one_fails(tmp_path: Path, endpoint: Endpoint) -> None:
    endpoint.replies = {"a": [500], "b": ["well", "Correct"]}
    result = await run_scorer("agentcpm", context(write_config(tmp_path, endpoint, "a", "b")), 30)
    assert (result.score, result.details["judge"]) == (1.0, "b")
    assert [body["model"] for body, _ in endpoint.asked] == ["a", "a", "b", "b"]


async def test_no_verdict_at_all_is_a_failure(tmp_path: Path, endpoint: Endpoint) -> None:
    endpoint.replies = {"a": [401], "b": ["perhaps"]}
    with pytest.raises(ScorerError, match=r"a: AuthenticationError.*b: neither Correct nor Incorrect"):
        await run_scorer("agentcpm", context(write_config(tmp_path, endpoint, "a", "b")), 30)


async def test_a_missing_configuration_is_no_failure_of_a_trajectory_and_has_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        await run_scorer("agentcpm", context(str(tmp_path / "none.yml")), 5)
    assert "agent_config_example.yml" in str(caught.value)


def test_a_template_of_ones_own_may_hold_other_braces(tmp_path: Path, endpoint: Endpoint) -> None:
    template = 'Q {question} A {labeled_answer} P {pred_answer} as {"json": {x}}'
    section = load_section(
        write_config(tmp_path, endpoint, "a", judge_prompt_template=template), "scorer_agent"
    )
    prompt = judge_prompt(section, context("", "{question}"))
    assert prompt == 'Q Capital? A Paris P {question} as {"json": {x}}'


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("Correct", True),
        ("incorrect", False),
        ("It seems correct, but: Incorrect", False),
        ("<think>incorrect?</think>correct", True),
        ("uncorrected", None),
        ("", None),
    ],
)
def test_verdicts(reply: str, verdict: bool | None) -> None:
    assert verdict_of(reply) is verdict


def test_an_unset_variable_and_a_missing_key_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.yml"
    entry = {"model": "a", "base_url": "http://x", "api_key": "${NOT_SET_HERE}"}
    path.write_text(yaml.safe_dump({"scorer_agent": {"models": [entry]}}))
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    with pytest.raises(ConfigError, match="environment variable NOT_SET_HERE"):
        load_section(path, "scorer_agent")
    path.write_text(yaml.safe_dump({"scorer_agent": {"models": [{"model": "a"}]}}))
    with pytest.raises(ConfigError, match="lacks base_url, api_key"):
        load_section(path, "scorer_agent")
    with pytest.raises(ConfigError, match="no section browse_agent"):
        load_section(path, "browse_agent")


def test_the_example_configuration_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    section = load_section("assets/agent_config_example.yml", "scorer_agent")
    assert [endpoint.api_key for endpoint in section.models] == ["k", "none"]
    assert (
        load_section("assets/agent_config_example.yml", "browse_agent").settings["min_prompt_length"] == 1500
    )
