"""Condense long tool results by an LLM, for the question of the task: the browse agent.

It reads section ``browse_agent`` of ``--agent_config_path``. Its calls are recorded with the tool execution;
the policy reads the condensed text as the tool's result, and none of it is trained.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.base.batches import batches
from agentrl.base.concurrency import Deadline
from agentrl.chat.parsers.parser import split_reasoning
from agentrl.documents.document import replace_surrogates
from agentrl.documents.model_call import BrowseCall, Condensed
from agentrl.errors import ConfigError
from agentrl.llm.agent_config import BrowseSection, load_browse
from agentrl.llm.chat import RULE, Messages, NoAnswerError, ask, fenced

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

MAX_CHUNKS = 16
"""Parts of one result that are read; the condensed text says how much is left out."""

_KEPT_CHARS = 262_144
"""Characters of the original result that are recorded."""
_CHARS_PER_TOKEN = 4
_PURPOSE = "Collect everything that helps to answer the question."

_TASK = f"""\
You read the result of a tool call for an agent who works on a question, and write down what helps it. \
Keep facts, numbers, names, dates, code and links exactly as they are given. Write what is there and nothing \
else: no answer to the question, no advice. If nothing helps, say so in one sentence. {RULE}"""


@dataclass(frozen=True, kw_only=True)
class BrowseAgent:
    """Condenses the results of ``browse_tools`` that are longer than ``min_prompt_length``."""

    section: BrowseSection
    tokenizer: Tokenizer | None = None

    async def condense(
        self, question: str, tool: str, arguments: Mapping[str, Any], text: str
    ) -> Condensed | None:
        """Return ``text`` condensed for ``question``; None if it is not condensed at all.

        Of a condensed text without ``result`` the agent reads the original: no model answered.
        """
        names = {tool, tool.rpartition(".")[2]}
        least, purposes = self.section.min_prompt_length, self.section.default_purpose
        if names.isdisjoint(self.section.browse_tools) or len(text.encode("utf-8", "replace")) <= least:
            return None
        chunks, tokens = await asyncio.to_thread(self._chunks, text)
        if tokens <= least:
            return None
        given = arguments.get("purpose") or next(
            (purposes[name] for name in sorted(names) if name in purposes), _PURPOSE
        )
        condensed = await self._ask(tool, arguments, text, question, str(given), chunks, tokens)
        if self.section.enable_logging:
            logger.info(
                "condensed" if condensed.result is not None else "not condensed",
                extra={
                    "tool": tool,
                    "tokens": tokens,
                    "chars": len(condensed.result or ""),
                    "seconds": round(max(call.seconds for call in condensed.calls), 3),
                    "why": condensed.problem,
                },
            )
        return condensed

    async def _ask(
        self, tool: str, arguments: Mapping[str, Any], text: str, question: str, purpose: str,
        chunks: Sequence[str], tokens: int,
    ) -> Condensed:  # fmt: skip
        values = {
            "question": question,
            "purpose": purpose,
            "tool_call": f"{tool}({json.dumps(arguments, ensure_ascii=False, default=str)})",
        }
        read = chunks[:MAX_CHUNKS]
        calls = await asyncio.gather(
            *(self._read(values, chunk, number, len(read)) for number, chunk in enumerate(read, 1))
        )
        problem = next((call.problem for call in calls if call.problem is not None), None)
        rest = len(text) - sum(map(len, read))
        return Condensed(
            purpose=purpose,
            original=str(replace_surrogates(text[:_KEPT_CHARS])),
            chars=len(text),
            tokens=tokens,
            calls=tuple(calls),
            result=None if problem is not None else _joined([call.reply for call in calls], rest),
            problem=problem,
        )

    async def _read(self, values: Mapping[str, str], chunk: str, number: int, count: int) -> BrowseCall:
        """Condense one part. Never raises for a model that fails."""
        seconds = self.section.timeout * len(self.section.models)
        part = "result" if count == 1 else f"part {number} of {count} of the result"
        messages = _messages(values, chunk, part)
        deadline = Deadline(seconds)
        try:
            answer = await ask(self.section, messages, _text, deadline)
        except NoAnswerError as error:
            logger.warning("a tool result is not condensed", extra={"why": str(error)})
            return BrowseCall(problem=str(error), seconds=seconds - deadline.left())
        return BrowseCall(
            model=answer.model,
            reply=str(replace_surrogates(answer.value)),
            prompt_tokens=answer.spent.prompt_tokens,
            completion_tokens=answer.spent.completion_tokens,
            cost=answer.spent.cost,
            seconds=answer.spent.seconds,
        )

    def _chunks(self, text: str) -> tuple[list[str], int]:
        """Return ``text`` in parts of at most ``max_prompt_length``, and the number of its tokens."""
        longest = self.section.max_prompt_length
        if self.tokenizer is None:
            return list(batches(text, longest * _CHARS_PER_TOKEN)), len(text) // _CHARS_PER_TOKEN
        offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
        firsts = range(longest, len(offsets), longest)
        starts = [0, *(offsets[first][0] for first in firsts)]
        ends = [*starts[1:], len(text)]
        return [text[start:end] for start, end in zip(starts, ends, strict=True)], len(offsets)


def open_browse_agent(agent_config_path: str) -> BrowseAgent | None:
    """Return the browse agent; None without its section or with ``status: false``.

    Raises ConfigError for a section that cannot be used.
    """
    section = load_browse(agent_config_path)
    if section is None:
        return None
    where = f"{agent_config_path}: browse_agent.tokenizer_path"
    return BrowseAgent(section=section, tokenizer=_tokenizer(where, section.tokenizer_path))


def _tokenizer(where: str, path: str | None) -> Tokenizer | None:
    if path is None:
        return None
    from tokenizers import Tokenizer

    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises Exception itself
        raise ConfigError(
            f"{where}: {file} cannot be read: {error}",
            hint="give a folder with tokenizer.json, or leave it out: then 4 characters count as a token",
        ) from error


def _messages(values: Mapping[str, str], chunk: str, part: str) -> Messages:
    blocks = fenced({**values, "result": chunk})
    text = (
        f"The question:{blocks['question']}What to look for:{blocks['purpose']}"
        f"The tool call:{blocks['tool_call']}The {part}:{blocks['result']}"
        "Write down what helps."
    )
    return [{"role": "system", "content": _TASK}, {"role": "user", "content": text}]


def _text(reply: str) -> str | None:
    return split_reasoning(reply).rest.strip() or None


def _joined(replies: Sequence[str], rest: int) -> str:
    parts = list(replies)
    if len(parts) > 1:
        parts = [f"[part {number} of {len(parts)}]\n{text}" for number, text in enumerate(parts, 1)]
    if rest > 0:
        parts.append(f"[not read: {rest:,} more characters]")
    return "\n\n".join(parts)
