"""Render by the ``renderers`` package, which knows model families by their token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from agentrl.chat.control_tokens import ControlTokens
from agentrl.chat.model_folder import ChatFiles, harmony_vocabulary
from agentrl.chat.parsers.base import ParsedMessage, ToolCall, ToolCallParser, shown
from agentrl.chat.parsers.marked import MarkedParser
from agentrl.chat.parsers.reasoning import (
    THINK,
    ReasoningTags,
    SplitText,
    parse_split,
    split_reasoning,
    tags_in,
)
from agentrl.chat.renderer import Message, Renderer, TokenizedConversation, ToolSchemas, split_train
from agentrl.errors import ConfigError, TrajectoryError

HARMONY = "gpt-oss"
"""Its own encoder keeps text as text, so its messages are not marked by ``ControlTokens.protect``."""


class FamilyRenderer(Renderer):
    """A renderer of the package; a second instance, which keeps all reasoning, extends prompts."""

    def __init__(
        self,
        renderer: Any,
        extender: Any,
        tokens: ControlTokens,
        *,
        stop_ids: Iterable[int] = (),
        parser: ToolCallParser | None = None,
        tags: ReasoningTags = THINK,
    ) -> None:
        """``parser`` reads calls in place of the package; ``stop_ids`` are further ids that close a turn."""
        import renderers

        super().__init__(tokens, [*renderer.get_stop_token_ids(), *stop_ids])
        self.name = str(renderer.config.name)
        self.description = f"{self.name} of renderers {renderers.__version__}"
        self.agreed_settings = {"chat_format": f"{self.description}: {renderer.config!r}"}
        self._renderer = renderer
        self._extender = extender
        self._parser = parser
        self._tags = tags
        if isinstance(parser, MarkedParser):
            self.call_marks = (*parser.marks, "<|", "<｜")

    def with_parser(self, parser: ToolCallParser) -> FamilyRenderer:
        """Return the same renderer whose tool calls ``parser`` reads."""
        return FamilyRenderer(
            self._renderer,
            self._extender,
            self.tokens,
            stop_ids=self.stop_ids,
            parser=parser,
            tags=self._tags,
        )

    def render(
        self, messages: Sequence[Message], tools: ToolSchemas | None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        protected, schemas = self._protected(messages, tools)
        with self._naming(messages):
            rendered = self._renderer.render(
                protected, tools=schemas, add_generation_prompt=add_generation_prompt
            )
        return list(rendered.token_ids)

    def extend(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: ToolSchemas | None,
    ) -> list[int] | None:
        before = [*prompt_ids, *output_ids]
        added, schemas = self._protected(new_messages, tools)
        with self._naming(new_messages):
            extended = self._extender.bridge_to_next_turn(
                list(prompt_ids), list(output_ids), added, tools=schemas
            )
        if extended is None or list(extended.token_ids[: len(before)]) != before:
            return None
        return list(extended.token_ids[len(before) :])

    def parse(
        self, output_ids: Sequence[int], tools: ToolSchemas, prompt_ids: Sequence[int] = ()
    ) -> ParsedMessage:
        """Return the message in generated ids.

        Why not always the package's parser? It reads no call that the end of the text closes, none behind
        Llama's ``<|python_tag|>``, no list of calls, and converts fewer arguments by the tool's schema.
        """
        text = self.decode(output_ids)
        if self.name == HARMONY:
            split = SplitText("", text)  # it has channels instead of tags
        else:
            opened = self.opens_thought(prompt_ids, self._tags)
            split = split_reasoning(text, self._tags, opened=opened)
        if self._parser is None and not split.is_open:
            return self._parse_by_package(text, output_ids, tools, prompt_ids)
        if self._parser is None or self._quotes_marks(split.rest, output_ids):
            return ParsedMessage(split.rest.strip(), reasoning=split.reasoning)
        return parse_split(self._parser, split, tools)

    def _parse_by_package(
        self, text: str, output_ids: Sequence[int], tools: ToolSchemas, prompt_ids: Sequence[int]
    ) -> ParsedMessage:
        parsed = self._renderer.parse_response(
            list(output_ids), tools=list(tools) or None, prompt_ids=list(prompt_ids)
        )
        reasoning = str(parsed.reasoning_content or "")
        calls: list[ToolCall] = []
        error = None
        for call in parsed.tool_calls:
            problem = _problem(call)
            if problem is None:
                calls.append(ToolCall(str(call.name), dict(_arguments(call.arguments) or {})))
            else:
                error = error or problem
        content = str(parsed.content or "")
        if error is not None:
            content = text.partition(reasoning)[2] if reasoning and reasoning in text else text
        return ParsedMessage(content.strip(), tuple(calls), error, reasoning)

    def _quotes_marks(self, text: str, output_ids: Sequence[int]) -> bool:
        """Return whether ordinary tokens spell the marks of calls in ``text``: a quotation and no call."""
        opens = self._parser.opens if isinstance(self._parser, MarkedParser) else ()
        ids = [self.tokens.token_id(mark) for mark in opens if mark in text]
        return bool(ids) and all(token is not None and token not in output_ids for token in ids)

    def tokenize(self, messages: Sequence[Message], tools: ToolSchemas | None) -> TokenizedConversation:
        from renderers import build_training_sample

        plain, flags = split_train(messages)
        protected, schemas = self._protected(plain, tools)
        with self._naming(messages):
            sample = build_training_sample(
                self._renderer,
                protected,
                role_to_mask=lambda message: message.get("role") == "assistant",
                tools=schemas,
                ensure_final_stop=True,
                message_loss_mask=flags,
            )
        return TokenizedConversation(
            np.asarray(sample.token_ids, np.int64), np.asarray(sample.loss_mask, np.bool_)
        )

    def _protected(
        self, messages: Sequence[Message], tools: ToolSchemas | None
    ) -> tuple[list[Any], list[Any] | None]:
        if self.name == HARMONY:
            return list(messages), list(tools) if tools else None
        return self.tokens.protect(messages), self.tokens.protect_tools(tools)

    @contextmanager
    def _naming(self, messages: Sequence[Message]) -> Iterator[None]:
        """Raise TrajectoryError with the roles of ``messages`` for any error of the package."""
        try:
            yield
        except Exception as error:
            roles = " ".join(str(message.get("role")) for message in messages)
            raise TrajectoryError(
                f"the chat format {self.name} cannot render the roles [{roles}]: {error}",
                hint="give another by --chat_format",
            ) from error


def _problem(call: Any) -> str | None:
    """Return the problem of a call that the renderer found; None if it is well-formed."""
    status = str(call.status)
    if status == "unknown_tool" or (status == "ok" and _arguments(call.arguments) is not None):
        return None
    what = "its arguments are not a JSON object" if status == "ok" else status.replace("_", " ")
    return f"the tool call cannot be read ({what}): {shown(call.raw)}"


def _arguments(value: Any) -> dict[str, Any] | None:
    """Return arguments as an object; None if they are not an object."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except ValueError:
            return None
    return {} if value is None else value if isinstance(value, dict) else None


_TOKENS: dict[str, tuple[str, ...]] = {
    "qwen3": ("<|im_start|>", "<tool_response>", "</think>"),
    "qwen3.5": ("<|im_start|>", "<tool_response>", "<think>", "<|vision_start|>"),
    "qwen3.6": ("<|im_start|>", "<tool_response>", "<think>", "<|vision_start|>"),
    "qwen3.8": ("<|im_start|>", "<tool_response>", "<think>", "<|vision_start|>"),
    "qwen3-vl": ("<|im_start|>", "<tool_response>", "</think>", "<|vision_start|>"),
    "prime-qwen3": ("<|im_start|>", "<tool_response>", "<think>"),
    "nemotron-3": ("<|im_start|>", "<tool_response>", "<think>"),
    "nemotron-3-ultra": ("<|im_start|>", "<tool_response>", "<think>"),
    "nemotron-3.5": ("<|im_start|>", "<tool_response>", "<think>"),
    "deepseek-v3": ("<｜User｜>", "<｜tool▁sep｜>"),
    "deepseek-r1": ("<｜User｜>", "<｜tool▁sep｜>"),
    "deepseek-v4": ("<｜User｜>", "｜DSML｜"),
    "gemma4": ("<|turn>", "<|tool_response>"),
    "glm-4.5": ("[gMASK]", "<arg_key>"),
    "glm-5": ("[gMASK]", "<arg_key>", "<tool_response>"),
    "glm-5.1": ("[gMASK]", "<arg_key>", "<tool_response>"),
    "glm-5.3": ("[gMASK]", "<arg_key>", "<tool_response>"),
    "gpt-oss": ("<|channel|>", "<|constrain|>"),
    "hy3": ("<｜hy_eos:opensource｜>",),
    "inkling": ("<|content_invoke_tool_json|>",),
    "kimi-k2": ("<|im_middle|>", "<|tool_call_begin|>"),
    "kimi-k2.5": ("<|im_middle|>", "<|tool_call_begin|>", "<|media_pad|>"),
    "laguna-m.1": ("〈|EOS|〉",),
    "laguna-s-2.1": ("〈|EOS|〉",),
    "laguna-xs-2.1": ("〈|EOS|〉",),
    "laguna-xs.2": ("〈|EOS|〉",),
    "llama-3": ("<|start_header_id|>", "<|eom_id|>"),
    "minimax-m2": ("<minimax:tool_call>",),
}
"""Renderer → control tokens that every tokenizer of its family has."""

_FAMILIES = {
    "gemma4": ("gemma4",),
    "gpt_oss": (HARMONY,),
    "llama": ("llama-3",),
    "deepseek_v3": ("deepseek-v3", "deepseek-r1"),
    "deepseek_v4": ("deepseek-v4",),
    "kimi_k2": ("kimi-k2",),
    "kimi_k25": ("kimi-k2.5",),
    "minimax": ("minimax-m2",),
    "inkling": ("inkling",),
}
"""``model_type`` → renderers to try if the model's own template is missing or loses messages."""


def names_for_tokenizer(tokens: ControlTokens) -> list[str]:
    """Return the renderers whose control tokens the tokenizer has."""
    return [name for name, needed in _TOKENS.items() if all(tokens.token_id(t) is not None for t in needed)]


def names_of_type(model_type: str) -> tuple[str, ...]:
    """Return the renderers of a ``model_type`` of config.json; of a model without one, none."""
    known = re.sub(r"_(text|moe|vl)$", "", model_type.lower())
    return next((names for start, names in _FAMILIES.items() if known.startswith(start)), ())


def make_family_renderer(
    name: str,
    files: ChatFiles,
    tokens: ControlTokens,
    template_kwargs: Mapping[str, Any],
    parser: ToolCallParser | None,
) -> FamilyRenderer:
    """Return one renderer.

    Raises ConfigError for a name, a tokenizer or template arguments that do not fit.
    """
    if name not in _TOKENS:
        raise ConfigError(
            f"unknown chat format {name!r}", hint=f"choose auto, template, {', '.join(sorted(_TOKENS))}"
        )
    missing = [token for token in _TOKENS[name] if tokens.token_id(token) is None]
    if missing:
        raise ConfigError(
            f"the chat format {name} does not fit this model: its tokenizer has no {missing[0]}",
            hint="give another by --chat_format",
        )
    renderer, extender = _of_package(name, files, tokens, template_kwargs)
    tags = tags_in(files.template or "")
    return FamilyRenderer(renderer, extender, tokens, stop_ids=files.stop_ids, parser=parser, tags=tags)


def _of_package(
    name: str, files: ChatFiles, tokens: ControlTokens, template_kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Return the package's renderer, and the one that keeps all reasoning. Raises ConfigError."""
    from renderers import base, config_from_name, create_renderer

    eos = tokens.token_id(files.special_tokens.get("eos_token", ""))
    tokenizer = _Tokenizer(tokens, files.template, eos)
    try:
        with harmony_vocabulary(files.tokenizer) if name == HARMONY else nullcontext():
            config = base.merge_chat_template_kwargs(config_from_name(name), dict(template_kwargs))
            keeping = config.model_copy(update={"thinking_retention": "all"})
            return create_renderer(tokenizer, config), create_renderer(tokenizer, keeping)
    except Exception as error:
        raise ConfigError(
            f"the chat format {name} does not fit this model: {error}",
            hint="give another by --chat_format, or other --chat_template_kwargs",
        ) from error


class _Tokenizer:
    """The tokenizer that ``renderers`` expects. Text that ``ControlTokens.protect`` marked stays text."""

    name_or_path = ""
    unk_token_id: int | None = None

    def __init__(self, tokens: ControlTokens, chat_template: str | None, eos_token_id: int | None) -> None:
        """``chat_template`` is read by renderers whose models differ in a detail of it."""
        self._tokens = tokens
        self.chat_template = chat_template
        self.eos_token_id = eos_token_id

    def __call__(self, text: str, **options: Any) -> dict[str, list[Any]]:
        pairs = self._tokens.encode_with_offsets(text)
        return {"input_ids": [token for token, _ in pairs], "offset_mapping": [span for _, span in pairs]}

    def encode(self, text: str, *_: Any, **options: Any) -> list[int]:
        return self._tokens.encode(text)

    def decode(self, token_ids: int | Sequence[int], *_: Any, **options: Any) -> str:
        return self._tokens.decode([token_ids] if isinstance(token_ids, int) else token_ids)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if isinstance(tokens, str):
            return self._tokens.token_id(tokens)
        return [self._tokens.token_id(token) for token in tokens]
