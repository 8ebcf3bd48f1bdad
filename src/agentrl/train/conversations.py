"""A JSONL file of conversations → token ids with a mask of what the assistant says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import TaskFileError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Conversation:
    """``input_ids`` int64[n]; ``is_trainable`` bool[n] marks the tokens of assistant messages."""

    input_ids: NDArray[np.int64]
    is_trainable: NDArray[np.bool_]


def read_conversations(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Conversation]:
    """Render every line's ``messages`` (and ``tools``) with the tokenizer's chat template.

    Raises TaskFileError naming file, line and reason: no JSON, no messages, no assistant message, or a
    template that does not render a prefix of a conversation as a prefix.
    """
    conversations = []
    for number, line in _lines(path):
        try:
            item = json.loads(line)
            messages = _messages(item)
            conversations.append(_render(tokenizer, messages, item.get("tools")))
        except ValueError as error:
            raise TaskFileError(
                f"{path}:{number}: {error}", hint='a line is {"messages": [{"role": …, "content": …}, …]}'
            ) from error
    if not conversations:
        raise TaskFileError(f"{path} holds no conversation", hint="give a JSONL file with one on each line")
    return conversations


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFileError(f"{path} cannot be read: {error}", hint="give a JSONL file in UTF-8") from error
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _messages(item: Any) -> list[dict[str, Any]]:
    messages = item.get("messages") if isinstance(item, dict) else None
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError("it has no list of messages with roles")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no message is the assistant's: there is nothing to learn")
    return messages


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], tools: list[Any] | None
) -> Conversation:
    if _GENERATION_MARKER.search(str(tokenizer.chat_template)):
        return _by_markers(tokenizer, messages, tools)
    return _by_prefixes(tokenizer, messages, tools)


def _by_markers(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], tools: list[Any] | None
) -> Conversation:
    rendered = tokenizer.apply_chat_template(
        list(messages), tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    return Conversation(
        np.asarray(rendered["input_ids"], np.int64),  # type: ignore[call-overload,index]
        np.asarray(rendered["assistant_masks"], np.bool_),  # type: ignore[call-overload,index]
    )


def _by_prefixes(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], tools: list[Any] | None
) -> Conversation:
    """An assistant message is what its rendering adds to the prompt before it, up to its end token."""
    whole = _ids(tokenizer, messages, tools)
    trainable = np.zeros(len(whole), np.bool_)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _ids(tokenizer, messages[:index], tools, add_generation_prompt=True)
        spoken = _ids(tokenizer, messages[: index + 1], tools)
        if whole[: len(spoken)] != spoken or spoken[: len(prompt)] != prompt:
            raise ValueError(
                f"the chat template does not render messages up to {index} as a prefix of the conversation"
            )
        end = len(spoken)
        if tokenizer.eos_token_id in spoken[len(prompt) :]:
            end -= spoken[::-1].index(tokenizer.eos_token_id)
        trainable[len(prompt) : end] = True
    return Conversation(np.asarray(whole, np.int64), trainable)


def _ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    tools: list[Any] | None,
    *,
    add_generation_prompt: bool = False,
) -> list[int]:
    text = tokenizer.apply_chat_template(
        list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return cast("list[int]", tokenizer(str(text), add_special_tokens=False)["input_ids"])
