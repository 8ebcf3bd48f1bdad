"""Images that tools return: kept behind the text for vision models, described for all others."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any, cast

from rollout_fakes import MemoryImages
from tiny_vision import drawn

from agentrl.calls.turns import execute
from agentrl.chat.parsers.parser import ToolCall
from agentrl.documents.images import image_of_bytes, image_refs
from agentrl.documents.model_call import full_messages, strip_tool_results
from agentrl.tools.mcp.content import MAX_IMAGES, images_in, normalize_result
from agentrl.tools.tool import ToolResult

ITEM = {"type": "image", "data": base64.b64encode(drawn()).decode(), "mimeType": "image/png"}


def test_images_of_a_result_stay_behind_its_text() -> None:
    broken = {**ITEM, "data": "AAAA"}
    content = [{"type": "text", "text": "a shot"}, broken, *[ITEM] * (MAX_IMAGES + 2)]
    result = normalize_result({"content": content})
    assert [item["type"] for item in result["content"]] == ["text", *["image"] * MAX_IMAGES]
    assert result["content"][0]["text"].count("not shown") == MAX_IMAGES + 3
    images = images_in(item["data"] for item in result["content"][1:])
    assert {image.id for image in images} == {image_of_bytes(drawn()).id}
    assert len(images) == MAX_IMAGES - 1


async def test_a_result_shows_its_image_to_a_vision_model_only() -> None:
    text = "a shot\n[image, image/png, 99 bytes; not shown]"
    image = image_of_bytes(drawn())

    async def call(name: str, arguments: Any) -> ToolResult:
        return ToolResult(text=text, error=False, seconds=0.0, server="s", images=(image,))

    tools = cast(Any, SimpleNamespace(call=call))
    plain = await execute(ToolCall("look", {}), tools)
    assert (plain.content, plain.images) == (text, ())
    store = MemoryImages()
    shown = await execute(ToolCall("look", {}), tools, store)
    assert shown.text == "a shot\n[image, image/png, 99 bytes]"
    assert (await store.get([image.id]))[image.id] == image
    message = {"role": "tool", "content": shown.content, "tool_call_id": "c"}
    assert image_refs([message]) == [image.ref]
    stored = strip_tool_results([message], [shown])
    assert stored == ({"role": "tool", "tool_call_id": "c", "execution": 0},)
    call_of = cast(Any, SimpleNamespace(messages=stored))
    parent = cast(Any, SimpleNamespace(tool_executions=(shown,)))
    assert full_messages(call_of, parent) == (message,)
