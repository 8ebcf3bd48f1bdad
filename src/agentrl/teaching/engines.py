"""Ask a teacher for the logprobs of given ids: an SGLang or vLLM server, or a model in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from agentrl.documents.column import TopLogprobs, checked_logprobs
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
