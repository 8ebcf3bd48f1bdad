"""What a request demands of its answer: the message that is stored, the answer that is sent, the grammar."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from jsonschema.exceptions import best_match
from referencing.exceptions import Unresolvable

from agentrl.chat.chat_format import ChatFormat, Message
from agentrl.chat.parsers.arguments import CHECK_SECONDS, validator_of
from agentrl.chat.parsers.base import CallSyntaxError, ParsedMessage, load_json
from agentrl.chat.parsers.reasoning import REASONING_TAGS, ReasoningTags
from agentrl.concurrency import within_cpu
from agentrl.documents.base import replace_surrogates
from agentrl.documents.gateway import GatewayCall
from agentrl.documents.model_call import DispatchedSamplingTask, unpack_floats, unpack_ids
from agentrl.errors import TrajectoryError
from agentrl.gateway.request import Answer, AnsweredToolCall, GatewayRequest
from agentrl.inference.engine import Generation
from agentrl.rollout.model_call import message_of
from agentrl.tools.base import schema_name

_ID_DIGITS = 7
"""Some chat formats allow tool-call ids of 9 characters only: these and two for the index."""
_NAME, _FIELD, _VALUE, _THOUGHT = "sampleTool", "sampleField", 7301, "sampleThought"
_ARGUMENTS = re.compile(rf'\{{\s*"{_FIELD}"\s*:\s*{_VALUE}\s*\}}')
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A sample.",
        "parameters": {"type": "object", "properties": {_FIELD: {"type": "integer"}}, "required": [_FIELD]},
    },
}
_QUESTION: Message = {"role": "user", "content": "Call the tool."}
_CALL = {
    "id": "sample000",
    "type": "function",
    "function": {"name": _NAME, "arguments": {_FIELD: _VALUE}},
}


@dataclass(frozen=True, slots=True)
class CallShape:
    """The texts around the JSON arguments of a call, and those around a thought if the model may think.

    ``behind_thought`` stands between a closed thought and the call.
    """

    before_name: str
    before_arguments: str
    end: str
    tags: ReasoningTags | None
    behind_thought: str

    def begin(self, name: str) -> str:
        """Return the text before the arguments of a call of ``name``."""
        return f"{self.before_name}{name}{self.before_arguments}"


def answer_of(
    call: DispatchedSamplingTask, request: GatewayRequest, begun: GatewayCall, chat_format: ChatFormat
) -> Answer:
    """Return the answer that a model call holds: the same for every retry."""
    calls = tuple(
        AnsweredToolCall(
            id=item["id"],
            name=item["function"]["name"],
            arguments=json.dumps(item["function"]["arguments"], ensure_ascii=False),
        )
        for item in call.message.get("tool_calls") or ()
    )
    stopped = call.response.get("stop_sequence")
    reason = "length" if call.finish_reason == "length" else "tool_calls" if calls else "stop"
    logprobs = None
    if request.logprobs:
        ids, values = unpack_ids(call.output_ids).tolist(), unpack_floats(call.logprobs).tolist()
        texts = (chat_format.decode([token]) for token in ids)
        logprobs = tuple(zip(texts, values, strict=True))
    return Answer(
        id=begun.answer_id,
        created=int(begun.created_at.timestamp()),
        model=request.model,
        content=call.response.get("content") or "",
        reasoning=call.response.get("reasoning_content") or "",
        tool_calls=calls,
        finish_reason="stop_sequence" if stopped and reason == "stop" else reason,
        stop_sequence=stopped,
        prompt_tokens=call.prompt_tokens,
        generated_tokens=call.generated_tokens,
        cached_tokens=call.cached_tokens,
        logprobs=logprobs,
        left_out=request.left_out,
    )


def unmet(parsed: ParsedMessage, request: GatewayRequest) -> str | None:
    """Return what a parsed answer lacks of what the request demands; None if it has all."""
    names = [call.name for call in parsed.tool_calls]
    if request.no_calls and names:
        return f"a call of {names[0]}, and the request allows no tool call"
    if request.must_call and (not names or not set(names) <= set(request.must_call)):
        called = f"a call of {', '.join(names)}" if names else "no tool call"
        return f"{called}, and the request demands one of {', '.join(request.must_call)}"
    if request.schema is None or names:
        return None
    try:
        validator, value = validator_of(request.schema), load_json(parsed.content)
        problem = within_cpu(CHECK_SECONDS, lambda: best_match(validator.iter_errors(value)))
    except (CallSyntaxError, Unresolvable, RecursionError) as error:
        return f"the answer is not of the JSON schema: {error}"
    return None if problem is None else f"the answer is not of the JSON schema: {problem.message}"


def response_of(
    parsed: ParsedMessage,
    request: GatewayRequest,
    generation: Generation,
    call: GatewayCall,
    chat_format: ChatFormat,
) -> tuple[Message, str | None]:
    """Return the assistant's message and the problem of its format.

    A malformed call stays readable as text.
    """
    calls, error = parsed.tool_calls, parsed.error
    if generation.finish_reason != "length" and (problem := unmet(parsed, request)) is not None:
        error = error or problem
    if request.no_calls:
        calls = ()
    if request.one_call and len(calls) > 1:
        error = error or f"{len(calls)} tool calls, and the request allows one: the first is answered"
        calls = calls[:1]
    content = parsed.content
    if not content and not calls and not parsed.reasoning:
        content = chat_format.decode(generation.output_ids).strip()
    stop = min((s for s in request.stop if s in content), key=content.index, default=None)
    if stop is not None:
        content = content[: content.index(stop)]
    message = message_of(replace(parsed, content=content, tool_calls=calls), call.answer_id[:_ID_DIGITS])
    if stop is not None:
        message["stop_sequence"] = stop
    cleaned: Message = replace_surrogates(message)
    return cleaned, replace_surrogates(error)


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


def call_shape(chat_format: ChatFormat) -> CallShape | None:
    """Return the shape of the format's tool calls; None unless they hold their arguments as one JSON object.

    The format must read the rendered call back.
    """
    text = _rendered(chat_format, {"content": "", "tool_calls": [_CALL]})
    thinking = _rendered(chat_format, {"content": "", "reasoning_content": _THOUGHT, "tool_calls": [_CALL]})
    if text is None:
        return None
    tags = next((tags for tags in REASONING_TAGS if _closes(thinking or "", tags)), None)
    between = ""
    if thinking is not None and tags is not None:
        behind = thinking[thinking.index(tags.close, thinking.index(_THOUGHT)) + len(tags.close) :]
        between = behind[: len(behind) - len(behind.lstrip())]
        text = text[text.rfind(tags.close) + len(tags.close) :] if tags.close in text else text
    text = text.lstrip()
    arguments = _ARGUMENTS.search(text)
    if arguments is None or text.count(_NAME) != 1 or text.index(_NAME) > arguments.start():
        return None
    before, behind = text[: arguments.start()].split(_NAME)
    return CallShape(before, behind, text[arguments.end() :].rstrip(), tags, between)


def _closes(text: str, tags: ReasoningTags) -> bool:
    return _THOUGHT in text and text[text.index(_THOUGHT) + len(_THOUGHT) :].lstrip().startswith(tags.close)


def _rendered(chat_format: ChatFormat, message: Message) -> str | None:
    """Return the text of an assistant's message, if the format reads its call back."""
    try:
        whole = chat_format.tokenize([_QUESTION, {"role": "assistant", **message}], [_TOOL])
        ids = whole.input_ids[whole.is_trainable].tolist()
        parsed = chat_format.parse(ids, [_TOOL], chat_format.render([_QUESTION], [_TOOL]))
    except (TrajectoryError, ValueError):
        return None
    calls = [(call.name, call.arguments) for call in parsed.tool_calls]
    is_read = parsed.error is None and calls == [(_NAME, {_FIELD: _VALUE})]
    return chat_format.decode(ids) if is_read else None
