"""Find the text that a chat format writes around the arguments of a tool call, by rendering one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentrl.chat.chat_format import ChatFormat, Message
from agentrl.chat.parsers.reasoning import REASONING_TAGS, ReasoningTags
from agentrl.errors import TrajectoryError

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
_CALL = {"id": "sample000", "type": "function", "function": {"name": _NAME, "arguments": {_FIELD: _VALUE}}}


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
