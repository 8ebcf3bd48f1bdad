"""Make the renderers of the ``renderers`` package for a model's tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from agentrl.chat.control_tokens import ControlTokens
from agentrl.chat.harmony_vocabulary import harmony_vocabulary
from agentrl.chat.model_folder import ChatFiles
from agentrl.chat.parsers import ToolCallParser, get_parser, tags_in
from agentrl.chat.parsers.detect import parser_of_template
from agentrl.chat.renderer_format import RendererFormat
from agentrl.chat.renderer_tokenizer import RendererTokenizer
from agentrl.errors import ConfigError

_HARMONY = "gpt-oss"

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
    "gpt_oss": (_HARMONY,),
    "llama": ("llama-3",),
    "deepseek_v3": ("deepseek-v3", "deepseek-r1"),
    "deepseek_v4": ("deepseek-v4",),
    "kimi_k2": ("kimi-k2",),
    "kimi_k25": ("kimi-k2.5",),
    "minimax": ("minimax-m2",),
    "inkling": ("inkling",),
}
"""``model_type`` → renderers to try if the model's own template is missing or loses messages."""


def renderer_names() -> list[str]:
    """Return the names of all renderers, the most common families first."""
    return list(_TOKENS)


def names_for_tokenizer(tokens: ControlTokens) -> list[str]:
    """Return the renderers whose control tokens the tokenizer has."""
    return [name for name, needed in _TOKENS.items() if all(tokens.token_id(t) is not None for t in needed)]


def names_of_type(model_type: str) -> tuple[str, ...]:
    """Return the renderers of a ``model_type`` of config.json; of a model without one, none."""
    known = re.sub(r"_(text|moe|vl)$", "", model_type.lower())
    return next((names for start, names in _FAMILIES.items() if known.startswith(start)), ())


def make_renderer_format(
    name: str,
    files: ChatFiles,
    tokens: ControlTokens,
    template_kwargs: Mapping[str, Any],
    parser: ToolCallParser | None,
) -> RendererFormat:
    """Return the format of one renderer.

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
    from renderers import base, config_from_name, create_renderer

    eos = tokens.token_id(files.special_tokens.get("eos_token", ""))
    tokenizer = RendererTokenizer(tokens, files.template, eos)
    try:
        with harmony_vocabulary(files.tokenizer) if name == _HARMONY else nullcontext():
            config = base.merge_chat_template_kwargs(config_from_name(name), dict(template_kwargs))
            renderer = create_renderer(tokenizer, config)
            keeping = config.model_copy(update={"thinking_retention": "all"})
            extender = create_renderer(tokenizer, keeping)
    except Exception as error:
        raise ConfigError(
            f"the chat format {name} does not fit this model: {error}",
            hint="give another by --chat_format, or other --chat_template_kwargs",
        ) from error
    template = files.template or ""
    has_reader = files.template is not None and name != _HARMONY
    return RendererFormat(
        renderer,
        extender,
        tokens,
        stop_ids=files.stop_ids,
        parser=parser,
        reader=get_parser(parser_of_template(template)) if has_reader else None,
        tags=tags_in(template),
    )
