"""A teacher: what it reads of a trajectory, and its logprobs: of SGLang, vLLM, or a model in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from agentrl.calls.prompts import chain_of, one_system
from agentrl.chat.chat_format import ChatFormat
from agentrl.documents.model_call import DispatchedSamplingTask, unpack_ids
from agentrl.documents.record import TopLogprobs, checked_logprobs
from agentrl.documents.task import Task
from agentrl.inference.engine import EngineRefusedError, known_format, malformed
from agentrl.inference.http import EngineHttp


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Logprobs of n consecutive ids under a teacher, at temperature 1."""

    logprobs: NDArray[np.float32]
    """float32[n], in nats."""
    top: TopLogprobs | None = None
    """The most likely ids at each place; None if none were asked for."""

    @classmethod
    def of(cls, logprobs: Sequence[float | None], rows: Sequence[Mapping[int, float]], top: int) -> Self:
        """Check an answer: a logprob of each id, and ``rows`` of {id: logprob}, of which ``top`` are kept.

        Raises ValueError for what no distribution has, and for more or fewer rows than ids.
        """
        values = checked_logprobs(logprobs)
        if not top:
            return cls(values)
        if len(rows) != len(values):
            raise ValueError(f"likeliest ids of {len(rows)} tokens, not {len(values)}")
        likeliest = [nlargest(top, row.items(), key=itemgetter(1)) for row in rows]
        return cls(values, TopLogprobs.of([dict(row) for row in likeliest]))


class TeacherEngine(Protocol):
    """Scores ids."""

    name: str
    """What is stored as ``Column.by``."""

    async def score(self, ids: Sequence[int], first: int, top: int) -> Scored:
        """Return the logprobs of ``ids[first:]``, each given the ids before it, with ``top`` others.

        ``first`` is at least 1. Raises EngineError; its ``outage`` says that the teacher is down.
        """

    async def folder(self) -> str | None:
        """Return the model's folder if the engine names one."""

    async def close(self) -> None:
        """Free what it holds."""


class HttpTeacher:
    """A teacher behind a server: SGLang's ``/generate``, or ``/v1/completions`` of vLLM."""

    def __init__(self, url: str, timeout: float) -> None:
        """``timeout`` limits a request, in seconds."""
        self._http = EngineHttp(url)
        self.name = self._http.url
        self._timeout = timeout
        self._served: str | None = None
        """The model's name, of a server that has ``/v1/completions`` alone."""

    async def folder(self) -> str | None:
        """Return the folder of the served model, and find out which server it is."""
        kind, content = await self._http.respond("GET", "/model_info", statuses=(200, 404))
        if "json" in kind and b'"model_path"' in content:
            return str((await self._http.call("GET", "/model_info")).get("model_path"))
        answer = await self._http.call("GET", "/v1/models")
        with known_format(self._http.url, answer):
            model = answer["data"][0]
            self._served = str(model["id"])
            return str(model.get("root") or model["id"])

    async def score(self, ids: Sequence[int], first: int, top: int) -> Scored:
        """Return the logprobs of ``ids[first:]``; see ``TeacherEngine``."""
        if self._served is not None:
            return await self._prompt_logprobs(ids, first, top)
        body = {
            "input_ids": list(ids), "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True, "logprob_start_len": first - 1, "top_logprobs_num": top,
        }  # fmt: skip
        answer = await self._http.call("POST", "/generate", body, self._timeout)
        with known_format(self._http.url, answer):
            meta = answer["meta_info"]
            rows = meta["input_token_logprobs"][first - len(ids) :]
            if [row[1] for row in rows] != list(ids[first:]):
                raise malformed(self._http.url, f"logprobs of other ids than the {len(ids)} that it was sent")
            others = meta["input_top_logprobs"][first - len(ids) :] if top else ()
            likeliest = [{int(each[1]): float(each[0]) for each in row} for row in others]
            return Scored.of([row[0] for row in rows], likeliest, top)

    async def _prompt_logprobs(self, ids: Sequence[int], first: int, top: int) -> Scored:
        body = {
            "model": self._served, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0,
            "prompt_logprobs": top,
        }  # fmt: skip
        answer = await self._http.call("POST", "/v1/completions", body, self._timeout)
        with known_format(self._http.url, answer):
            rows = answer["choices"][0]["prompt_logprobs"][first:]
            found = [{int(id): float(each["logprob"]) for id, each in row.items()} for row in rows]
            own = [row[id] for id, row in zip(ids[first:], found, strict=True)]
            return Scored.of(own, found, top)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


class FolderTeacher:
    """A model folder, loaded into this process. One sequence is computed at a time, in a thread."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError for a folder without a model."""
        from agentrl.model.score_ids import IdScorer  # torch is imported where a teacher computes here

        self.name = str(folder)
        self._folder = folder
        self._scorer = IdScorer(folder)
        self._turn = asyncio.Lock()

    async def folder(self) -> str | None:
        """Return the folder."""
        return str(self._folder)

    async def score(self, ids: Sequence[int], first: int, top: int) -> Scored:
        """Return the logprobs of ``ids[first:]``; see ``TeacherEngine``."""
        async with self._turn:
            try:
                values, rows = await asyncio.to_thread(self._scorer.score, ids, first, top)
                return Scored.of(values.tolist(), rows, top)
            except (RuntimeError, IndexError, ValueError) as error:
                raise EngineRefusedError(
                    f"{self.name} cannot compute {len(ids)} tokens: {type(error).__name__}: {error}"
                ) from error

    async def close(self) -> None:
        """Nothing is open."""


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
