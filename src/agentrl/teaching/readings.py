"""Write what a teacher reads of a trajectory: the student's ids, or the same text in its own format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from agentrl.chat.chat_format import ChatFormat
from agentrl.documents.column import TopLogprobs
from agentrl.documents.model_call import DispatchedSamplingTask, unpack_ids
from agentrl.documents.task import Task
from agentrl.rollout.prompts import chain_of, one_system
from agentrl.teaching.engines import TeacherEngine


def token_ends(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int | None]:
    """Return the characters of text up to the end of each token; None inside a character."""
    stream = DecodeStream(skip_special_tokens=False)
    ends: list[int | None] = []
    length = 0
    for token in ids:
        piece = stream.step(tokenizer, token)
        length += len(piece or "")
        ends.append(None if piece is None else length)
    return ends


def align(
    student: Sequence[int | None], teacher: Sequence[int | None], logprobs: Sequence[float]
) -> NDArray[np.float32]:
    """Return float32[len(student)]: the teacher's logprob of each student token, NaN where there is none.

    ``student`` and ``teacher`` are ``token_ends`` of the same text, ``logprobs`` those of the teacher's
    tokens. Between two ends that both have, one student token gets the sum over the teacher's tokens of the
    same characters; several student tokens there get NaN, because nothing says how to share the sum.
    """
    values = np.full(len(student), np.nan, np.float32)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(logprobs, np.float64))])
    after = {end: place + 1 for place, end in enumerate(teacher) if end is not None}
    first, before = 0, 0
    for place, end in enumerate(student):
        if end is None or end not in after:
            continue
        if place == first:
            values[place] = sums[after[end]] - sums[before]
        first, before = place + 1, after[end]
    return values


@dataclass(frozen=True)
class Teaching:
    """How a teacher reads trajectories."""

    engine: TeacherEngine
    teacher: ChatFormat | None = None
    """How it writes prompts; None: it reads the student's ids as they are, prompts included."""
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None
    """Those of student and teacher if they differ; None: the ids of an answer mean the same to both."""
    stop_ids: frozenset[int] = frozenset()
    """The ids that end a turn of the student."""
    prompt: str | None = None
    """A privileged prompt, added to the system message: ``{answer}`` and ``{query}`` are the Task's."""
    top_logprobs: int = 0

    async def values(
        self, task: Task, calls: Sequence[DispatchedSamplingTask]
    ) -> tuple[NDArray[np.float32], TopLogprobs | None]:
        """Return the column of a Record: float32 over the generated tokens of ``calls``, and the top ids.

        Calls that another model answered have NaN. ``calls`` are ordered by index.
        """
        values: list[NDArray[np.float32]] = [np.zeros(0, np.float32)]
        tops: list[TopLogprobs] = []
        for call, prompt in self._prompts(task, calls):
            output = unpack_ids(call.output_ids).tolist()
            nothing = TopLogprobs.of([{}] * len(output))
            if prompt is None or not output or not len(prompt):
                values.append(np.full(len(output), np.nan, np.float32))
                tops.append(nothing)
            elif self.tokenizers is None:
                scored = await self.engine.score([*prompt, *output], len(prompt), self.top_logprobs)
                values.append(scored.logprobs)
                tops.append(scored.top or nothing)
            else:
                values.append(await self._aligned(prompt, output))
                tops.append(nothing)
        joined = TopLogprobs.join(tops) if tops else None
        return np.concatenate(values), joined if joined is not None and len(joined.logprobs) else None

    async def _aligned(self, prompt: Sequence[int], output: Sequence[int]) -> NDArray[np.float32]:
        """Score an answer as text: its last token is the end of a turn for both."""
        assert self.tokenizers is not None
        assert self.teacher is not None
        student, teacher = self.tokenizers
        ends_turn = output[-1] in self.stop_ids
        spoken = output[: len(output) - ends_turn]
        text = student.decode(spoken, skip_special_tokens=False)
        ids = teacher.encode(text, add_special_tokens=False).ids
        end = [_end_of_turn(self.teacher)] if ends_turn else []
        if not [*ids, *end]:
            return np.full(len(output), np.nan, np.float32)
        scored = await self.engine.score([*prompt, *ids, *end], len(prompt), 0)
        values = align(
            token_ends(student, spoken), token_ends(teacher, ids), scored.logprobs[: len(ids)].tolist()
        )
        return np.concatenate([values, scored.logprobs[len(ids) :]]).astype(np.float32)

    def _prompts(
        self, task: Task, calls: Sequence[DispatchedSamplingTask]
    ) -> Iterator[tuple[DispatchedSamplingTask, Sequence[int] | None]]:
        """Yield each call with the ids before its answer; None for a call that another model answered."""
        known = {call.id: call for call in calls}
        tools: dict[str, tuple[dict[str, Any], ...] | None] = {}
        for call in calls:
            tools[call.id] = call.tools if call.parent is None else tools[call.parent]
            if call.fixed is not None:
                yield call, None
                continue
            chain = chain_of(known, call.id)
            if self.teacher is None:
                yield call, chain.prompt_ids
            else:
                messages = self._privileged(task, one_system(chain.messages[:-1]))
                yield call, self.teacher.render(messages, tools[call.id] or None)

    def _privileged(self, task: Task, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with the privileged prompt at the end of the system message."""
        if self.prompt is None:
            return list(messages)
        text = self.prompt.replace("{answer}", str(task.answer)).replace("{query}", task.query)
        if messages and messages[0]["role"] == "system":
            first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
            return [first, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]


def _end_of_turn(chat: ChatFormat) -> int:
    """Return the id with which the format closes an assistant's turn."""
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = chat.render(turn, None, add_generation_prompt=False)
    return next((token for token in reversed(ids) if token in chat.stop_ids), min(chat.stop_ids))
