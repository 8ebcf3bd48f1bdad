"""Encode text so that only a template writes control tokens: the same text inside a message stays text.

``protect`` puts a secret mark into every control token that it finds in a message. A template or a renderer
handles the marked text like any other; ``encode`` removes the marks and tokenizes the text around each of
them on its own.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Encoding, Tokenizer

from agentrl.documents.sanitize_bson import replace_surrogates

_MARK = f"mark{uuid.uuid4().hex}"
"""Random in each process, so untrusted text cannot hold it. It is removed before tokenization."""

_SHAPED = r"<[^<>]{1,80}>|\[[^\[\]]{1,80}\]"
_KEYWORDS = re.compile(
    r"think|tool|call|arg|func|response|output|result|channel|message|turn|role|start|begin|end|sep|observation"
    r"|user|assistant|system|inst",
    re.IGNORECASE,
)
_SPOKEN = re.compile(r"think|tool.?call|tool.?sep|function|parameter|arg_|python_tag|code", re.IGNORECASE)
"""Tags that an assistant may write: they are not marked in its messages."""


class ControlTokens:
    """A tokenizer, and the texts of its control tokens."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None) -> None:
        """``template`` is a chat template: the tags that it writes are control tokens too."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        texts = {
            token.content
            for token in added.values()
            if token.content.strip() and (token.special or _is_tag(token.content, template or ""))
        }
        self._control = frozenset(texts)
        self.special_ids = frozenset(number for number, token in added.items() if token.content in texts)
        self._spoken = frozenset(text for text in texts if _SPOKEN.search(text))
        odd = sorted((text for text in texts if not re.fullmatch(_SHAPED, text)), key=len, reverse=True)
        self._pattern = re.compile(f"(?=({'|'.join([*map(re.escape, odd), _SHAPED])})).", re.DOTALL)
        self._adds_space = _adds_space(tokenizer)

    def protect(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages whose text holds no control token for ``encode``.

        Tags of thoughts and tool calls are not marked in assistant and system messages.
        """
        return [self._marked(dict(message), self._allowed(str(message.get("role")))) for message in messages]

    def protect_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Return tool schemas whose text holds no control token for ``encode``."""
        return [self._marked(dict(tool), frozenset()) for tool in tools] if tools else None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of rendered text; adds no special tokens. Lone surrogates are replaced."""
        if _MARK not in text:
            try:
                [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)  # no offsets
            except (TypeError, UnicodeEncodeError):
                encoding = self._encoding(text)
            return list(encoding.ids)
        return [token for token, _ in self._pieces(text)]

    def encode_with_offsets(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        """Return each token id of rendered text with its place in ``text``, in characters: [start, end)."""
        if _MARK not in text:
            return self._encode_piece(text, 0)
        return self._pieces(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` with special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def texts(self) -> list[str]:
        """Return the texts of all control tokens."""
        return sorted(self._control)

    def token_id(self, text: str) -> int | None:
        """Return the id of one token."""
        found = self._tokenizer.token_to_id(text)
        return None if found is None else int(found)

    def token_text(self, token: int) -> str | None:
        """Return the text of one id."""
        found = self._tokenizer.id_to_token(token)
        return None if found is None else str(found)

    def _allowed(self, role: str) -> frozenset[str]:
        return self._spoken if role in ("assistant", "system", "developer") else frozenset()

    def _marked(self, value: Any, allowed: frozenset[str]) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self._mark(found, allowed), value)
        if isinstance(value, Mapping):
            return {self._marked(key, allowed): self._marked(item, allowed) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._marked(item, allowed) for item in value]
        return value

    def _mark(self, found: re.Match[str], allowed: frozenset[str]) -> str:
        """Return the first character of a token's text, marked if it is a control token."""
        text = found.group(1)
        return found.group() + (_MARK if text in self._control and text not in allowed else "")

    def _pieces(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        """Tokenize around each mark: the character before it and the text after it meet no longer."""
        found: list[tuple[int, tuple[int, int]]] = []
        place = 0
        for piece in text.split(_MARK):
            found.extend(self._encode_piece(piece, place))
            place += len(piece) + len(_MARK)
        return found

    def _encoding(self, text: str) -> Encoding:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            return self._tokenizer.encode(replace_surrogates(text), add_special_tokens=False)

    def _encode_piece(self, piece: str, place: int) -> list[tuple[int, tuple[int, int]]]:
        """Encode ``piece``, which begins at ``place``; text after a mark gets no space before it."""
        lead = "\n" if place and self._adds_space and piece else ""
        encoding = self._encoding(lead + piece)
        skip = place - len(lead)
        return [
            (token, (start + skip, end + skip))
            for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if not lead or end > len(lead)
        ]


def _is_tag(text: str, template: str) -> bool:
    """Return whether a token that is not special marks a part of a conversation."""
    return text[0] in "<[" and (text in template or _KEYWORDS.search(text) is not None)


def _adds_space(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer puts a space before text."""
    ids = tokenizer.encode("<", add_special_tokens=False).ids
    first = tokenizer.id_to_token(ids[0]) if ids else None
    return first is not None and first.startswith("▁")
