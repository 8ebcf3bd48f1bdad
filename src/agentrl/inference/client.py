"""Call an inference engine over SGLang's HTTP API, which the ``local`` engine serves too.

``engines/clients.py`` has the client for vLLM, whose API differs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import orjson

from agentrl.documents.sampling import LogprobsOf, SamplingParams, logprobs_of
from agentrl.errors import EngineError
from agentrl.inference.encoded_ids import EncodedIds
from agentrl.inference.generation import (
    Chunk,
    Collector,
    EngineAnswerError,
    EngineInterruptedError,
    EngineRefusedError,
    Generation,
    malformed,
    policy_version,
    version_spans,
)
from agentrl.inference.http import CONTROL_SECONDS, EngineHttp

PauseMode = Literal["abort", "retract", "in_place"]

_EXCERPT = 300
_ABORT_SECONDS = 5.0
_ROUTING_KEY = "X-SMG-Routing-Key"
"""Header by which ``sglang-router`` keeps the requests of one key at one engine (``--policy manual``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model that an engine serves.

    ``vocab_size`` is None if the engine does not report it. ``context_length`` is the largest number of
    tokens of a prompt and its continuation; None if unknown.
    """

    model_path: str
    version: int
    vocab_size: int | None
    context_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The running and queued requests of an engine, and the tokens in them; 0 tokens if it reports none."""

    requests: int
    tokens: int = 0


class EngineClient:
    """The client of one engine. Methods raise EngineError with the url, the status and the answer."""

    def __init__(
        self,
        url: str,
        timeout: float = 120.0,
        *,
        vocab_size: int | None = None,
        instance: str | None = None,
    ) -> None:
        """Create the client of the engine at ``url``.

        ``timeout`` limits the time between two tokens of a generation, the time until the first one, and the
        time of a weight update, in seconds. With ``vocab_size`` None, the engine is asked for it. With an
        ``instance``, prompts are sent only to a server that has this instance name.
        """
        self._http = EngineHttp(url)
        self.url = self._http.url
        self._timeout = timeout
        self._vocab_size = vocab_size
        self._unverified = instance
        self._instance = instance

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        rid: str,
        *,
        encoded: EncodedIds | None = None,
        routing_key: str | None = None,
        keep: Callable[[Generation], None] = lambda _: None,
    ) -> Generation:
        """Sample a continuation of ``input_ids``.

        An id outside the vocabulary raises EngineRefusedError here, because it crashes SGLang. ``rid`` must
        not be a prefix of the id of another request, because SGLang aborts by prefix. Cancelling the call
        aborts the request in the engine. ``encoded`` keeps the JSON of the ids for the next prompt of the
        same conversation. A cancelled call passes the tokens received so far to ``keep``.

        Raises EngineInterruptedError, with the tokens received, if the stream ends early or is silent for
        ``timeout`` seconds, and EngineError if the engine cannot be reached or its answer is malformed.
        """
        if self._unverified is not None:
            await self.check_instance(self._unverified)
            self._unverified = None
        collector = await self._collector(params)
        encoded = EncodedIds() if encoded is None else encoded
        ids_json = encoded.update(input_ids, collector.vocab_size)
        path, body = self._request(ids_json, params, rid)
        headers = {_ROUTING_KEY: routing_key} if routing_key else {}
        start = time.monotonic()
        try:
            await self._collect(collector, path, body, headers)
        except EngineError as error:
            self._unverified = self._instance  # the address may belong to another server by the next call
            if isinstance(error, EngineRefusedError):
                raise
            await self._abort_quietly(rid)
            raise
        except asyncio.CancelledError:
            if (part := collector.partial(time.monotonic() - start)) is not None:
                keep(part)
            await asyncio.shield(self._abort_quietly(rid))
            raise
        return collector.result(time.monotonic() - start)

    async def health(self) -> bool:
        """Return whether the engine takes requests; False while it is paused, starting or unreachable."""
        try:
            await self._http.respond("GET", "/health")
        except EngineError:
            return False
        return True

    async def model_info(self) -> ModelInfo:
        """Return the served model, its policy version and its context length."""
        info, server = await asyncio.gather(self._get("/model_info"), self.server_info())
        path = str(info.get("model_path", ""))
        vocab_size = info.get("vocab_size")
        if vocab_size is None:
            vocab_size = await asyncio.to_thread(vocab_size_of, path)
        # SGLang refuses a prompt of max_req_input_len tokens, which is a little below its context.
        length = server.get("max_req_input_len") or server.get("context_length")
        return ModelInfo(
            model_path=path,
            version=policy_version(info.get("weight_version"), self.url),
            vocab_size=vocab_size,
            context_length=length if isinstance(length, int) else None,
        )

    async def server_info(self) -> dict[str, Any]:
        """Return the engine's own description, unchanged."""
        return await self._get("/server_info")

    async def instance(self) -> str | None:
        """Return the instance name that ``agentrl serve`` gave the server; None if it has none."""
        info = await self.server_info()
        given = info.get("instance")
        return str(given) if given else instance_of(str(info.get("served_model_name", "")))

    async def check_instance(self, expected: str | None) -> None:
        """Raise EngineError unless the server's instance name is ``expected``; None accepts any server."""
        if expected is None:
            return
        try:
            found = await self.instance()
        except EngineRefusedError:
            found = None  # a server of another kind
        if found != expected:
            raise EngineError(
                f"{self.url} is answered by another server ({found or 'unnamed'}), not by the engine that was"
                f" started there ({expected})",
                hint="end that server, or choose another --port",
            )

    async def load(self) -> EngineLoad:
        """Return the running and queued requests and their tokens."""
        ranks = (await self._get("/v1/loads?include=core")).get("loads", [])
        return EngineLoad(
            requests=sum(rank.get("num_running_reqs", 0) + rank.get("num_waiting_reqs", 0) for rank in ranks),
            tokens=sum(rank.get("num_total_tokens", 0) for rank in ranks),
        )

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; new requests wait.

        ``retract`` drops the KV cache of running requests, which is recomputed on resume; ``in_place`` keeps
        it; ``abort`` ends the requests with the tokens generated so far.
        """
        await self._post("/pause_generation", {"mode": mode}, self._timeout)

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self._post("/continue_generation", {})

    async def flush_cache(self) -> None:
        """Drop every cached prefix. Raises EngineRefusedError while requests are running."""
        await self._post("/flush_cache", {})

    async def abort(self, rid: str | None) -> None:
        """End request ``rid``, or all if it is None; they return their tokens, finish reason ``abort``."""
        await self._post("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def update_weights(self, path: str, version: int, *, flush_cache: bool = True) -> None:
        """Load the weights in folder ``path`` as policy ``version``.

        Unless it is paused, the engine first finishes the running requests. On EngineError it keeps serving
        the old weights.
        """
        body = {"model_path": path, "weight_version": str(version), "flush_cache": flush_cache}
        answer = await self._post("/update_weights_from_disk", body, self._timeout)
        if not answer.get("success", False):
            raise EngineRefusedError(
                f"engine {self.url} refused the weights in {path}: {answer.get('message')}"
            )

    async def set_version(self, version: int) -> None:
        """Set the policy version of the served weights."""
        await self._post("/update_weight_version", {"new_version": str(version)})

    async def _collector(self, params: SamplingParams) -> Collector:
        if self._vocab_size is None:
            self._vocab_size = (await self.model_info()).vocab_size
        if self._vocab_size is None:
            raise EngineRefusedError(
                f"engine {self.url} reports no vocabulary size, and its model folder cannot be read here",
                hint="pass vocab_size to the client",
            )
        return Collector(
            url=self.url,
            vocab_size=self._vocab_size,
            max_new_tokens=params.max_new_tokens,
            logprobs_of=self._logprobs_of(params),
            version=await self._version_at_start(),
        )

    async def _collect(
        self, collector: Collector, path: str, body: bytes, headers: Mapping[str, str]
    ) -> None:
        """Read the stream to its end. Raises EngineInterruptedError if it ends before the generation."""
        start = time.monotonic()
        try:
            async with aclosing(self._http.stream(path, body, self._timeout, headers)) as events:
                async for event in events:
                    if "error" in event:
                        raise self._error(event["error"])
                    collector.add(self._chunk(event, len(collector.ids)))
            if not collector.is_finished:
                raise EngineError(f"engine {self.url} ended a stream without a finish reason")
        except (EngineRefusedError, EngineAnswerError):
            raise
        except EngineError as error:
            partial = collector.partial(time.monotonic() - start)
            raise EngineInterruptedError(error.message, partial, hint=error.hint) from error

    def _chunk(self, event: Mapping[str, Any], have: int) -> Chunk:
        """Return the chunk of an event after ``have`` tokens. Raises EngineAnswerError for another format."""
        try:
            return self._fields(event, have)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            excerpt = orjson.dumps(event)[:_EXCERPT].decode("utf-8", "replace")
            raise malformed(self.url, f"in an unknown format ({error!r}): {excerpt}") from error

    def _error(self, error: Any) -> EngineError:
        """Return the error that an event of a stream reports, with the status that it would have had."""
        details = error if isinstance(error, dict) else {"message": str(error)}
        return self._failure(str(details.get("message")), details.get("code"))

    def _failure(self, message: str, status: Any) -> EngineError:
        text = f"engine {self.url} answered {status}: {message[:_EXCERPT]}"
        if isinstance(status, int) and 400 <= status < 500:
            return EngineRefusedError(text)
        return EngineError(text)

    def _request(self, ids_json: bytes, params: SamplingParams, rid: str) -> tuple[str, bytes]:
        """Return the path and the body of a generation request."""
        rest = {
            "sampling_params": params.to_request(),
            "return_logprob": True,
            "stream": True,
            "rid": rid,
        }
        return "/generate", b'{"input_ids":' + ids_json + b"," + orjson.dumps(rest)[1:]

    def _fields(self, event: Mapping[str, Any], have: int) -> Chunk:
        """Return the chunk of an event, whose ids are those that it adds or all so far."""
        meta = event["meta_info"]
        new = int(meta["completion_tokens"]) - have
        reason = meta["finish_reason"] or {}
        if reason.get("type") == "abort" and reason.get("status_code"):
            raise self._failure(str(reason.get("message")), reason["status_code"])
        rows = meta["output_token_logprobs"]
        if len(event["output_ids"]) < new or len(rows) < new:
            raise malformed(
                self.url, f"{len(rows)} logprobs and {len(event['output_ids'])} ids for {new} tokens"
            )
        first = len(rows) - new
        return Chunk(
            ids=event["output_ids"][len(event["output_ids"]) - new :] if new > 0 else (),
            logprobs=[float(row[0]) for row in rows[first:]] if new > 0 else (),
            version=policy_version(meta.get("weight_version"), self.url),
            spans=version_spans(meta.get("weight_versions"), self.url),
            finish_reason=reason.get("type"),
            prompt_tokens=int(meta["prompt_tokens"]),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            logprobs_of=meta.get("logprobs_of"),
        )

    def _logprobs_of(self, params: SamplingParams) -> LogprobsOf:
        return logprobs_of("sglang", params.to_request())

    async def _version_at_start(self) -> int:
        """Return the version of tokens whose event names none; here every event does."""
        return 0

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._http.call("GET", path)

    async def _post(
        self, path: str, body: Mapping[str, Any], timeout: float = CONTROL_SECONDS
    ) -> dict[str, Any]:
        return await self._http.call("POST", path, body, timeout)

    async def _abort_quietly(self, rid: str) -> None:
        with suppress(EngineError, TimeoutError):  # the engine has ended, and the request with it
            async with asyncio.timeout(_ABORT_SECONDS):
                await self.abort(rid)


def instance_of(name: str) -> str | None:
    """Return the instance from a served model's name, ``NAME@INSTANCE``; None if there is none."""
    return name.rpartition("@")[2] if "@" in name else None


def vocab_size_of(folder: str) -> int | None:
    """Return ``vocab_size`` from the config in a model folder; None if it cannot be read here."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return size if isinstance(size, int) else None
