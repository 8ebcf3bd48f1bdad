"""Write what a request demands of its answer as a grammar for SGLang and vLLM: a structural tag."""

from __future__ import annotations

import json
from typing import Any

from agentrl.chat.call_shape import CallShape
from agentrl.gateway.request import GatewayRequest
from agentrl.tools.base import schema_name

JSON_SCHEMA, STRUCTURAL_TAG = "json_schema", "structural_tag"
"""The sampling parameters of SGLang that hold a grammar, as JSON text."""

Json = dict[str, Any]


def grammar_of(
    request: GatewayRequest, shape: CallShape | None, *, in_thought: bool
) -> dict[str, str] | None:
    """Return the sampling parameter by which the engine samples only what ``request`` demands.

    A demanded call is one call, and nothing but a thought stands before it. ``in_thought``: the prompt opens
    a thought. None if the request demands nothing, or the format's calls have no ``shape``.
    """
    if not request.must_call and request.schema is None:
        return None
    names = request.must_call or tuple(schema_name(tool) for tool in request.tools)
    thinks = shape is not None and shape.tags is not None
    if not names and not thinks:
        return None if in_thought else {JSON_SCHEMA: json.dumps(request.schema)}
    if shape is None or (in_thought and not thinks):
        return None
    answers = [_call(shape, tool) for tool in request.tools if schema_name(tool) in names]
    if not request.must_call:
        answers.append({"type": "json_schema", "json_schema": request.schema})
    answer = _any_of(answers)
    if shape.tags is not None:
        begin = "" if in_thought else shape.tags.open
        thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": shape.tags.close}
        space = [{"type": "const_string", "value": shape.behind_thought}] if shape.behind_thought else []
        thoughtful = {"type": "sequence", "elements": [thought, *space, answer]}
        answer = thoughtful if in_thought else _any_of([thoughtful, answer])
    return {STRUCTURAL_TAG: json.dumps({"type": "structural_tag", "format": answer})}


def _call(shape: CallShape, tool: Json) -> Json:
    schema = tool.get("function", tool).get("parameters") or {"type": "object"}
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": shape.begin(schema_name(tool)), "content": content, "end": shape.end}


def _any_of(formats: list[Json]) -> Json:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}
