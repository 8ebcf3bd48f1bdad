"""Identify conversations by digests, so that a request finds the model call that it continues."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import orjson

from agentrl.chat.chat_format import Message
from agentrl.tools.base import Schema


def prefix_digests(
    messages: Sequence[Message], tools: Sequence[Schema], role: str | None = None
) -> list[str]:
    """Return a digest for each prefix of the conversation: the first for the role and the tools.

    Two prefixes have one digest if the model reads the same in both. The ids of tool calls, the white space
    around an assistant's text and its thoughts do not count, because clients change them in what they send
    back.
    """
    of_role = "" if role is None else f"role {role}\0"
    digests = [hashlib.sha256(of_role.encode() + _dump([dict(tool) for tool in tools])).hexdigest()]
    for message in messages:
        digests.append(digest_after(digests[-1], message))
    return digests


def digest_after(digest: str, message: Message) -> str:
    """Return the digest of a conversation with ``digest`` and one more message."""
    return hashlib.sha256(digest.encode() + _dump(_canonical(message))).hexdigest()


def body_digest(*parts: str | bytes) -> str:
    """Return the digest of a request's identity."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "big") + data)
    return state.hexdigest()[:40]


def _canonical(message: Message) -> list[Any]:
    content = message.get("content") or ""
    if message["role"] != "assistant":
        return [message["role"], content]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return ["assistant", content.strip(), [[call["name"], call.get("arguments") or {}] for call in calls]]


def _dump(value: Sequence[Any]) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a lone surrogate, or an integer of more than 64 bits
        return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode()
