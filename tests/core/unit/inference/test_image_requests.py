"""Requests with images: SGLang's field, a prompt of another length, and an engine that takes none."""

from __future__ import annotations

import base64

import orjson
import pytest
from tiny_vision import drawn

from agentrl.documents.images import image_of_bytes
from agentrl.documents.sampling import SamplingParams
from agentrl.inference.client import EngineClient
from agentrl.inference.engine import EngineRefusedError
from agentrl.inference.engines.clients import VllmClient

IMAGE = image_of_bytes(drawn())


def test_a_json_schema_is_vllms_structured_output() -> None:
    params = SamplingParams(extra={"json_schema": '{"type": "object"}'})
    _, body = VllmClient("http://e")._request(b"[1,2]", params, "r")
    sent = orjson.loads(body)["sampling_params"]
    assert sent["structured_outputs"] == {"json": '{"type": "object"}'}
    assert "json_schema" not in sent


def test_images_of_a_request_are_data_urls() -> None:
    path, body = EngineClient("http://e")._request(b"[1,2]", SamplingParams(max_new_tokens=3), "r", [IMAGE])
    sent = orjson.loads(body)
    assert path == "/generate"
    assert sent["input_ids"] == [1, 2]
    (url,) = sent["image_data"]
    assert url == f"data:image/png;base64,{base64.b64encode(drawn()).decode()}"
    _, plain = EngineClient("http://e")._request(b"[1,2]", SamplingParams(max_new_tokens=3), "r")
    assert "image_data" not in orjson.loads(plain)


def test_vllm_refuses_images() -> None:
    with pytest.raises(EngineRefusedError, match="vLLM"):
        VllmClient("http://e")._request(b"[1,2]", SamplingParams(max_new_tokens=3), "r", [IMAGE])
