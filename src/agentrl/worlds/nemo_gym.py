"""Environment ``nemo_gym``: rows of NeMo-Gym, whose resources server has their tools, state and reward.

    agentrl tasks load 'env:nemo_gym?url=http://127.0.0.1:8000&data=train.jsonl' --run_name …

A trajectory is a session by cookie: ``POST /seed_session`` with the row, each tool call at ``POST /TOOL``
with its arguments, and ``POST /verify`` with the row and the response in the form of OpenAI Responses.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

from agentrl.base.user_code import server_name
from agentrl.base.validation import SettingsModel, Text
from agentrl.documents.document import excerpt
from agentrl.documents.task import Task
from agentrl.documents.task_file import TaskSource
from agentrl.documents.task_json import BadTaskError
from agentrl.environments.environment import Environment, Observation, TaskRequest, environment
from agentrl.errors import OutageError, SessionLostError, TaskEnvironmentError, TaskFileError
from agentrl.tools.tool import Schema, function_schema
from agentrl.worlds.address import CONNECT_SECONDS, FromOne, get_json, read_options, server_url

NAME = "nemo_gym"
_EXAMPLE = f"env:{NAME}?url=http://127.0.0.1:8000&data=train.jsonl"
_AWAY = (429, 502, 503, 504)
"""Statuses by which a server or its proxy says that it is away; any other error is the request's."""
_CALL_SECONDS = 3600.0
"""Bound of an answer; --tool_timeout_seconds ends the call before."""
_EXCERPT = 300

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options(SettingsModel):
    url: str = ""
    data: Text
    max_sessions: FromOne | None = None
    max_turns: FromOne | None = None


@environment(NAME)
class NemoGym(Environment):
    """One row of NeMo-Gym; a message without a tool call is the answer that the server verifies."""

    options = tuple(item.name for item in fields(_Options))

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._row: Json = json.loads(task.meta[NAME]["row"])
        self._url = str(task.meta["server"])
        self._client: Any = None
        self._seeded = self._called = False
        self._output: list[Json] = []
        """What the model and its tools said, as items of a response."""

    @classmethod
    def tasks(cls, request: TaskRequest) -> Iterator[Mapping[str, Any]]:
        """Yield the first ``n`` rows of the file. Raises TaskFileError for a bad row and an absent server."""
        options = read_options(_Options, request.options, NAME, _EXAMPLE)
        url, path = server_url(options.url, NAME), options.data
        _require_server(url)
        for item in islice(TaskSource(Path(path)).items(), request.n):
            row = item.value
            try:
                if isinstance(row, BadTaskError):
                    raise row
                shown = _fields(row)
            except BadTaskError as error:
                raise TaskFileError(f"{path}:{item.line}: {error}", hint="give NeMo-Gym's rows") from error
            own = {"row": json.dumps(row), "max_sessions": options.max_sessions}
            turns = {} if options.max_turns is None else {"max_turns": options.max_turns}
            yield {**shown, "meta": {"server": url, NAME: own}, **turns}

    @classmethod
    def names(cls, task: Task) -> list[str]:
        """Return the server of the task."""
        return [server_name(str(task.meta.get("server")))]

    @classmethod
    def tool_schemas(cls, task: Task) -> Sequence[Schema]:
        """Return the tools of the row."""
        return _tools(json.loads(task.meta[NAME]["row"]))

    @classmethod
    def limit_of(cls, task: Task) -> int | None:
        """Return ``max_sessions`` of the address."""
        limit: int | None = task.meta[NAME]["max_sessions"]
        return limit

    async def setup(self) -> None:
        """Begin the session. Raises OutageError."""
        import httpx2

        from agentrl.base.proxies import ProxiedTransport

        secure = self._url.startswith("https:")
        timeout = httpx2.Timeout(_CALL_SECONDS, connect=CONNECT_SECONDS)
        self._client = httpx2.AsyncClient(
            base_url=self._url, timeout=timeout, transport=ProxiedTransport(verify=secure)
        )
        await self._seed()

    def step(self, text: str) -> Observation:
        """Take the message as the answer, and end."""
        content = {"type": "output_text", "text": text, "annotations": []}
        message = {"type": "message", "id": _id("msg"), "role": "assistant", "status": "completed"}
        self._output.append({**message, "content": [content]})
        return Observation("", done=True)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return what the server answers, also if it refuses the call. Raises SessionLostError."""
        self._called = True
        answer = await self._post(name, dict(arguments))
        call_id, text = _id("call"), str(answer.text)
        call = {"type": "function_call", "id": _id("fc"), "call_id": call_id, "status": "completed"}
        self._output += [
            {**call, "name": name, "arguments": json.dumps(arguments)},
            {"type": "function_call_output", "call_id": call_id, "output": text},
        ]
        return text

    async def reward(self) -> float:
        """Return the reward that the server gives to the response. Raises OutageError."""
        if not self._seeded:
            await self._seed()
        return float(await self._json("verify", {**self._row, "response": self._response()}, "reward"))

    async def teardown(self) -> None:
        """Close the connection; the protocol has no end of a session."""
        if self._client is not None:
            await self._client.aclose()

    async def _seed(self) -> None:
        await self._json("seed_session", self._row)
        self._seeded = True

    async def _json(self, path: str, body: Json, field: str | None = None) -> Any:
        """Return a field of the answer. Raises TaskEnvironmentError for a refusal."""
        answer = await self._post(path, body)
        try:
            found = answer.json() if answer.is_success else None
        except ValueError:
            found = None
        if found is None or (field is not None and not isinstance(found.get(field), (int, float))):
            raise TaskEnvironmentError(
                f"{self._url}/{path} answered {answer.status_code} {excerpt(answer.text, _EXCERPT)}",
                hint="its log says why; the rows must be those of this server",
            )
        return found if field is None else found[field]

    async def _post(self, path: str, body: Json) -> Any:
        """Return the answer. Raises OutageError, and SessionLostError once a tool has been called."""
        import httpx2

        try:
            answer = await self._client.post(f"/{path}", json=body)
            if answer.status_code not in _AWAY:
                return answer
            cause, why = None, f"it answered {answer.status_code}"
        except httpx2.HTTPError as error:
            cause, why = error, f"{type(error).__name__}: {error}"
        self._seeded = False
        problem = f"NeMo-Gym server {self._url} cannot be reached: POST /{path}: {why}"
        raise (SessionLostError(problem) if self._called else OutageError(problem)) from cause

    def _response(self) -> Json:
        return {
            "id": _id("resp"), "object": "response", "created_at": 0.0, "model": "policy",
            "output": self._output, "parallel_tool_calls": True, "tool_choice": "auto",
            "tools": self._row["responses_create_params"].get("tools") or [],
        }  # fmt: skip


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _require_server(url: str) -> None:
    """Raise TaskFileError unless a resources server of NeMo-Gym answers at ``url``."""
    paths = get_json(f"{url}/openapi.json", "a NeMo-Gym resources server").get("paths", {})
    missing = [path for path in ("/seed_session", "/verify") if path not in paths]
    if missing or {"/reset", "/step"} <= set(paths):
        problem = (
            f"it has no {missing[0]}" if missing else "it is played by /reset and /step (gymnasium_agent)"
        )
        raise TaskFileError(
            f"env:{NAME}: {url} cannot be used: {problem}", hint="give a resources server's url="
        )


def _fields(row: Any) -> Json:
    """Return system prompt, few-shot messages and query of a row. Raises BadTaskError."""
    params = row.get("responses_create_params") if isinstance(row, dict) else None
    if not isinstance(params, dict):
        raise BadTaskError("it has no responses_create_params")
    given = params.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise BadTaskError("it has no responses_create_params.input")
    messages = [_message(item) for item in given]
    system = [str(params.get("instructions"))] if params.get("instructions") else []
    while messages and messages[0]["role"] == "system":
        system.append(messages.pop(0)["content"])
    if not messages or messages[-1]["role"] != "user":
        raise BadTaskError("its input does not end with a message of the user")
    _tools(row)
    prompt = {"system_prompt": "\n\n".join(system)} if system else {}
    return {"query": messages[-1]["content"], "messages": messages[:-1], **prompt}


def _message(item: Any) -> dict[str, str]:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        kind = item.get("type") if isinstance(item, dict) else type(item).__name__
        raise BadTaskError(f"its input has an item of type {kind!r}; only messages can be shown")
    content = item.get("content")
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    texts = [part.get("text") for part in parts or [] if isinstance(part, dict)]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise BadTaskError("its input has content other than text")
    role = "system" if item.get("role") == "developer" else str(item.get("role"))
    return {"role": role, "content": "\n".join(map(str, texts))}


def _tools(row: Json) -> list[Schema]:
    tools = row["responses_create_params"].get("tools") or []
    other = [tool.get("type") for tool in tools if tool.get("type") != "function"]
    if other:
        raise BadTaskError(f"it has a tool of type {other[0]!r}; only functions can be called")
    return [function_schema(tool["name"], tool.get("description"), tool.get("parameters")) for tool in tools]
