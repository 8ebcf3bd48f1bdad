"""Decode and store the images of a request, and name them by their hashes in its messages."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from agentrl.chat.chat_format import ChatFormat, Message
from agentrl.documents.images import Image, has_images, image_of_url
from agentrl.errors import ImageError
from agentrl.gateway.errors import GatewayError
from agentrl.gateway.request import GatewayRequest, refuse_media
from agentrl.rollout.images import ImageStore

MAX_REQUEST_IMAGES = 100
"""Images of one request."""


async def store_images(request: GatewayRequest, chat_format: ChatFormat, store: ImageStore) -> GatewayRequest:
    """Return the request with its images stored. Raises GatewayError for one that is not allowed."""
    if not has_images(request.messages):
        return request
    if chat_format.vision is None:
        raise _text_only(request.messages)
    try:
        messages, images = await asyncio.to_thread(_decode, request.messages)
    except ImageError as error:
        raise GatewayError(
            "invalid", error.message, code="invalid_image", param="messages", hint=error.hint
        ) from error
    await store.put(*images)
    return replace(request, messages=messages)


def _decode(messages: list[Message]) -> tuple[list[Message], list[Image]]:
    images: list[Image] = []

    def named(part: dict[str, Any]) -> dict[str, Any]:
        if part.get("type") != "image" or "url" not in part:
            return part
        if len(images) == MAX_REQUEST_IMAGES:
            raise ImageError(f"the request shows more than {MAX_REQUEST_IMAGES} images", hint="show fewer")
        images.append(image_of_url(part["url"], where=part["where"]))
        return images[-1].ref.part()

    found = [
        {**message, "content": [named(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    return found, images


def _text_only(messages: list[Message]) -> GatewayError:
    where = next(
        (
            str(part.get("where", "messages"))
            for message in messages
            if isinstance(message.get("content"), list)
            for part in message["content"]
            if part.get("type") == "image"
        ),
        "messages",
    )
    return refuse_media("image", where)
