"""Give the ``renderers`` package a model's tokenizer, without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.chat.control_tokens import ControlTokens


class RendererTokenizer:
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
