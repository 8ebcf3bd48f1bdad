"""Call an inference engine over SGLang's HTTP API, which the ``local`` engine serves too.

``engines/clients.py`` has the client for vLLM, whose API differs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import httpx

from agentrl.documents.model_call import VersionSpan
from agentrl.documents.sampling import LogprobsOf, SamplingParams, logprobs_of
from agentrl.errors import EngineError

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "retract", "in_place"]

_CONNECT_SECONDS = 10.0
CONTROL_SECONDS = 30.0
_EXCERPT = 300


class EngineRefusedError(EngineError):
    """The engine refused the request; a retry would fail too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The result of one generation; the spans in ``versions`` cover ``output_ids`` without a gap."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    engine_url: str
    logprobs_of: LogprobsOf = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model that an engine serves; ``vocab_size`` is None if the engine does not report it."""

    model_path: str
    version: int
    vocab_size: int | None


class EngineClient:
    """The client of one engine. Methods raise EngineError with the url, the status and the answer."""

    def __init__(
        self,
        url: str,
        timeout: float = 600.0,
        *,
        vocab_size: int | None = None,
        instance: str | None = None,
    ) -> None:
        """Create the client of the engine at ``url``.

        ``timeout`` limits one generation, in seconds. With ``vocab_size`` None, the engine is asked for it.
        With an ``instance``, prompts are sent only to a server that has this instance name.
        """
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._vocab_size = vocab_size
        self._unverified = instance
        self._instance = instance
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(CONTROL_SECONDS, connect=_CONNECT_SECONDS, read=timeout),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, rid: str) -> Generation:
        """Sample a continuation of ``input_ids``.

        An id outside the vocabulary raises EngineRefusedError here, because it crashes SGLang. ``rid`` must
        not be a prefix of the id of another request, because SGLang aborts by prefix. Cancelling the call
        aborts the request in the engine.
        """
        if self._unverified is not None:
            await self.check_instance(self._unverified)
            self._unverified = None
        await self._check_ids(input_ids)
        path, body = self._request(input_ids, params, rid)
        start = time.monotonic()
        try:
            answer = await self._post(path, body, self._timeout)
        except EngineError:
            self._unverified = self._instance  # the address may belong to another server by the next call
            raise
        except asyncio.CancelledError:
            await asyncio.shield(self._abort_quietly(rid))
            raise
        return self._generation(answer, params, time.monotonic() - start)

    async def health(self) -> bool:
        """Return whether the engine takes requests; False while it is paused, starting or unreachable."""
        try:
            response = await self._http.get("/health", timeout=CONTROL_SECONDS)
        except httpx.HTTPError:
            return False
        return response.status_code == 200

    async def model_info(self) -> ModelInfo:
        """Return the served model and its policy version."""
        info = await self._get("/model_info")
        path = str(info.get("model_path", ""))
        vocab_size = info.get("vocab_size")
        if vocab_size is None:
            vocab_size = await asyncio.to_thread(vocab_size_of, path)
        version = self._version(info.get("weight_version", "default"))
        return ModelInfo(model_path=path, version=version, vocab_size=vocab_size)

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

    async def load(self) -> int:
        """Return the number of running and queued requests."""
        answer = await self._get("/v1/loads?include=core")
        ranks = answer.get("loads", [])
        return sum(rank.get("num_running_reqs", 0) + rank.get("num_waiting_reqs", 0) for rank in ranks)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; new requests wait.

        ``retract`` drops the KV cache of running requests, which is recomputed on resume; ``in_place`` keeps
        it; ``abort`` ends the requests with the tokens generated so far.
        """
        await self._post("/pause_generation", {"mode": mode}, self._timeout)

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self._post("/continue_generation", {}, CONTROL_SECONDS)

    async def flush_cache(self) -> None:
        """Drop every cached prefix. Raises EngineRefusedError while requests are running."""
        await self._post("/flush_cache", {}, CONTROL_SECONDS)

    async def abort(self, rid: str | None) -> None:
        """End request ``rid``, or all if it is None; they return their tokens, finish reason ``abort``."""
        body = {"abort_all": True} if rid is None else {"rid": rid}
        await self._post("/abort_request", body, CONTROL_SECONDS)

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
        await self._post("/update_weight_version", {"new_version": str(version)}, CONTROL_SECONDS)

    def _request(
        self, input_ids: Sequence[int], params: SamplingParams, rid: str
    ) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of a generation request."""
        return "/generate", {
            "input_ids": list(input_ids),
            "sampling_params": params.to_request(),
            "return_logprob": True,
            "rid": rid,
        }

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._call("GET", path, None, CONTROL_SECONDS)

    async def _post(self, path: str, body: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        return await self._call("POST", path, body, timeout)

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float
    ) -> dict[str, Any]:
        return _object(await self._respond(method, path, body, timeout))

    async def _respond(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float
    ) -> httpx.Response:
        limits = httpx.Timeout(CONTROL_SECONDS, connect=_CONNECT_SECONDS, read=timeout)
        try:
            response = await self._http.request(method, path, json=body, timeout=limits)
        except httpx.TimeoutException as error:
            raise EngineError(f"engine {self.url}{path} did not answer within {timeout:g} s") from error
        except httpx.HTTPError as error:
            raise EngineError(
                f"engine {self.url}{path} cannot be reached: {type(error).__name__}: {error}",
                hint="see the engine's log; `agentrl audit run` lists the live engines",
            ) from error
        if response.status_code != 200:
            kind = EngineRefusedError if 400 <= response.status_code < 500 else EngineError
            raise kind(f"engine {self.url}{path} answered {response.status_code}: {response.text[:_EXCERPT]}")
        return response

    async def _check_ids(self, input_ids: Sequence[int]) -> None:
        if not input_ids:
            raise EngineRefusedError("a generation needs at least one input id")
        if self._vocab_size is None:
            self._vocab_size = (await self.model_info()).vocab_size
        if self._vocab_size is None:
            raise EngineRefusedError(
                f"engine {self.url} reports no vocabulary size, and its model folder cannot be read here",
                hint="pass vocab_size to the client",
            )
        low, high = min(input_ids), max(input_ids)
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise EngineRefusedError(f"token id {wrong} is outside the vocabulary of {self._vocab_size} ids")

    async def _abort_quietly(self, rid: str) -> None:
        try:
            await self.abort(rid)
        except EngineError:
            return  # the engine has ended, and the request with it

    def _generation(self, answer: Mapping[str, Any], params: SamplingParams, seconds: float) -> Generation:
        try:
            fields = self._fields(answer, params)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            excerpt = json.dumps(answer)[:_EXCERPT]
            raise EngineError(
                f"engine {self.url} answered in an unknown format ({error!r}): {excerpt}"
            ) from error
        ids, logprobs = fields["output_ids"], fields["logprobs"]
        if len(logprobs) != len(ids):
            raise EngineError(f"engine {self.url} gave {len(logprobs)} logprobs for {len(ids)} tokens")
        fields["versions"] = self._spans(fields["versions"], len(ids))
        return Generation(**fields, seconds=seconds, engine_url=self.url)

    def _fields(self, answer: Mapping[str, Any], params: SamplingParams) -> dict[str, Any]:
        """Return the fields of a Generation from an answer; ``versions`` are the engine's own spans."""
        meta = answer["meta_info"]
        ids = tuple(int(item) for item in answer["output_ids"])
        whole = {"version": meta.get("weight_version", "default"), "start": 0, "end": len(ids)}
        return {
            "output_ids": ids,
            "logprobs": tuple(float(item[0]) for item in meta["output_token_logprobs"][: len(ids)]),
            "versions": meta.get("weight_versions") or [whole],
            "finish_reason": meta["finish_reason"]["type"],
            "prompt_tokens": int(meta["prompt_tokens"]),
            "cached_tokens": int(meta.get("cached_tokens") or 0),
            "logprobs_of": meta.get("logprobs_of") or logprobs_of("sglang", params.to_request()),
        }

    def _spans(self, spans: Sequence[Mapping[str, Any]], count: int) -> tuple[VersionSpan, ...]:
        """Return the engine's version spans, cut to ``count`` tokens; EngineError if they leave a gap."""
        if count == 0:
            return ()
        found = tuple(
            VersionSpan(
                version=self._version(span["version"]), start=span["start"], end=min(span["end"], count)
            )
            for span in spans
            if span["start"] < min(span["end"], count)
        )
        edges = [0, *(span.end for span in found)]
        if [span.start for span in found] != edges[:-1] or edges[-1] != count:
            raise EngineError(
                f"engine {self.url} gave version spans that do not cover {count} tokens: {spans}"
            )
        return found

    def _version(self, name: Any) -> int:
        """Return the number of a weight version; SGLang names the initial weights ``default``, which is 0."""
        if name in ("default", None):
            return 0
        try:
            return int(name)
        except (TypeError, ValueError) as error:
            raise EngineError(
                f"engine {self.url} reports weight version {name!r}, which is not a policy version",
                hint="start it by `agentrl serve`",
            ) from error


def _object(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of a response; an empty dict for an empty or plain-text body."""
    if "json" not in response.headers.get("content-type", ""):
        return {}
    try:
        answer = response.json()
    except ValueError as error:
        raise EngineError(
            f"engine {response.url} answered invalid JSON: {response.text[:_EXCERPT]}"
        ) from error
    return answer if isinstance(answer, dict) else {"value": answer}


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
