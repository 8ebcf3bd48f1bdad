"""Make the renderers of the ``renderers`` package for a model's tokenizer, without transformers."""

from __future__ import annotations

import base64
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentrl.chat.control_tokens import ControlTokens
from agentrl.chat.family_renderer import HARMONY, FamilyRenderer
from agentrl.chat.model_folder import ChatFiles
from agentrl.chat.parsers import ToolCallParser, tags_in
from agentrl.errors import ConfigError

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
    from renderers import base, config_from_name, create_renderer

    eos = tokens.token_id(files.special_tokens.get("eos_token", ""))
    tokenizer = _Tokenizer(tokens, files.template, eos)
    try:
        with _harmony_vocabulary(files.tokenizer) if name == HARMONY else nullcontext():
            config = base.merge_chat_template_kwargs(config_from_name(name), dict(template_kwargs))
            renderer = create_renderer(tokenizer, config)
            keeping = config.model_copy(update={"thinking_retention": "all"})
            extender = create_renderer(tokenizer, keeping)
    except Exception as error:
        raise ConfigError(
            f"the chat format {name} does not fit this model: {error}",
            hint="give another by --chat_format, or other --chat_template_kwargs",
        ) from error
    return FamilyRenderer(
        renderer,
        extender,
        tokens,
        stop_ids=files.stop_ids,
        parser=parser,
        tags=tags_in(files.template or ""),
    )


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
        """Return ``input_ids`` and the ``offset_mapping`` of ``text``."""
        pairs = self._tokens.encode_with_offsets(text)
        return {"input_ids": [token for token, _ in pairs], "offset_mapping": [place for _, place in pairs]}

    def encode(self, text: str, *_: Any, **options: Any) -> list[int]:
        """Return the ids of ``text``; special tokens in it are special."""
        return self._tokens.encode(text)

    def decode(self, token_ids: int | Sequence[int], *_: Any, **options: Any) -> str:
        """Return the text of ids with special tokens."""
        return self._tokens.decode([token_ids] if isinstance(token_ids, int) else token_ids)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or of each token; None for an unknown one."""
        if isinstance(tokens, str):
            return self._tokens.token_id(tokens)
        return [self._tokens.token_id(token) for token in tokens]


_VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
_FILE = "o200k_base.tiktoken"


@contextmanager
def _harmony_vocabulary(tokenizer: Tokenizer) -> Iterator[None]:
    """Let harmony load the vocabulary of ``tokenizer`` inside this block; it checks the file's hash."""
    if os.environ.get(_VARIABLE):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="agentrl-harmony-") as folder:
        (Path(folder) / _FILE).write_bytes(_tiktoken_file(tokenizer))
        os.environ[_VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[_VARIABLE]


def _tiktoken_file(tokenizer: Tokenizer) -> bytes:
    """Return one line per token: its bytes in base64, and its id."""
    values = _byte_of_letter()
    rows = sorted((number, text) for text, number in tokenizer.get_vocab(with_added_tokens=False).items())
    lines = []
    for number, text in rows:
        data = base64.b64encode(bytes(values[letter] for letter in text)).decode()
        lines.append(f"{data} {number}\n")
    return "".join(lines).encode()


def _byte_of_letter() -> dict[str, int]:
    """Return the byte of each letter of a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in plain]
    letters = {chr(value): value for value in plain}
    return letters | {chr(256 + place): value for place, value in enumerate(others)}
