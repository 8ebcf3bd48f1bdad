"""Requests and rewards of clients: images, greedy answers, numbers that nothing can hold, kept chains."""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError
from rollout_fakes import MemoryImages
from tiny_vision import drawn, save_vision_model

from agentrl.calls.prompts import Chain, prompt_of
from agentrl.chat.open_format import open_chat_format
from agentrl.config.schema import ModelConfig
from agentrl.documents.conversation import prefix_digests
from agentrl.documents.images import image_of_bytes, image_refs
from agentrl.gateway import answerer, feedback
from agentrl.gateway.answerer import Chains, store_images
from agentrl.gateway.app import parse_body
from agentrl.gateway.dialects import fields
from agentrl.gateway.dialects.anthropic_messages import Messages
from agentrl.gateway.dialects.fields import load_body
from agentrl.gateway.dialects.openai_chat import ChatCompletions
from agentrl.gateway.dialects.openai_responses import Responses
from agentrl.gateway.feedback import read_reward
from agentrl.gateway.request import GatewayError

DATA = base64.b64encode(drawn()).decode()
URL = f"data:image/png;base64,{DATA}"
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}


@pytest.fixture(scope="module")
def chat_format(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_chat_format(save_vision_model(tmp_path_factory.mktemp("vision")), ModelConfig())


def bodies(url: str = URL) -> dict[str, tuple[Any, dict[str, Any]]]:
    """One question with an image, in each dialect."""
    text, question = "What is it?", {"type": "text", "text": "What is it?"}
    block = BLOCK if url == URL else {"type": "image", "source": {"type": "url", "url": url}}
    return {
        "chat": (ChatCompletions(), {"messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, question]}]}),
        "responses": (Responses(), {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": url}, {"type": "input_text", "text": text}]}]}),
        "messages": (Messages(), {"max_tokens": 9, "messages": [
            {"role": "user", "content": [block, question]}]}),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
async def test_an_image_is_stored_and_named_by_its_hash(name: str, chat_format: Any) -> None:
    dialect, body = bodies()[name]
    store = MemoryImages()
    request = await store_images(dialect.parse({"model": "policy", **body}), chat_format, store)
    (ref,) = image_refs(request.messages)
    assert ref == image_of_bytes(drawn()).ref
    assert (await store.get([ref.sha256]))[ref.sha256].data == drawn()
    prefix_digests(request.messages, [])

    first = prompt_of(chat_format, None, 0, request.messages, [])
    assert [image.sha256 for image in first.images] == [ref.sha256]
    answer = {"role": "assistant", "content": "Red."}
    chain = Chain("c", first.ids, [1, 2], [*request.messages, answer],
                  images=first.images)  # fmt: skip
    again = [*request.messages, answer, request.messages[0]]
    second = prompt_of(chat_format, chain, 2, again, [])
    assert second.parent == "c"
    assert [image.start for image in second.context_images] == [second.images[1].start - len(first.ids) - 2]
    for image in second.images:
        pads = second.ids[image.start : image.start + image.tokens]
        assert set(pads) == {chat_format.vision.image_token}


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
async def test_remote_and_broken_images_are_refused(name: str, chat_format: Any) -> None:
    for url, why in (
        ("https://example.org/cat.png", "not fetched from anywhere"),
        ("data:image/png;base64,AAAA", "not an image"),
        ("data:image/png;base64,@@@", "not base64"),
    ):
        dialect, body = bodies(url)[name]
        with pytest.raises(GatewayError, match=why) as caught:
            await store_images(dialect.parse({"model": "policy", **body}), chat_format, MemoryImages())
        assert caught.value.code == "invalid_image"


async def test_a_text_model_refuses_images(tmp_path: Path) -> None:
    folder = save_vision_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen3"}))
    text_only = open_chat_format(folder, ModelConfig())
    for dialect, body in bodies().values():
        with pytest.raises(GatewayError, match="reads text only") as caught:
            await store_images(dialect.parse({"model": "policy", **body}), text_only, MemoryImages())
        assert caught.value.code == "unsupported_content"


async def test_texts_around_images_stay_in_order(chat_format: Any) -> None:
    shown = [{"type": "text", "text": "shot"}, BLOCK]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": shown}
    mark = {"type": "text", "text": "!"}
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    body = {"model": "policy", "max_tokens": 9, "messages": [
        {"role": "user", "content": "go"}, {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}, BLOCK, mark]},
    ]}  # fmt: skip
    request = await store_images(Messages().parse(body), chat_format, MemoryImages())
    tool, user = request.messages[2:]
    assert [part["type"] for part in tool["content"]] == ["text", "image"]
    assert [part.get("text") for part in user["content"]] == ["so?", None, "!"]
    prompt = prompt_of(chat_format, None, 0, request.messages, [])
    assert len(prompt.images) == 2


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
        (b'{"score": 1, "details": [1]}', r"details is \[1\]; it must be a mapping"),
        (b'{"%b": 1}' % (b"k" * 9999), "^unknown key 'k{200}…' .choose one of"),
        (b'{"score": 1, "reward": 2}', "unknown key 'reward' .did you mean"),
        (b"[" * 200_000, "the body is not JSON"),
    ],
)
async def test_what_nothing_can_hold_is_bad_input(body: bytes, words: str) -> None:
    with pytest.raises(GatewayError, match=words) as caught:
        await read_reward(STORE, "r", load_body(body))
    assert caught.value.status == 400


@pytest.mark.attack
@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (ChatCompletions(), b'{"model": "m", "messages": [{"role": %b, "content": "x"}]}'),
        (Responses(), b'{"model": "m", "input": [{"role": %b, "content": "x"}]}'),
        (Messages(), b'{"model": "m", "messages": [{"role": "user", "content": "x"}],'
                     b' "tool_choice": {"type": %b}}'),
    ],
)  # fmt: skip
def test_a_name_that_is_nested_too_deeply_is_bad_input(dialect: Any, body: bytes) -> None:
    # orjson reads 1,024 levels, more than Python writes.
    with pytest.raises(GatewayError, match="nested too deeply") as caught:
        parse_body(dialect, body % (b'{"a":' * 1015 + b"1" + b"}" * 1015))
    assert caught.value.status == 400


@pytest.mark.attack
@pytest.mark.parametrize("field", ["call_rewards", "role_rewards"])
async def test_too_many_rewards_are_refused_before_each_is_read(field: str) -> None:
    body = {"score": 1, field: {str(number): "x" for number in range(feedback.MAX_REWARDS + 1)}}
    with pytest.raises(GatewayError, match=f"{field} is .* a mapping of at most 10000$") as caught:
        await read_reward(cast("Any", None), "r", body)
    cause = caught.value.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() == 1


@pytest.mark.attack
async def test_the_place_of_a_wrong_reward_is_cut() -> None:
    with pytest.raises(GatewayError, match="it must be a finite number") as caught:
        await read_reward(cast("Any", None), "r", {"score": 1, "role_rewards": {"k" * 9999: "x"}})
    assert max(len(caught.value.message), len(caught.value.param or "")) < 300


@pytest.mark.parametrize("empty", [None, {}, [], "", 0])
async def test_what_a_reward_leaves_empty_is_empty(empty: Any) -> None:
    body = {"score": 1, "details": empty, "call_rewards": empty, "role_rewards": empty}
    store = cast("Any", SimpleNamespace(gateways=Gateways()))
    assert await read_reward(store, "r", body) == await read_reward(store, "r", {"score": 1})


@pytest.mark.attack
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
