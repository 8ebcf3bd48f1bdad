"""When a model reads two conversations as one, and where the calls of a trajectory leave each other.

A client sends its whole conversation with each request, and changes what it sends back: ids, white space,
thoughts. Digests find what is known of it; what differs is said of the branch that begins there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from agentrl.documents.images import text_of
from agentrl.documents.model_call import DispatchedSamplingTask, full_messages
from agentrl.documents.task_json import Message


def prefix_digests(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], role: str | None = None
) -> list[str]:
    """Return a digest for each prefix of the conversation: the first for the role and the tools.

    Two prefixes have one digest if the model reads the same in both. The ids of tool calls, the white space
    around an assistant's text and its thoughts do not count, because clients change them in what they send
    back.
    """
    of_role = "" if role is None else f"role {role}\0"
    digests = [hashlib.sha256(of_role.encode() + _dump([dict(tool) for tool in tools])).hexdigest()]
    for message in messages:
        # Chain the digests: hashing each prefix from its start would cost a conversation's square.
        digests.append(digest_after(digests[-1], message))
    return digests


def answered_prefixes(messages: Sequence[Message], digests: Sequence[str]) -> list[tuple[int, str]]:
    """Return length and digest of each prefix that ends with an answer, the longest first."""
    ends = [number for number, message in enumerate(messages, 1) if message["role"] == "assistant"]
    return [(end, digests[end]) for end in reversed(ends)]


def digest_after(digest: str, message: Message) -> str:
    """Return the digest of a conversation with ``digest`` and one more message."""
    return hashlib.sha256(digest.encode() + _dump(_canonical(message))).hexdigest()


def _canonical(message: Message) -> list[Any]:
    content, role = message.get("content") or "", message.get("role")
    if role != "assistant":
        return [role, content]
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    calls = [[function.get("name"), function.get("arguments") or {}] for function in functions]
    return [role, text_of(content).strip(), calls]


def change_of(sampled: Message, sent: Message) -> str | None:
    """Return how an answer that a client sends back differs; None if the model reads the same in both."""
    (_, text, calls), (_, sent_text, sent_calls) = _canonical(sampled), _canonical(sent)
    changes = []
    if text != sent_text:
        changes.append("with another text" if sent_text else "without its text")
    # Compare bytes: as values, 1 is True.
    made, returned = list(map(_dump, calls)), list(map(_dump, sent_calls))
    if made and not returned:
        changes.append("without its tool calls")
    elif sorted(made) != sorted(returned):
        changes.append("with other tool calls or arguments")
    elif made != returned:
        changes.append("with its tool calls in another order")
    return " and ".join(changes) or None


def divergences(calls: Sequence[DispatchedSamplingTask]) -> dict[int, str]:
    """Return by index why calls of a trajectory are branches: where their requests leave an earlier one.

    A branch begins behind the last answer that its request has unchanged (``parent``, ``follows``). It is
    compared with the earlier request behind that answer with which it shares most messages.
    """
    by_id: dict[str, DispatchedSamplingTask] = {}
    known: dict[str, int] = {}
    """Call → messages of its conversation, its answer included."""
    read: dict[str, DispatchedSamplingTask] = {}
    """Digest of what a request begins with → the latest such request."""
    answered: dict[str, DispatchedSamplingTask] = {}
    """Digest of a whole request → the latest one."""
    found: dict[int, str] = {}
    for call in calls:
        base = call.parent or call.follows
        before = known.get(base or "", 0)
        messages = full_messages(call, by_id.get(call.parent or ""))
        new = messages if call.parent else messages[before:]
        digests = [f"{call.role} {base}"]
        for message in new:
            digests.append(digest_after(digests[-1], message))
        shared = max((number for number, digest in enumerate(digests) if digest in read), default=None)
        if shared is not None and not call.is_context_reset:
            other, answer = read[digests[shared]], answered.get(digests[shared])
            sent = new[shared] if shared < len(new) else None
            if base is None and call.tools != other.tools:
                reason: str | None = f"the tools of the request are not those of turn {other.index + 1}"
            else:
                reason = _difference(other, answer, sent, before + shared + 1)
            if reason is not None:
                found[call.index] = reason
        by_id[call.id] = call
        known[call.id] = before + len(new) + 1
        read.update(dict.fromkeys(digests, call))
        answered[digests[-1]] = call
    return found


def _difference(
    other: DispatchedSamplingTask, answer: DispatchedSamplingTask | None, sent: Message | None, number: int
) -> str | None:
    """Return why a request leaves ``other`` at message ``number``, from 1; None if that is no difference.

    ``answer`` is the call that read exactly the messages before it; ``sent`` is None at the request's end.
    """
    if answer is not None and sent is not None:
        turn = answer.index + 1
        if sent.get("role") != "assistant":
            return f"the request does not have the answer of turn {turn}"
        change = change_of(answer.message, sent)
        return None if change is None else f"the request has the answer of turn {turn} {change}"
    if sent is not None:
        return f"message {number} of the request, {sent.get('role')}, is not that of turn {other.index + 1}"
    if answer is not None:
        return f"the request is that of turn {answer.index + 1} again"
    return f"the request ends before that of turn {other.index + 1}"


def _dump(value: Sequence[Any]) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a lone surrogate, or an integer of more than 64 bits
        return json.dumps(
            value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str
        ).encode()
