"""Choose and open the chat format of a model's folder: by its configuration, tokenizer and template."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.chat.chat_format import ChatFormat, read_vision
from agentrl.chat.model_folder import ChatFiles, harmony_vocabulary, read_chat_files
from agentrl.chat.parsers.marked import MarkedParser
from agentrl.chat.parsers.parser import (
    PARSERS,
    THINK,
    ParsedMessage,
    ReasoningTags,
    SplitText,
    ToolCall,
    ToolCallParser,
    get_parser,
    parse_split,
    parser_of_template,
    shown,
    split_reasoning,
    tags_in,
)
from agentrl.chat.renderer import (
    ChatTemplate,
    ControlTokens,
    Message,
    Renderer,
    TemplateRenderer,
    TokenizedConversation,
    ToolSchemas,
    split_train,
)
from agentrl.chat.validate_format import CONVERSATION, ENDS, TOOLS, reads_its_calls, validate_format
from agentrl.config.schema import ModelConfig
from agentrl.errors import ConfigError, ModelError, TrajectoryError

logger = logging.getLogger(__name__)


def open_chat_format(
    folder: str | Path, model: ModelConfig, parser: str | None = None, *, with_tools: bool = False
) -> ChatFormat:
    """Open and check the chat format of the model in ``folder``; ``parser`` is ``--tool_call_parser``.

    ``with_tools``: tools will be offered. Raises ModelError for a folder without a tokenizer or a template,
    and for a format that loses or renames a message.
    """
    files = read_chat_files(folder, model.chat_template)
    vision = read_vision(folder, files.config)
    opener = _Opener(
        str(folder), files, ControlTokens(files.tokenizer, files.template), _template_kwargs(model), model,
        parser, reads_images=vision is not None,
    )  # fmt: skip
    opened = opener.open()
    if isinstance(opened.renderer, TemplateRenderer):
        opened = replace(opened, vision=vision)
    if with_tools and opened.tool_problems:
        raise ModelError(
            f"the chat format of {folder} ({opened.description}) {opened.tool_problems[0]}",
            hint="give another by --chat_format, or a template for tools by --chat_template FILE",
        )
    logger.info("chat format: %s", opened.description)
    return opened


@dataclass(frozen=True)
class _Opener:
    folder: str
    files: ChatFiles
    tokens: ControlTokens
    kwargs: Mapping[str, Any]
    model: ModelConfig
    parser: str | None
    reads_images: bool
    """Then only the template is chosen: it shows images."""

    def open(self) -> ChatFormat:
        name = self.model.chat_format
        if name == "auto":
            return self._choose()
        if name == "template":
            return self._validate_template(self._template())
        return self._validate_family(self._of_family(name))

    def _choose(self) -> ChatFormat:
        """Return the renderer with the template's ids, else the template, else the family's renderer.

        A template that another parser reads than the one of its marks is the last choice: it writes calls
        as its family does not.
        """
        refusal: ModelError | None = None
        by_template = template = None
        try:
            template = self._template()
            if self.reads_images:
                return self._validate_template(template)
            for candidate in self._candidates(names_for_tokenizer(self.tokens)):
                if (equal := self._same_as_template(candidate, template)) is not None:
                    return equal
            by_template = self._validate_template(template)
            if self._is_read_as_marked(by_template):
                return by_template
        except ModelError as error:
            refusal = error
        for candidate in self._candidates(names_of_type(str(self.files.config.get("model_type", "")))):
            with suppress(ModelError):
                of_family = self._validate_family(candidate)
                if not of_family.tool_problems and _begins_alike(candidate, template):
                    return of_family
        if by_template is None:
            assert refusal is not None
            raise refusal
        return by_template

    def _is_read_as_marked(self, opened: ChatFormat) -> bool:
        """Return whether the parser that the template's marks name reads the calls in it."""
        if opened.tool_problems or opened.adaptation.calls_as_text:
            return False
        renderer = opened.renderer
        return self.parser is not None or (
            isinstance(renderer, TemplateRenderer)
            and renderer.parser_name == parser_of_template(renderer.template.source)
        )

    def _same_as_template(self, candidate: FamilyRenderer, template: TemplateRenderer) -> ChatFormat | None:
        """Return the candidate's format if it renders the conversation as the template does."""
        first = CONVERSATION[: ENDS[0]]
        try:
            if candidate.render(first, None) != template.render(first, None):
                return None
            opened = self._validate_family(candidate)
            for end in ENDS:
                messages = opened.adaptation.apply(CONVERSATION[:end])
                if candidate.render(messages, TOOLS) != template.render(messages, TOOLS):
                    return None
        except (ModelError, TrajectoryError):
            return None
        is_read = self.parser is not None or reads_its_calls(opened.renderer, opened.adaptation)
        return opened if is_read and not opened.tool_problems else None

    def _validate_template(self, template: TemplateRenderer) -> ChatFormat:
        """Validate the template; without ``--tool_call_parser``, find the parser that reads its calls."""
        opened = self._validate(template)
        if self.parser is not None or opened.tool_problems or opened.adaptation.calls_as_text:
            return opened
        likely = parser_of_template(template.template.source)
        for name in sorted(PARSERS.names(), key=lambda name: name != likely):
            candidate = template if name == template.parser_name else template.with_parser(name)
            if reads_its_calls(candidate, opened.adaptation):
                return replace(opened, renderer=candidate)
        problem = "writes tool calls that no parser reads; give --tool_call_parser"
        return replace(opened, tool_problems=(problem,))

    def _validate_family(self, renderer: FamilyRenderer) -> ChatFormat:
        """Validate a family's renderer; the text parser of the template reads its calls, if it can."""
        opened = self._validate(renderer)
        marks = self.files.template
        if (
            self.parser is None
            and marks is not None
            and renderer.name != HARMONY
            and not opened.tool_problems
        ):
            by_text = renderer.with_parser(get_parser(parser_of_template(marks)))
            if reads_its_calls(by_text, opened.adaptation):
                return replace(opened, renderer=by_text)
        return opened

    def _candidates(self, names: Iterable[str]) -> Iterator[FamilyRenderer]:
        for name in names:
            with suppress(ConfigError):
                yield self._of_family(name)

    def _of_family(self, name: str) -> FamilyRenderer:
        parser: ToolCallParser | None = None if self.parser is None else get_parser(self.parser)
        return make_family_renderer(name, self.files, self.tokens, self.kwargs, parser)

    def _template(self) -> TemplateRenderer:
        if self.files.template is None:
            raise ModelError(
                f"{self.folder} has no chat template",
                hint="give one by --chat_template FILE; see assets/chat_templates for examples",
            )
        template = ChatTemplate(self.files.template, self.files.special_tokens, self.kwargs)
        parser = self.parser or parser_of_template(template.source)
        return TemplateRenderer(template, self.tokens, self.files.stop_ids, parser)

    def _validate(self, renderer: Renderer) -> ChatFormat:
        return validate_format(renderer, self.model.thinking_retention, tags_in(self.files.template or ""))


def _begins_alike(candidate: FamilyRenderer, template: TemplateRenderer | None) -> bool:
    """Return whether a first prompt is the template's, or continues it: a thought opened there stays open.

    White space is not compared: gpt-oss's template and its encoder differ in two line breaks.
    """
    first = CONVERSATION[: ENDS[0]]
    try:
        theirs = "" if template is None else template.decode(template.render(first, None))
    except TrajectoryError:
        return True
    ours = candidate.decode(candidate.render(first, None))
    return "".join(ours.split()).startswith("".join(theirs.split()))


def _template_kwargs(model: ModelConfig) -> dict[str, Any]:
    try:
        kwargs = json.loads(model.chat_template_kwargs)
    except ValueError as error:
        raise ConfigError(
            f"--chat_template_kwargs is not JSON: {error}", hint="give '{\"enable_thinking\": false}'"
        ) from error
    if not isinstance(kwargs, dict):
        raise ConfigError(
            f"--chat_template_kwargs is not a JSON object: {model.chat_template_kwargs}",
            hint="give '{\"enable_thinking\": false}'",
        )
    return kwargs


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
        return self._rendered(self._renderer, messages, tools, add_generation_prompt=add_generation_prompt)

    def extend(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: ToolSchemas | None,
    ) -> list[int] | None:
        # The package extends prompts up to an answer of the assistant, which a client may send changed.
        first = list(takewhile(lambda message: message["role"] != "assistant", new_messages))
        before = [*prompt_ids, *output_ids]
        added, schemas = self._protected(first, tools)
        with self._naming(first):
            extended = self._extender.bridge_to_next_turn(
                list(prompt_ids), list(output_ids), added, tools=schemas
            )
        if extended is None or list(extended.token_ids[: len(before)]) != before:
            return None
        ids = list(extended.token_ids[len(before) :])
        if len(first) == len(new_messages):
            return ids
        # Go on as the rendered conversation does where it leaves the one that ends before that answer.
        asked, whole = (
            self._rendered(self._extender, [*history, *new], tools) for new in (first, new_messages)
        )
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(asked, whole, strict=False)))
        left = len(ids) - len(asked[shared:])
        return [*ids[:left], *whole[shared:]] if left >= 0 and ids[left:] == asked[shared:] else None

    def _rendered(
        self,
        renderer: Any,
        messages: Sequence[Message],
        tools: ToolSchemas | None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        protected, schemas = self._protected(messages, tools)
        with self._naming(messages):
            rendered = renderer.render(protected, tools=schemas, add_generation_prompt=add_generation_prompt)
        return list(rendered.token_ids)

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
