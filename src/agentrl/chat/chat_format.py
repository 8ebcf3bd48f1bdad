"""Convert messages to token ids, and sampled ids to a message or to deltas of its text, for one model.

A template writes one placeholder for an image; it becomes as many as the image has tokens. Needs no torch.

A format rewrites messages as its renderer needs them, and keeps or drops earlier thoughts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from agentrl.chat.parsers.parser import REASONING_TAGS, ParsedMessage, ReasoningTags, tool_names
from agentrl.chat.renderer import (
    TRAIN,
    Adaptation,
    ControlTokens,
    Message,
    Renderer,
    TokenizedConversation,
    ToolSchemas,
    in_call_order,
    split_train,
)
from agentrl.documents.images import ImageRef, ImageSpan, has_images, image_refs
from agentrl.errors import ImageError, ModelError, TrajectoryError

_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """How a Qwen-VL model reads images."""

    image_token: int
    """The id of the placeholder."""
    patch: int
    """Pixels along each side of a patch."""
    merge: int
    """Patches along each side of a token."""
    min_pixels: int
    max_pixels: int

    def grid(self, image: ImageRef) -> tuple[int, int, int]:
        """Return (1, rows, columns) in patches of the image, scaled as the model's processor scales it."""
        factor = self.patch * self.merge
        # Round, floor and ceil as Qwen-VL's processor: the engine counts image tokens by it.
        height, width = (max(factor, round(side / factor) * factor) for side in (image.height, image.width))
        if height * width > self.max_pixels:
            scale = math.sqrt(image.height * image.width / self.max_pixels)
            height, width = (
                max(factor, math.floor(side / scale / factor) * factor)
                for side in (image.height, image.width)
            )
        elif height * width < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (image.height * image.width))
            height, width = (
                math.ceil(side * scale / factor) * factor for side in (image.height, image.width)
            )
        return 1, height // self.patch, width // self.patch

    def tokens(self, image: ImageRef) -> int:
        """Return the number of tokens of an image."""
        _, rows, columns = self.grid(image)
        return rows * columns // self.merge**2

    def expand(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return rendered ``ids`` with as many placeholders for each image of ``messages`` as it has tokens.

        Raises TrajectoryError if the template does not write one placeholder for each image.
        """
        counts = self.repeats(ids, messages)
        return [token for token, count in zip(ids, counts, strict=True) for _ in range(count)]

    def repeats(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return how many tokens each of the rendered ``ids`` stands for; see ``expand``."""
        refs = image_refs(messages)
        written = sum(token == self.image_token for token in ids)
        if written != len(refs):
            raise TrajectoryError(
                f"the chat template writes {written} images, and the messages have {len(refs)}",
                hint="give a template that shows images in these roles by --chat_template FILE",
            )
        images = iter(refs)
        return [self.tokens(next(images)) if token == self.image_token else 1 for token in ids]

    def locate(self, ids: Sequence[int], messages: Sequence[Message]) -> tuple[ImageSpan, ...]:
        """Return the tokens of each image of ``messages`` in ``ids``, which ``expand`` returned."""
        spans = []
        index = 0
        for ref in image_refs(messages):
            index = next((i for i in range(index, len(ids)) if ids[i] == self.image_token), len(ids))
            span = ImageSpan(sha256=ref.sha256, start=index, tokens=self.tokens(ref), grid=self.grid(ref))
            index += span.tokens
            if index > len(ids):
                raise TrajectoryError("a prompt has fewer image tokens than its images")
            spans.append(span)
        return tuple(spans)


def read_vision(folder: str | Path, config: Mapping[str, Any]) -> Vision | None:
    """Return how the model in ``folder`` reads images; None for a model that reads text only.

    Raises ModelError for a vision model without the configuration of its image processor.
    """
    if config.get("model_type") not in _TYPES or "vision_config" not in config:
        return None
    for name in _FILES:
        path = Path(folder) / name
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            return _vision(content.get("image_processor", content), config)
    raise ModelError(
        f"{folder} is a vision model without {_FILES[0]}",
        hint="copy the model's folder again, with all files",
    )


def _vision(settings: Mapping[str, Any], config: Mapping[str, Any]) -> Vision:
    size = settings.get("size") or {}
    return Vision(
        image_token=int(config.get("image_token_id", 151655)),
        patch=int(settings.get("patch_size", 14)),
        merge=int(settings.get("merge_size", 2)),
        min_pixels=int(settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56),
        max_pixels=int(settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280),
    )


def require_text_only(messages: Sequence[Message], what: str) -> None:
    """Raise ImageError if messages show an image; ``what`` reads text only."""
    if has_images(messages):
        raise ImageError(
            f"a message shows an image, and {what} reads text only",
            hint="use a vision model (Qwen-VL) with its own chat template, or leave out the images",
        )


__all__ = [
    "TRAIN",
    "ChatFormat",
    "Message",
    "ThinkingRetention",
    "TokenizedConversation",
    "ToolSchemas",
    "split_train",
    "unseen_problem",
    "unseen_tools",
]

ThinkingRetention = Literal["template", "all", "tool_cycle"]
"""Which earlier thoughts stay in the context: as the template keeps them, all, those since the last user
message."""

KeptThoughts = Literal["all", "tool_cycle", "none"]
"""Earlier thoughts that a template renders: all, those since the last user message, none."""

_KEPT = {
    "all": "stay in the context",
    "tool_cycle": "stay until the next user message",
    "none": "are dropped at every turn",
}

UNSEEN_HINT = (
    "give a template that shows tools by --chat_template FILE (assets/chat_templates has one), or describe"
    " the tools in --system_prompt"
)
_SHOWN = 5


@dataclass(frozen=True, eq=False)
class ChatFormat:
    """A renderer, and what ``validate_format`` found that it needs so that no message is lost.

    Where earlier thoughts are dropped, the next prompt is a branch: ``next_prompt`` returns None.
    """

    renderer: Renderer
    adaptation: Adaptation = field(default_factory=Adaptation)
    template_keeps: KeptThoughts = "all"
    retention: ThinkingRetention = "template"
    tool_problems: tuple[str, ...] = ()
    """Why the format cannot be used with tools."""
    skips_cycles: bool = False
    """What follows a generation does not depend on the tool cycle before it, which is not rendered again."""
    skips_tools: bool = False
    """What follows a generation does not depend on the tools, which are not rendered again."""
    vision: Vision | None = None
    """How the format shows images."""

    @property
    def name(self) -> str:
        """Return the name for ``--chat_format``."""
        return self.renderer.name

    @property
    def tokens(self) -> ControlTokens:
        """Return the tokenizer."""
        return self.renderer.tokens

    @property
    def stop_ids(self) -> frozenset[int]:
        """Return the ids at which an engine stops; each of them closes an assistant turn."""
        return self.renderer.stop_ids

    @property
    def call_marks(self) -> tuple[str, ...] | None:
        """Return the texts with which a tool call may begin; None if any text may be one."""
        return self.renderer.call_marks

    @property
    def keeps(self) -> KeptThoughts:
        """Return which earlier thoughts stay in the context."""
        return self.template_keeps if self.retention == "template" else self.retention

    @property
    def description(self) -> str:
        """Return one line: the format, its changes of messages, and whether earlier thoughts stay."""
        thoughts = f"earlier thoughts {_KEPT[self.keeps]}"
        if self.keeps != self.template_keeps:
            thoughts += f" (in the template they {_KEPT[self.template_keeps]})"
        changed = self.adaptation.describe()
        parts = [self.renderer.description, *([f"with {changed}"] if changed else []), thoughts]
        images = [] if self.vision is None else ["with images"]
        return "; ".join([*parts, *images, *(["without tools"] if self.tool_problems else [])])

    @property
    def agreed_settings(self) -> dict[str, str]:
        """Return what all samplers of a run must have in common."""
        settings = {**self.renderer.agreed_settings, "thinking_retention": self.keeps}
        return settings if self.vision is None else {**settings, "images": repr(self.vision)}

    def render(
        self, messages: Sequence[Message], tools: ToolSchemas | None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return a conversation, up to where the assistant continues with ``add_generation_prompt``.

        Raises TrajectoryError for one that cannot be rendered, ImageError for images that are not read.
        """
        adapted = self._adapted(messages)
        ids = self.renderer.render(adapted, tools, add_generation_prompt=add_generation_prompt)
        return self._expanded(ids, messages)

    def next_prompt(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: ToolSchemas | None,
    ) -> list[int] | None:
        """Return the ids between a generation and the next one: prompt, output, *these ids*, next output.

        ``history`` ends with the message that ``output_ids`` were parsed into; ``new_messages`` follow it.
        None if the next prompt drops earlier reasoning and so does not continue this one, or if the renderer
        cannot extend it: render all messages then, as a new branch of the token tree.
        """
        if self.drops_thought(history, new_messages):
            return None
        self._check_images(new_messages)
        new_messages = self._without_dropped(new_messages)
        adapt, count = self.adaptation, len(history)
        # Number calls over the whole conversation: Kimi's ids count them from its beginning.
        whole = adapt.with_ids([*history, *new_messages])
        history, new_messages = whole[:count], whole[count:]
        last = adapt.apply_to_one(history[-1])
        new = adapt.apply(in_call_order([history[-1], *new_messages])[1:])
        shown = None if self.skips_tools else tools

        def extension(before: Sequence[Message]) -> list[int] | None:
            written = [*adapt.apply(before), last]
            return self.renderer.extend(prompt_ids, output_ids, written, new, shown)

        before = without_cycle(history[:-1]) if self.skips_cycles else history[:-1]
        try:
            ids = extension(before)
        except TrajectoryError:
            # Render the tool cycle after all: one conversation has shown that it may be skipped, not all.
            if len(before) == count - 1:
                raise
            ids = extension(history[:-1])
        return None if ids is None else self._expanded(ids, new)

    def parse(
        self, output_ids: Sequence[int], tools: ToolSchemas, prompt_ids: Sequence[int] = ()
    ) -> ParsedMessage:
        """Return the message that was generated after ``prompt_ids``; its ``error`` reports a bad call."""
        return self.renderer.parse(output_ids, tools, prompt_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids with special tokens, without the ids that close the turn."""
        return self.renderer.decode(ids)

    def opened_thought(self, prompt_ids: Sequence[int]) -> ReasoningTags | None:
        """Return the tags of the thought inside which a prompt ends; None outside of thoughts."""
        return next((tags for tags in REASONING_TAGS if self.renderer.opens_thought(prompt_ids, tags)), None)

    def locate_images(self, ids: Sequence[int], messages: Sequence[Message]) -> tuple[ImageSpan, ...]:
        """Return the tokens of each image of ``messages`` in ``ids``, which this format rendered.

        ``messages`` begin with the one whose tool calls the first results answer: results are rendered in the
        order of their calls.
        """
        if self.vision is None or not has_images(messages):
            return ()
        return self.vision.locate(ids, in_call_order(messages))

    def tokenize(self, messages: Sequence[Message], tools: ToolSchemas | None) -> TokenizedConversation:
        """Return a whole conversation, a mask of what the assistant says, and its images, for fine-tuning.

        Assistant messages with ``train: false`` are not in the mask. Raises ValueError or TrajectoryError
        for a conversation whose tokens cannot be attributed.
        """
        adapted = self._adapted(messages)
        plain = self.renderer.tokenize(adapted, tools)
        if self.vision is None or not has_images(adapted):
            return plain
        counts = self.vision.repeats(plain.input_ids.tolist(), adapted)
        ids, trained = np.repeat(plain.input_ids, counts), np.repeat(plain.is_trainable, counts)
        return TokenizedConversation(
            input_ids=ids,
            # Mask images in an assistant's message: their placeholders are never sampled.
            is_trainable=trained & (ids != self.vision.image_token),
            images=self.vision.locate(ids.tolist(), adapted),
        )

    def drops_thought(self, history: Sequence[Message], new_messages: Sequence[Message]) -> bool:
        """Return whether a thought of the last prompt or output is not in the next prompt.

        Earlier ones were dropped before. Arguments: see ``next_prompt``.
        """
        if self.keeps == "none":
            return _has_thought(history[-1])
        if self.keeps == "all" or not any(message.get("role") == "user" for message in new_messages):
            return False
        return any(_has_thought(message) for message in history[_last_question(history) :])

    def _without_dropped(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages without the thoughts that the prompt behind them drops."""
        if self.keeps == "all":
            return messages
        end = len(messages) if self.keeps == "none" else _last_question(messages)
        return [*map(without_thought, messages[:end]), *messages[end:]]

    def _check_images(self, messages: Sequence[Message]) -> None:
        if self.vision is None:
            require_text_only(messages, f"the model (chat format {self.name})")

    def _expanded(self, ids: list[int], messages: Sequence[Message]) -> list[int]:
        return ids if self.vision is None else self.vision.expand(ids, self.adaptation.apply(messages))

    def _adapted(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as the renderer needs them, without thoughts that ``tool_cycle`` drops."""
        self._check_images(messages)
        if self.keeps == "tool_cycle" and self.template_keeps == "all":
            messages = self._without_dropped(messages)
        return self.adaptation.apply(self.adaptation.with_ids(messages))


def _last_question(messages: Sequence[Message]) -> int:
    """Return the position of the last user message; 0 if there is none."""
    indices = (index for index in range(len(messages) - 1, -1, -1) if messages[index].get("role") == "user")
    return next(indices, 0)


def without_cycle(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages up to the last user message, if only assistant and tool messages follow it."""
    question = _last_question(messages)
    after = messages[question + 1 :]
    roles = {message.get("role") for message in after}
    is_cycle = bool(messages) and messages[question].get("role") == "user"
    return messages[: question + 1] if is_cycle and roles <= {"assistant", "tool"} else messages


def _has_thought(message: Message) -> bool:
    return message.get("role") == "assistant" and bool(message.get("reasoning_content"))


def without_thought(message: Message) -> Message:
    """Return the message without its reasoning."""
    return {key: value for key, value in message.items() if key not in ("reasoning_content", "thinking")}


def unseen_tools(chat_format: ChatFormat, prompt: Sequence[int], tools: ToolSchemas) -> list[str]:
    """Return the names of the ``tools`` that do not stand in a prompt: its model cannot know them."""
    text = chat_format.decode(prompt)
    # Search whole words: a tool named `search` would be found inside `web_search`.
    return [
        name for name in tool_names(tools) if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)
    ]


def unseen_problem(chat_format: ChatFormat, prompt: Sequence[int], tools: ToolSchemas) -> str | None:
    """Return which ``tools`` a prompt does not name, and what to do; None if it names all."""
    unseen = unseen_tools(chat_format, prompt, tools)
    if not unseen:
        return None
    more = f" and {len(unseen) - _SHOWN} more" if len(unseen) > _SHOWN else ""
    return (
        f"the prompt does not name the tools {', '.join(unseen[:_SHOWN])}{more}: the chat format"
        f" {chat_format.name} leaves them out, and the model cannot know them; {UNSEEN_HINT}"
    )


_ANY_CALL = tuple("<[{`◁")
"""The first characters of the marks of tool calls and thoughts, over all chat formats."""
_THOUGHTS = tuple(mark for tags in REASONING_TAGS for mark in (tags.open, tags.close))
_UNFINISHED = "\ufffd"
"""The decoded text of an incomplete character."""


class Delta(NamedTuple):
    """A piece of an answer."""

    kind: Literal["reasoning", "content"]
    text: str


class _Marks:
    """Texts to find in a growing text."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, marks)))
        self._begun = frozenset(mark[:length] for mark in marks for length in range(1, len(mark)))
        self._longest = max(map(len, marks))

    def find(self, text: str) -> tuple[int, bool]:
        """Return the index of the first mark, and whether it is whole: the end of ``text`` may begin one."""
        mark = self._pattern.search(text)
        if mark is not None:
            return mark.start(), True
        for index in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[index:] in self._begun:
                return index, False
        return len(text), False


class TextStream:
    """Deltas that are certain to be in the parsed answer.

    From the first text that opens a tool call or a further thought, all is held back: ``finish`` returns what
    the parsed answer has beyond the deltas. So a client never gets text that turns out to be a call.
    """

    def __init__(
        self,
        decoder: ChatFormat,
        prompt_ids: Sequence[int],
        stops: Sequence[str] = (),
        call_marks: Sequence[str] | None = None,
    ) -> None:
        """``call_marks``: how tool calls begin in the chat format; None if that is not known."""
        self._decoder = decoder
        self._ids: list[int] = []
        self._done = self._read = 0
        """Ids before ``_done`` are not decoded again; those before ``_read`` are in ``_text``."""
        self._text = ""
        self._sent: dict[str, str] = {"reasoning": "", "content": ""}
        self._tags = decoder.opened_thought(prompt_ids)
        self._mode: Literal["start", "reasoning", "content", "held"] = (
            "start" if self._tags is None else "reasoning"
        )
        marks = _ANY_CALL if call_marks is None else (*call_marks, *_THOUGHTS)
        self._holds = _Marks((*marks, *stops))
        self.is_broken = False
        """Whether ids that were sent have been replaced: the answer may differ from the deltas."""

    def add(self, start: int, ids: Sequence[int]) -> list[Delta]:
        """Add the ids from index ``start`` on; return the new deltas."""
        if start < len(self._ids):
            self.is_broken = self.is_broken or list(ids) != self._ids[start : start + len(ids)]
            ids = ids[len(self._ids) - start :]
        self._ids.extend(ids)
        if self._mode == "held" or self.is_broken:
            return []
        before = self._decoder.decode(self._ids[self._done : self._read])
        now = self._decoder.decode(self._ids[self._done :])
        if now.endswith(_UNFINISHED) or len(now) < len(before):
            return []
        self._text += now[len(before) :]
        self._done, self._read = self._read, len(self._ids)
        return self._split()

    def finish(self, reasoning: str, content: str) -> list[Delta] | None:
        """Return the deltas that complete the answer; None if the deltas sent do not begin it."""
        final = {"reasoning": reasoning, "content": content}
        rest: list[Delta] = []
        for kind, sent in self._sent.items():
            whole = final[kind]
            if not whole.startswith(sent):
                return None
            if whole[len(sent) :]:
                rest.append(Delta(kind, whole[len(sent) :]))  # type: ignore[arg-type]
        return rest

    def _split(self) -> list[Delta]:
        deltas: list[Delta] = []
        if self._mode == "start":
            self._start()
        if self._mode == "reasoning" and self._tags is not None:
            deltas += self._thought(self._tags)
        if self._mode == "content":
            deltas += self._content()
        return deltas

    def _start(self) -> None:
        """Decide whether the answer begins with a thought."""
        text = self._text.lstrip()
        if not text:
            return
        for tags in REASONING_TAGS:
            if text.startswith(tags.open):
                self._tags, self._mode, self._text = tags, "reasoning", text[len(tags.open) :]
                return
            if tags.open.startswith(text):
                return
        self._mode = "content"

    def _thought(self, tags: ReasoningTags) -> list[Delta]:
        thought, close, rest = self._text.partition(tags.close)
        if close:
            self._mode, self._text = "content", rest
            return self._send("reasoning", thought, is_last=True)
        kept = next((n for n in range(len(tags.close) - 1, 0, -1) if thought.endswith(tags.close[:n])), 0)
        self._text = thought[len(thought) - kept :] if kept else ""
        return self._send_keeping_space("reasoning", thought[: len(thought) - kept])

    def _content(self) -> list[Delta]:
        index, is_whole = self._holds.find(self._text)
        text, self._text = self._text[:index], self._text[index:]
        if is_whole:
            self._mode = "held"
        return self._send_keeping_space("content", text)

    def _send_keeping_space(self, kind: Literal["reasoning", "content"], text: str) -> list[Delta]:
        """Send text, but hold white space at its end, which the parser may strip."""
        end = len(text.rstrip())
        if self._mode != "held":
            self._text = text[end:] + self._text
        return self._send(kind, text[:end])

    def _send(
        self, kind: Literal["reasoning", "content"], text: str, *, is_last: bool = False
    ) -> list[Delta]:
        if is_last:
            text = text.rstrip()
        if not self._sent[kind]:
            text = text.lstrip()
        if not text:
            return []
        self._sent[kind] += text
        return [Delta(kind, text)]
