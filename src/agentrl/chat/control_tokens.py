"""Encode text so that only a template writes control tokens: the same text inside a message stays text.

``protect`` puts a secret mark into every control token that it finds in a message. A template or a renderer
handles the marked text like any other; ``encode`` removes the marks and tokenizes the text around each of
them on its own.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from agentrl.base.batches import batches
from agentrl.documents.document import replace_surrogates

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
_BATCH = 512
"""Pieces of text between marks that are tokenized at a time."""
_SLICE = 1 << 16
_WORD_END = re.compile(r"[0-9A-Za-z] ")
_WORD_END_IN_BYTES = re.compile("[0-9A-Za-z]Ġ")
"""The same in the alphabet of byte-level tokens."""
_COMPOSED = 4
"""Most characters that NFC composes into one."""


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
        # Put longer texts first: of alternatives the first wins, and a prefix would hide the whole token.
        odd = sorted((text for text in texts if not re.fullmatch(_SHAPED, text)), key=len, reverse=True)
        self._pattern = re.compile("|".join([*map(re.escape, odd), _SHAPED]))
        self._first = re.compile(f"[<\\[{re.escape(''.join(sorted({text[0] for text in odd})))}]")
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
        if _MARK in text:
            return [token for token, _ in self.encode_with_offsets(text)]
        return list(self._encodings(self._tokenizer.encode_batch_fast, [text])[0].ids)  # without offsets

    def encode_with_offsets(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        """Return each token id of rendered text with its position in ``text``, in characters: [start, end).

        The character before a mark and the text after it are tokenized on their own.
        """
        located: list[tuple[int, tuple[int, int]]] = []
        offset = 0
        pieces = text.split(_MARK)
        for start in range(0, len(pieces), _BATCH):
            batch = pieces[start : start + _BATCH]
            # text after a mark gets no space before it
            leads = [
                "\n" if self._adds_space and piece and start + i else "" for i, piece in enumerate(batch)
            ]
            whole = [lead + piece for lead, piece in zip(leads, batch, strict=True)]
            # Tokenize equal pieces once, and in batches: a call for each piece costs 0.1 ms.
            once = list(dict.fromkeys(whole))
            encodings = dict(zip(once, self._encodings(self._tokenizer.encode_batch, once), strict=True))
            for lead, piece, key in zip(leads, batch, whole, strict=True):
                skip = offset - len(lead)
                located += [
                    (token, (begin + skip, end + skip))
                    for token, (begin, end) in zip(encodings[key].ids, encodings[key].offsets, strict=True)
                    if not lead or end > len(lead)
                ]
                offset += len(piece) + len(_MARK)
        return located

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that ``text`` has at least; much faster than tokenizing it."""
        longest, ends_words = self._token_bounds
        if not longest:
            return 0
        words = sum(len(_WORD_END.findall(part)) for part in batches(text, _SLICE)) if ends_words else 0
        return max(words, len(text) // longest)

    @cached_property
    def _token_bounds(self) -> tuple[int, bool]:
        """Return the most characters of a token, 0 if unknown, and whether no token has a word's end inside.

        Known for BPE of all bytes, where tokens are exactly the text, up to Unicode's composition.
        """
        tokenizer = self._tokenizer
        normalizer, splitter = (
            b"" if part is None else part.__getstate__()
            for part in (tokenizer.normalizer, tokenizer.pre_tokenizer)
        )
        vocabulary = tokenizer.get_vocab()
        added = tokenizer.get_added_tokens_decoder().values()
        if (
            not isinstance(tokenizer.model, BPE)
            or b"ByteLevel" not in splitter
            or b"Removed" in splitter
            or normalizer not in (b"", b'{"type":"NFC"}')
            or not vocabulary.keys() >= set(ByteLevel.alphabet())
            or any(token.lstrip or token.rstrip for token in added)
        ):
            return 0, False
        composed = _COMPOSED if normalizer else 1
        return composed * max(map(len, vocabulary)), not any(map(_WORD_END_IN_BYTES.search, vocabulary))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` with special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def texts(self) -> list[str]:
        """Return the texts of all control tokens."""
        return sorted(self._control)

    def token_id(self, text: str) -> int | None:
        """Return the id of one token."""
        token = self._tokenizer.token_to_id(text)
        return None if token is None else int(token)

    def token_text(self, token: int) -> str | None:
        """Return the text of one id."""
        text = self._tokenizer.id_to_token(token)
        return None if text is None else str(text)

    def _allowed(self, role: str) -> frozenset[str]:
        return self._spoken if role in ("assistant", "system", "developer") else frozenset()

    def _marked(self, value: Any, allowed: frozenset[str]) -> Any:
        if isinstance(value, str):
            return self._mark(value, allowed)
        if isinstance(value, Mapping):
            return {self._marked(key, allowed): self._marked(item, allowed) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._marked(item, allowed) for item in value]
        return value

    def _mark(self, text: str, allowed: frozenset[str]) -> str:
        """Return the text with a mark behind the first character of each control token.

        Python code loops over them: one search through a long text would hold the interpreter's lock.
        """
        parts: list[str] = []
        done = 0
        for offset in (match.start() for match in self._first.finditer(text)):
            match = self._pattern.match(text, offset)
            if match is not None and match.group() in self._control and match.group() not in allowed:
                parts += (text[done : offset + 1], _MARK)
                done = offset + 1
        return "".join([*parts, text[done:]]) if parts else text

    def _encodings(self, encode: Callable[..., list[Encoding]], texts: list[str]) -> list[Encoding]:
        try:
            return encode(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            return encode([replace_surrogates(text) for text in texts], add_special_tokens=False)


def _is_tag(text: str, template: str) -> bool:
    """Return whether a token that is not special marks a part of a conversation."""
    return text[0] in "<[" and (text in template or _KEYWORDS.search(text) is not None)


def _adds_space(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer puts a space before text."""
    ids = tokenizer.encode("<", add_special_tokens=False).ids
    first = tokenizer.id_to_token(ids[0]) if ids else None
    return first is not None and first.startswith("▁")
