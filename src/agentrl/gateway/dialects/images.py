"""Read images in the content of requests: each becomes a part with its ``data:`` URL, decoded later."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from agentrl.documents.images import Part, joined
from agentrl.gateway.errors import invalid
from agentrl.gateway.request import kind_of, refuse_media, short


def image_part(value: Any, where: str) -> Part:
    """Return the part of an OpenAI image: a URL, or an object with one. Raises GatewayError."""
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str):
        raise invalid(f"{where}.image_url is {kind_of(value)}; it must be a data: URL", where)
    return {"type": "image", "url": url, "where": where}


def content_of(content: Any, where: str, *, texts: Collection[str], image: str) -> Any:
    """Return the text of OpenAI's content, or its parts if there are images among them.

    ``texts`` and ``image`` are the types of parts with a text and with an image. Raises GatewayError.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(f"{where} is {kind_of(content)}; it must be text or a list of parts", where)
    pieces: list[str | Part] = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == image:
            pieces.append(image_part(part.get("image_url"), f"{where}[{place}]"))
            continue
        if kind not in texts:
            raise refuse_media(kind, f"{where}[{place}]")
        text = part.get("text") or part.get("refusal") or ""
        if not isinstance(text, str):
            raise invalid(f"{where}[{place}].text is {kind_of(text)}; it must be text", where)
        pieces.append(text)
    return joined(pieces)


def source_part(source: Any, where: str) -> Part:
    """Return the part of an Anthropic image source. Raises GatewayError for other kinds than base64."""
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "url":
        return image_part(source.get("url"), where)
    if kind != "base64" or not isinstance(source.get("data"), str):
        raise invalid(f"{where}.source has the type {short(kind)}; send the bytes as base64", where)
    media_type = str(source.get("media_type") or "image/png")
    return {"type": "image", "url": f"data:{media_type};base64,{source['data']}", "where": where}
