"""Compare the requests of a trajectory's owner with those of the owners before it.

A program that was killed with its sampler starts again from its beginning. A request that equals a stored one
gets the stored answer, so that the program runs fast-forward to where it was. What it never asks for again is
the rest of a branch that the trajectory has left.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.gateway.request import GatewayRequest

_VOLATILE = "…"
"""Takes the place of volatile text where requests are compared."""


def without_volatile(value: Any, volatile: Sequence[str]) -> Any:
    """Return ``value``, of JSON, with every match of the patterns ``volatile`` in its texts replaced."""
    if not volatile:
        return value
    if isinstance(value, str):
        for pattern in volatile:
            value = re.sub(pattern, _VOLATILE, value)
        return value
    if isinstance(value, dict):
        return {key: without_volatile(item, volatile) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_volatile(item, volatile) for item in value]
    return value


def request_key(request: GatewayRequest, digest: str) -> str:
    """Return the digest of what a request asks for; ``digest`` is that of its conversation and its tools.

    How the answer is sent does not count: the dialect, streaming, logprobs, the name of the model.
    """
    asked = [
        digest, request.changes, request.max_tokens, request.stop, request.one_call, request.must_call,
        request.no_calls, request.schema,
    ]  # fmt: skip
    text = json.dumps(asked, sort_keys=True, default=dict)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def dropped_calls(calls: Iterable[DispatchedSamplingTask], answered: Collection[str]) -> list[int]:
    """Return the indexes of the calls that are no part of a trajectory whose last owner got ``answered``.

    What an answer continues is part of it: a program may begin with the conversation that it has saved.
    """
    by_id = {call.id: call for call in calls}
    kept: set[str] = set()
    for key in answered:
        before: str | None = key
        while before is not None and before not in kept:
            kept.add(before)
            before = by_id[before].parent or by_id[before].follows
    return sorted(call.index for call in by_id.values() if call.id not in kept)
