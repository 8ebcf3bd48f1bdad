"""Turn generated ids into deltas of reasoning and content while the model generates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from agentrl.chat.chat_format import ChatFormat
from agentrl.chat.parsers.parser import REASONING_TAGS, ReasoningTags

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
